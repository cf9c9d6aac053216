"""A lowered program in the native library: opened once over weights and a page pool, then one call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.native_adapters import NativePlaces
from octavo.backends.native_pages import NativeKVPool
from octavo.backends.native_records import Lowered, NativeOp, WeightSpec
from octavo.backends.native_rows import RowRecords
from octavo.backends.ops import ForwardBatch, SamplingRow
from octavo.core.errors import InvalidInput

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a program makes room for."""

    max_tokens: int = 512
    max_sequences: int = 64
    max_positions: int = 8192
    max_logit_rows: int = 0  # 0: every token and one more a sequence

    @property
    def logit_rows(self) -> int:
        """Rows that may ask for logits."""
        return self.max_logit_rows or self.max_tokens + self.max_sequences


class NativeProgram:
    """One forward pass. A step's arrays are read where they lie: int32, contiguous."""

    def __init__(
        self,
        engine: Any,
        pool: NativeKVPool,
        lowered: Lowered,
        weights: Mapping[WeightSpec, int],
        limits: StepLimits,
        vocab_size: int,
        places: NativePlaces | None = None,
    ) -> None:
        self._lib = lib.library()
        self.limits, self.vocab_size = limits, vocab_size
        spec, keep = _spec(lowered, weights, pool, limits, vocab_size)
        spec.adapters = None if places is None else places.handle
        self.handle = self._lib.octavo_program_open(engine.handle, pool.handle, spec)
        del keep
        if not self.handle:
            raise InvalidInput("program", vocab_size, self._lib.octavo_error().decode())
        self._engine, self._places = engine, places  # outlive the program, as does the pool that owns it
        lib.close_with(self, self._lib.octavo_program_close, self.handle)
        self._num_ops, self._buffers = len(lowered.ops), lowered.buffers
        self._num_layers = lowered.num_layers
        self._step = lib.Step(size=lib.step_size())
        self._sampled = np.empty(limits.logit_rows, np.int32)
        self._step.sampled = self._sampled.ctypes.data
        self._ids = self._sampled.data
        self._kept: ForwardBatch | None = None  # whose sizes and addresses are in `_step`
        self._seen: tuple[int, Floats] = (0, np.empty((0, vocab_size), np.float32))  # address and all rows of logits

    @property
    def num_bytes(self) -> int:
        """Bytes of activations and scratch."""
        return int(self._lib.octavo_program_bytes(self.handle))

    def barriers(self, tokens: int, logit_rows: int) -> int:
        """How often the threads meet between the records of a step in which every sequence has one token."""
        return int(self._lib.octavo_program_barriers(self.handle, tokens, logit_rows))

    def time_ops(self, batch: ForwardBatch) -> NDArray[np.float64]:
        """Seconds of each record of a step that draws nothing. Threads meet around each: the sum is above a step's."""
        seconds = np.zeros(self._num_ops)
        self._fill(batch)
        lib.check(self._lib.octavo_run_timed(self.handle, self._step, seconds.ctypes.data), "step")
        return seconds

    def run(self, batch: ForwardBatch, rows: Sequence[SamplingRow] = ()) -> tuple[Floats, list[int]]:
        """Logits [R, V], valid until the next step, and the ids drawn for `rows` (row i of the logits each; -1: none).

        Raises InvalidInput for a step outside the limits or with indices outside their arrays.
        """
        return self.run_rows(batch, RowRecords(rows))

    def run_rows(self, batch: ForwardBatch, asked: RowRecords) -> tuple[Floats, list[int]]:
        """`run`, drawing as `asked`, which has the logprobs thereafter."""
        step = self._step
        self._fill(batch)
        mass = None if batch.mass is None else self._mass(batch)
        step.samples, step.sampling = len(asked.records), ctypes.addressof(asked.records)
        lib.check(self._lib.octavo_run(self.handle, step), "step")
        if batch.mass is not None and mass is not None:
            batch.mass |= dict(enumerate(mass))
        return self._logits(step.logit_rows), self._sampled[: step.samples].tolist()

    def draw(self, batch: ForwardBatch) -> list[int]:
        """The ids drawn for `batch.draws`; -1: none. A batch with `kept` in its cache is read where it lay before."""
        step = self._step
        if batch is not self._kept:
            self._fill(batch)
            step.samples, step.sampling = len(batch.draws), batch.draws.ctypes.data
            self._kept = batch if "kept" in batch.cache else None
        lib.check(self._lib.octavo_run(self.handle, step), "step")
        return self._ids[: step.samples].tolist()

    def values(self, buffer: int) -> Floats:
        """A buffer as the last step left it, [rows, columns]; its own only in a program lowered with `keep`."""
        rows_of, _ = self._buffers[buffer]
        return self.rows(buffer, range(self._step.logit_rows if rows_of == lib.ROWS_R else self._step.tokens))

    def rows(self, buffer: int, rows: Sequence[int]) -> Floats:
        """Some rows of a buffer, copied; the step had them."""
        columns, stride = self._buffers[buffer][1], ctypes.c_int64()
        address = self._lib.octavo_values(self.handle, buffer, stride)
        size = (max(rows, default=-1) + 1) * stride.value
        memory = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)).reshape(-1, stride.value)
        return np.ascontiguousarray(memory[list(rows), :columns])

    def _fill(self, batch: ForwardBatch) -> None:
        self._kept = None
        step, table = self._step, batch.page_table
        step.tokens, step.sequences = len(batch.token_ids), len(batch.seq_lens)
        step.logit_rows, step.samples = len(batch.logit_rows), 0
        _, step.table_rows, step.table_width = table.shape
        step.token_ids, step.positions = batch.token_ids.ctypes.data, batch.positions.ctypes.data
        step.starts, step.rows = batch.cu_seqlens_q.ctypes.data, batch.logit_rows.ctypes.data
        step.table_row, step.page_table = batch.cache["table_row"].ctypes.data, table.ctypes.data
        silent = batch.cache.get("no_write")
        step.no_write = None if silent is None else silent.ctypes.data
        parents = batch.cache.get("parent_rows")
        step.parent_rows = None if parents is None else parents.ctypes.data
        places = batch.cache.get("adapters")
        step.adapters = None if places is None else places.ctypes.data
        shifts = batch.cache.get("shifts")
        step.shifts = None if shifts is None else shifts.ctypes.data
        step.scores = None

    def _mass(self, batch: ForwardBatch) -> Floats:
        """Room for the attention mass of a step, [layers, kv heads, keys], which the step is told of."""
        mass = np.empty((self._num_layers, batch.kv.num_kv_heads, int(batch.positions[-1]) + 1), np.float32)
        self._step.scores = mass.ctypes.data
        return mass

    def _logits(self, rows: int) -> Floats:
        if not rows:
            return np.empty((0, self.vocab_size), np.float32)
        stride = ctypes.c_int64()
        address = self._lib.octavo_logits(self.handle, stride)
        if address != self._seen[0]:
            memory = (ctypes.c_float * (self.limits.logit_rows * stride.value)).from_address(address)
            self._seen = address, np.ctypeslib.as_array(memory).reshape(-1, stride.value)[:, : self.vocab_size]
        return self._seen[1][:rows]


def _spec(
    lowered: Lowered, weights: Mapping[WeightSpec, int], pool: NativeKVPool, limits: StepLimits, vocab_size: int
) -> tuple[lib.ProgramSpec, list[Any]]:
    """The program as plain records, and what must live until the library has read them."""
    extra: list[int] = []
    records = [_record(op, weights, extra) for op in lowered.ops]
    ops = (lib.Op * len(records))(*records)
    buffers = (lib.Buffer * len(lowered.buffers))(*(lib.Buffer(rows, 0, cols) for rows, cols in lowered.buffers))
    frequencies = [(ctypes.c_double * len(rope.inv_freq))(*rope.inv_freq) for rope in lowered.ropes]
    ropes = (lib.Rope * max(1, len(frequencies)))(
        *(
            lib.Rope(ctypes.cast(f, ctypes.POINTER(ctypes.c_double)), rope.attention_factor, len(f))
            for f, rope in zip(frequencies, lowered.ropes, strict=True)
        )
    )
    layers = max(lowered.num_layers, 1)
    where = [pool.where.get(layer, (0, 0)) for layer in range(layers)]
    group, index = ((ctypes.c_int32 * layers)(*column) for column in zip(*where, strict=True))
    more = (ctypes.c_int32 * max(1, len(extra)))(*extra)
    spec = lib.ProgramSpec(
        size=ctypes.sizeof(lib.ProgramSpec),
        num_buffers=len(lowered.buffers),
        num_ops=len(records),
        num_ropes=len(lowered.ropes),
        num_layers=layers,
        num_groups=len(pool.groups),
        max_tokens=limits.max_tokens,
        max_sequences=limits.max_sequences,
        max_logit_rows=limits.logit_rows,
        max_positions=limits.max_positions,
        vocab_size=vocab_size,
        logits=lowered.logits,
        hidden=lib.NONE,
        num_extra=len(extra),
        buffers=buffers,
        ops=ops,
        ropes=ropes,
        layer_group=group,
        layer_index=index,
        extra=more,
    )
    return spec, [ops, buffers, frequencies, ropes, group, index, more]


def _record(op: NativeOp, weights: Mapping[WeightSpec, int], extra: list[int]) -> lib.Op:
    record = lib.Op(code=op.code)
    for places, given in ((record.inputs, op.inputs), (record.outputs, dict(enumerate(op.outputs)))):
        places[:] = [given.get(at, lib.NONE) for at in range(4)]
    record.weights[:] = [weights[op.weights[at]] if at in op.weights else lib.NONE for at in range(9)]
    numbers = list(op.i)
    if op.extra:
        numbers[0] = len(extra)
        extra += [weights[spec] for spec in op.extra]
    record.i[: len(numbers)] = numbers
    record.f[: len(op.f)] = op.f
    return record
