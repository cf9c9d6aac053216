"""The native backend: compiles a model's forward pass into one call of the C++ library a step.

It has no single ops: a model is captured, lowered (native_lower.py), its weights are packed, and the program runs.
Each row's result depends on that row, the weights, the formats and the instruction set alone: the same bytes whatever
runs beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.adapters import NO_ADAPTERS, AdapterRoom
from octavo.backends.capture import capture
from octavo.backends.host_pages import HostPages, swap_in, swap_out
from octavo.backends.native_adapters import NativePlaces, adapter_bytes
from octavo.backends.native_codes import CodeArrays, StoredCodes, StoredRows, code_arrays
from octavo.backends.native_formats import FormatPlan, resolve_kv_dtype
from octavo.backends.native_lower import lower
from octavo.backends.native_pages import MIN_PAGE, NativeKVPool, page_bytes
from octavo.backends.native_program import NativeProgram, StepLimits
from octavo.backends.native_records import Lowered, MatrixSpec, VectorSpec, WeightSpec
from octavo.backends.native_rows import LogitRows, RowRecords
from octavo.backends.native_sampling import Drawn, SamplingOps
from octavo.backends.native_smooth import smooth
from octavo.backends.native_steps import StepArrays
from octavo.backends.numpy_eviction import compact
from octavo.backends.numpy_pooling import normed, pool
from octavo.backends.ops import ForwardBatch, PoolSpan, SamplingRow
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Voting
from octavo.core.kv_groups import KVGroup

__all__ = ["NativeBackend", "NativeModel"]

Floats = NDArray[np.float32]
Read = Callable[[str], Any]  # weight name -> float32 array
ReadCodes = Callable[[str], StoredCodes | None]  # weight name -> its codes, where it is stored so
InFile = Callable[[str], StoredRows | None]  # weight name -> its bytes, where the library reads them


class NativeEngine:
    """The library's engine: a kernel table, a number of threads, packed weights."""

    def __init__(self, isa: str, threads: int) -> None:
        self._lib = lib.library()
        self.handle = self._lib.octavo_open(isa.encode() or None, threads)
        if not self.handle:
            wish = os.environ.get("OCTAVO_NATIVE_ISA", "")
            field, given = ("OCTAVO_NATIVE_ISA", wish) if wish and not isa else ("isa", isa)
            raise InvalidInput(field, given, self._lib.octavo_error().decode())
        lib.close_with(self, self._lib.octavo_close, self.handle)
        self.isa: str = self._lib.octavo_isa(self.handle).decode()
        self.threads = int(self._lib.octavo_threads(self.handle))

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take so far."""
        return int(self._lib.octavo_weight_bytes(self.handle))

    def matrix_bytes(self, shape: Sequence[int], kind: str, pair: bool) -> int:
        """Packed bytes of a matrix [n, k] (of each half of a pair)."""
        return lib.check(self._lib.octavo_matrix_bytes(self.handle, _matrix(shape, kind, pair)), "format")

    def add(self, spec: WeightSpec, read: Read, codes: ReadCodes | None = None, in_file: InFile | None = None) -> int:
        """Pack a weight, from its bytes in the file or its stored codes where it has such; its number."""
        if isinstance(spec, VectorSpec):
            values = _floats(read(spec.name)) if not spec.up else _pair_bias(read(spec.name), read(spec.up))
            return lib.check(self._lib.octavo_add_vector(self.handle, values.ctypes.data, values.size), spec.name)
        names = [name for name in (spec.name, spec.up) if name]
        rows = [row for row in map(in_file, names) if row is not None] if in_file is not None else []
        if len(rows) == len(names):
            return self._add_stored(spec, rows)
        stored = [codes(name) for name in names] if codes is not None else [None]
        halves = [half for half in stored if half is not None]
        found = code_arrays(spec.format, halves) if len(halves) == len(stored) else None
        return self._add_values(spec, read) if found is None else self._add_codes(spec, found)

    def declare(self, spec: WeightSpec, shape: Sequence[int]) -> int:
        """A weight of zeros, which takes no memory as long as nothing reads it; its number."""
        if isinstance(spec, MatrixSpec):
            record = _matrix(shape, spec.format, bool(spec.up))
            return lib.check(self._lib.octavo_declare_matrix(self.handle, record), spec.name)
        zeros = np.zeros(shape[0], np.float32)
        return self.add(spec, lambda name: zeros)

    def _add_stored(self, spec: MatrixSpec, halves: Sequence[StoredRows]) -> int:
        size = (lib.FORMATS[spec.format], *halves[0].shape)
        return lib.check(self._lib.octavo_add_stored(self.handle, *size, _stored(halves), len(halves)), spec.name)

    def pack_scaled(
        self, weight: int, halves: Sequence[StoredRows], columns: Floats | None, rows: Floats | None
    ) -> None:
        """A matrix from its file again, in its place: values times `columns` [K], of the last half times `rows` [N]."""
        factors = [None if factor is None else factor.ctypes.data for factor in (columns, rows)]
        code = self._lib.octavo_pack_scaled(self.handle, weight, _stored(halves), len(halves), *factors)
        lib.check(code, "matrix")

    def set_vector(self, weight: int, values: Floats) -> None:
        """Other values of a vector."""
        given = _floats(values)
        lib.check(self._lib.octavo_set_vector(self.handle, weight, given.ctypes.data, given.size), "vector")

    def _add_values(self, spec: MatrixSpec, read: Read) -> int:
        first = _floats(read(spec.name))
        second = _floats(read(spec.up)) if spec.up else None
        record = _matrix(first.shape, spec.format, second is not None)
        record.data = first.ctypes.data
        record.up = None if second is None else second.ctypes.data
        return lib.check(self._lib.octavo_add_matrix(self.handle, record), spec.name)

    def _add_codes(self, spec: MatrixSpec, found: CodeArrays) -> int:
        rows, columns = found.codes.shape
        record = _matrix((rows // 2 if spec.up else rows, columns), spec.format, bool(spec.up))
        record.codes, record.scale, record.group = found.codes.ctypes.data, found.scales.ctypes.data, found.group
        record.offset = None if found.offsets is None else found.offsets.ctypes.data
        return lib.check(self._lib.octavo_add_matrix(self.handle, record), spec.name)

    def row(self, weight: int, row: int, columns: int) -> Floats:
        """A row of a packed matrix as the kernels see it, [columns]."""
        values = np.empty(columns, np.float32)
        lib.check(self._lib.octavo_read_row(self.handle, weight, row, values.ctypes.data), "row")
        return values


class NativeBackend(SamplingOps):
    """Packs, pages, batches and samples for compiled models. One engine of the library stands behind each instance.

    Raises BackendUnavailable without the library, InvalidInput for an instruction set that this CPU lacks.
    """

    name = "native"

    def __init__(self, isa: str = "", threads: int = 0) -> None:
        self._lib = lib.library()
        self.engine = NativeEngine(isa, threads)

    @property
    def numerics_name(self) -> str:
        """What decides rounding besides formats: instruction set and kernel version."""
        return f"native/{self.engine.isa}/{self._lib.octavo_kernel_version().decode()}"

    # ---- models

    def weight(self, name: str, values: Any) -> Floats:
        """A weight before it is compiled: float32."""
        return _floats(values)

    def compile(
        self, model: Any, *, format: str = "auto", kv_dtype: str = "auto", adapters: AdapterRoom | None = None
    ) -> NativeModel:
        """A model made ready for this backend, with room for adapters; `load` gives it its weights. Raises InvalidInput
        for what cannot run."""
        room = adapters or NO_ADAPTERS
        if model.config.voting is not None and not lib.gives_mass():
            raise InvalidInput("kv_eviction", model.config.voting, "this native library lacks it: build it again")
        return NativeModel(self, model, FormatPlan(format), resolve_kv_dtype(kv_dtype, format), room)

    # ---- steps

    def allocate_kv(self, num_pages: int, page_size: int, groups: Sequence[KVGroup]) -> NativeKVPool:
        """A page pool for these KV groups. Raises InvalidInput for groups that it cannot hold."""
        return NativeKVPool(self.engine, num_pages, page_size, groups)

    def batch(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        query_lens: Sequence[int],
        page_table: Any,
        kv: NativeKVPool,
        *,
        table_rows: Sequence[int] | None = None,
        logit_rows: Sequence[int] | None = None,
        no_write: Sequence[bool] = (),
        request_ids: Sequence[str] = (),
        parent_rows: Sequence[Sequence[int]] = (),
        shifts: Sequence[int] = (),
    ) -> ForwardBatch:
        """A step from plain lists, as in the other backends. The library works slots out from the page tables.

        `page_table` is lists [G][S][*], or the array of `step_arrays` with `table_rows` [S], the slot of each sequence.
        """
        starts = np.array([0, *accumulate(query_lens)], np.int32)
        places = np.asarray(positions, np.int32)
        table = page_table if isinstance(page_table, np.ndarray) else _table(page_table)
        slots = np.arange(len(query_lens), dtype=np.int32) if table_rows is None else np.asarray(table_rows, np.int32)
        cache: dict[Any, Any] = {"table_row": slots}
        if any(shifts):
            cache["shifts"] = _by_table_row(table.shape[1], slots, shifts)
        if any(no_write):
            cache["no_write"] = np.asarray(no_write, np.uint8)
        lens = places[starts[1:] - 1] + 1
        if any(parent_rows):
            cache["parent_rows"] = _parents(query_lens, parent_rows)
            lens = places[starts[:-1]] + np.diff(starts)
        rows = starts[1:] - 1 if logit_rows is None else np.asarray(logit_rows, np.int32)
        return ForwardBatch(
            token_ids=np.asarray(token_ids, np.int32),
            positions=places,
            cu_seqlens_q=starts,
            seq_lens=lens,
            page_table=table,
            slot_mapping=None,
            logit_rows=rows,
            kv=kv,
            request_ids=tuple(request_ids),
            cache=cache,
        )

    def step_arrays(self, num_groups: int) -> StepArrays:
        """What a runner keeps by slot: page tables, which `batch` takes as they lie, and records for `draw`."""
        return StepArrays(num_groups)

    def copy_pages(self, kv: NativeKVPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source to page target, for each pair."""
        kv.copy_pages(pairs)

    def move_slots(self, kv: NativeKVPool, moves: Sequence[tuple[int, int]]) -> None:
        """Slot source to slot target, in order."""
        kv.move_slots(moves)

    def compact(
        self,
        kv: NativeKVPool,
        sources: Sequence[int],
        targets: Sequence[int],
        mass: Mapping[int, Floats],
        policy: Voting,
        carried: Mapping[int, Floats] | None = None,
    ) -> dict[int, Floats]:
        """What stays of the tokens in pages sources to pages targets, chosen for each layer and head by its mass, and
        carried; that of those that stay.
        """
        return compact(kv.keep, sources, targets, mass, policy, carried)

    def swap_out(self, kv: NativeKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source into host page target, for each pair."""
        swap_out(kv, host, pairs)

    def swap_in(self, kv: NativeKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Host page source into page target, for each pair. Raises CorruptPages, changing nothing, for bad ones."""
        swap_in(kv, host, pairs)

    def select_rows(self, x: Any, batch: ForwardBatch) -> LogitRows:
        """Rows batch.logit_rows, where they lie."""
        return x.take(batch.logit_rows) if isinstance(x, LogitRows) else LogitRows(x, batch.logit_rows)

    def pool(self, x: Floats, spans: Sequence[PoolSpan]) -> list[NDArray[np.float64]]:
        """One vector for each span. [S, H]."""
        return pool(x, spans)

    def to_lists(self, x: Any) -> Any:
        """Plain nested lists."""
        return np.asarray(x).tolist() if isinstance(x, (np.ndarray, LogitRows)) else x

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """The value as an array."""
        return np.asarray(x)


class NativeModel:
    """A model over the native backend: its forward pass is a program. What else it is, the wrapped model answers."""

    def __init__(
        self, backend: NativeBackend, model: Any, formats: FormatPlan, kv_dtype: str, room: AdapterRoom = NO_ADAPTERS
    ) -> None:
        self.backend, self.model, self.formats, self.kv_dtype = backend, model, formats, kv_dtype
        self.room = room
        self._factors: dict[str, tuple[Floats | None, Floats | None]] = {}  # of smoothed matrices: columns, rows
        self.shapes: Mapping[str, Sequence[int]] = model.weight_shapes()
        self.lowered = self.lower()
        self.limits = StepLimits()  # of pools for which nobody called `open`
        self._weights: dict[WeightSpec, int] = {}
        self._final_norm: NDArray[np.float64] | None = None  # as the model has it, whatever was smoothed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def lower(self, keep: bool = False) -> Lowered:
        """The native form of the forward pass; `keep`: one whose values can all be read after a step."""
        return lower(capture(self.model.forward, self.shapes), self.formats, keep, bool(self.room.places) and not keep)

    def adapter_places(self) -> NativePlaces:
        """Where adapters lie."""
        return self._places

    @cached_property
    def _places(self) -> NativePlaces:
        smoothed = lambda name: self._factors.get(f"{name}.weight", (None, None))  # noqa: E731
        return NativePlaces(self.room, self._targets(), smoothed, self._half)

    @property
    def _half(self) -> bool:
        """Adapters are kept in bf16 beside weights that are rounded as well."""
        return self.weight_format != "fp32"

    def _targets(self) -> dict[str, Sequence[int]]:
        """What adapters may change, with its shape `[N, K]`."""
        return {name: self.shapes[f"{name}.weight"] for name in self.lowered.targets}

    def adapter_bytes(self) -> int:
        """Bytes of all places for adapters."""
        return adapter_bytes(self.room, self._targets(), self._half)

    def kv_groups(self, dtype: str = "") -> tuple[KVGroup, ...]:
        """The KV groups, in the type that this engine keeps."""
        groups: tuple[KVGroup, ...] = self.model.kv_groups(dtype or self.kv_dtype)
        return groups

    @property
    def weight_format(self) -> str:
        """The formats as one word: part of what makes bytes equal."""
        return self.formats.describe()

    def make_room(self, pool: NativeKVPool, scheduling: Any) -> None:
        """`open` for the limits of a scheduler (max_batched_tokens, max_running_requests, max_seq_len)."""
        self.open(pool, _limits(scheduling))

    def weight_bytes(self) -> int:
        """Bytes of all weights, packed."""
        return sum(self._spec_bytes(spec) for spec in self.lowered.weights())

    def _spec_bytes(self, spec: WeightSpec) -> int:
        shape = self.shapes[spec.name]
        if isinstance(spec, MatrixSpec):
            return self.backend.engine.matrix_bytes(shape, spec.format, bool(spec.up))
        return 4 * int(np.prod(shape)) * (2 if spec.up else 1)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page. Raises InvalidInput for a size that the backend has no pages of."""
        return page_bytes(self.backend.engine.handle, page_size, self.kv_groups())

    def step_bytes(self, scheduling: Any, page_size: int) -> tuple[int, int]:
        """What the largest step takes: activations with working memory, and logits.

        Exactly what `make_room` will take: a program is opened over weights that are only declared.
        """
        limits = _limits(scheduling)
        engine = NativeEngine(self.backend.engine.isa, self.backend.engine.threads)
        weights = {spec: engine.declare(spec, self.shapes[spec.name]) for spec in self.lowered.weights()}
        groups = self.kv_groups()
        pool = NativeKVPool(engine, len(groups), page_size, groups)
        program = NativeProgram(engine, pool, self.lowered, weights, limits, self.model.config.vocab_size)
        logits = 4 * limits.logit_rows * (-(-int(self.model.config.vocab_size) // 16) * 16)
        return program.num_bytes - logits, logits

    def describe(self) -> str:
        """How it runs, in one line."""
        engine = self.backend.engine
        threads = f"{engine.threads} thread{'s' * (engine.threads > 1)}"
        return f"native: {engine.isa}, {threads}, weights {self.weight_format}, keys and values {self.kv_dtype}"

    def load(
        self,
        read: Read,
        codes: ReadCodes | None = None,
        in_file: InFile | None = None,
        sample: Sequence[int] = (),
    ) -> None:
        """Pack every weight. `read` gives one by its checkpoint name, prepared; of a matrix, `codes` gives how it is
        stored and `in_file` its bytes, each where there are such. `sample`: token ids of a text, to `smooth` with."""
        for spec in self.lowered.weights():
            self._weights[spec] = self.backend.engine.add(spec, read, codes, in_file)
        states = self.lowered.states
        if states is not None and states.norm is not None:
            self._final_norm = np.asarray(read(states.norm.name), np.float64)
        if sample and in_file is not None:
            smooth(self, read, in_file, sample)

    def pack_scaled(
        self, spec: MatrixSpec, halves: Sequence[StoredRows], columns: Floats | None, rows: Floats | None
    ) -> None:
        """`NativeEngine.pack_scaled` of a weight."""
        self.backend.engine.pack_scaled(self._weights[spec], halves, columns, rows)
        for name in filter(None, (spec.name, spec.up)):
            self._factors[f"{name}"] = columns, rows if name == (spec.up or spec.name) else None

    def set_vector(self, spec: VectorSpec, values: Floats) -> None:
        """`NativeEngine.set_vector` of a weight."""
        self.backend.engine.set_vector(self._weights[spec], values)

    def run_once(
        self, lowered: Lowered, ids: Sequence[int], logit_rows: Sequence[int]
    ) -> tuple[NativeProgram, NativeKVPool]:
        """A program that has run one sequence of tokens, and its pages, which are to live as long."""
        groups, rows = self.kv_groups(), list(logit_rows)
        pages = -(-len(ids) // MIN_PAGE)
        pool = self.backend.allocate_kv(pages * len(groups), MIN_PAGE, groups)
        limits = StepLimits(len(ids), 1, len(ids), len(rows))
        vocab = self.model.config.vocab_size
        program = NativeProgram(self.backend.engine, pool, lowered, self._weights, limits, vocab)
        tables = [[list(range(g * pages, (g + 1) * pages))] for g in range(len(groups))]
        program.run(self.backend.batch(ids, list(range(len(ids))), [len(ids)], tables, pool, logit_rows=rows))
        return program, pool

    def packed_row(self, name: str, row: int) -> Floats:
        """A row of a matrix as the kernels see it, [K]; of a pair, `name` is that of its half."""
        for spec, weight in self._weights.items():
            if isinstance(spec, MatrixSpec) and name in (spec.name, spec.up):
                rows, columns = self.shapes[name]
                return self.backend.engine.row(weight, row + (rows if name == spec.up else 0), columns)
        raise InvalidInput("weight", name, "is no matrix of this model")

    def open(self, pool: NativeKVPool, limits: StepLimits) -> NativeProgram:
        """Make room for steps up to `limits` over a pool, once: steps allocate nothing."""
        vocab = self.model.config.vocab_size
        places = self._places if self.room.places else None
        program = NativeProgram(self.backend.engine, pool, self.lowered, self._weights, limits, vocab, places)
        pool.programs[self] = program
        return program

    def forward(self, ops: Any, w: Any, batch: ForwardBatch) -> Floats:
        """Logits [R, V] of the rows `batch.logit_rows`; with `batch.sampling`, draws them in the same call."""
        asked = RowRecords(batch.sampling, logprobs=True)
        logits, ids = self._program(batch).run_rows(batch, asked)
        self.backend._drawn = Drawn(logits, ids, batch.sampling, asked.logprobs)
        return logits

    def forward_states(self, ops: Any, w: Any, batch: ForwardBatch, rows: Sequence[int]) -> tuple[Floats, Floats]:
        """`forward`, and the final hidden states [len(rows), H] of these token rows."""
        return self.forward(ops, w, batch), self.last_states(batch, rows)

    def last_states(self, batch: ForwardBatch, rows: Sequence[int]) -> Floats:
        """The final hidden states [len(rows), H] of token rows of the step that has just run. Raises InvalidInput for a
        model that selects no rows."""
        states = self.lowered.states
        if states is None:
            raise InvalidInput("model", self.model.config.architecture, "has no hidden states to give")
        found = self._program(batch).rows(states.value, rows)
        return found if self._final_norm is None else normed(found, self._final_norm, states.eps)

    def draw(self, batch: ForwardBatch) -> list[int]:
        """The ids that `batch.draws` asks for; -1 where none can be drawn."""
        return self._program(batch).draw(batch)

    def _program(self, batch: ForwardBatch) -> NativeProgram:
        program: NativeProgram | None = batch.kv.programs.get(self)
        return self.open(batch.kv, self.limits) if program is None else program


def _limits(scheduling: Any) -> StepLimits:
    rows = getattr(scheduling, "max_logit_rows", 0)
    return StepLimits(scheduling.max_batched_tokens, scheduling.max_running_requests, scheduling.max_seq_len, rows)


def _floats(values: Any) -> Floats:
    return np.ascontiguousarray(values, np.float32)


def _stored(halves: Sequence[StoredRows]) -> Any:
    records = [lib.Stored(h.type, h.heads, h.mapped, 0, h.data.ctypes.data, h.data.size) for h in halves]
    return (lib.Stored * len(records))(*records)


def _matrix(shape: Sequence[int], kind: str, pair: bool) -> lib.Matrix:
    return lib.Matrix(format=lib.FORMATS[kind], interleaved=pair, n=shape[0], k=shape[1])


def _pair_bias(gate: Any, up: Any) -> Floats:
    """Two biases [I] in packed order: alternating in 16s, padded to panels of 64."""
    size = len(gate)
    half = np.zeros((2, -(-2 * size // 64) * 32), np.float32)
    half[0, :size], half[1, :size] = gate, up
    return np.ascontiguousarray(half.reshape(2, -1, 16).swapaxes(0, 1)).ravel()


def _parents(query_lens: Sequence[int], parent_rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Of all rows of the step, chains as trees without a fork."""
    rows = [parents or range(-1, length - 1) for length, parents in zip(query_lens, parent_rows, strict=True)]
    return np.fromiter(chain.from_iterable(rows), np.int32)


def _by_table_row(rows: int, slots: NDArray[np.int32], values: Sequence[int]) -> NDArray[np.int32]:
    """A value of each sequence where its row in the page tables has it; of the others 0."""
    found = np.zeros(rows, np.int32)
    found[slots] = values
    return found


def _table(pages: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Page tables [G][S][*] as one array, padded with -1."""
    width = max((len(row) for group in pages for row in group), default=1)
    table = np.full((len(pages), max(map(len, pages)), max(width, 1)), -1, np.int32)
    for group, rows in enumerate(pages):
        for row, entries in enumerate(rows):
            table[group, row, : len(entries)] = entries
    return table


def with_sampling(batch: ForwardBatch, rows: Sequence[SamplingRow]) -> ForwardBatch:
    """The batch, asking for a draw from row i of its logits as `rows[i]` says."""
    return replace(batch, sampling=tuple(rows))
