"""The reference backend: the ops in the standard library, on nested lists of Python floats. The oracle.

It reads like the maths. Sums run in index order and each row is computed on its own, so a row's bits never depend on
what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import add as plus
from operator import mul
from typing import Any

from octavo.backends import sampling
from octavo.backends.host_pages import HostPages, swap_in, swap_out
from octavo.backends.list_attention import Scoring, attend, mass_of, path_lanes
from octavo.backends.list_pages import ListKVPool, split_heads
from octavo.backends.ops import (
    NO_SLOT,
    ForwardBatch,
    PoolSpan,
    RopeTable,
    RowAdapters,
    SamplingRow,
    batch_fields,
    check_mass,
    check_sinks,
)
from octavo.backends.quantization import QuantizedTensor
from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.kv_eviction import Voting

Vector = list[float]
Matrix = list[Vector]
Access = tuple[str, int, int, str]  # request, page, position, "read" or "write"

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class ReferenceBackend:
    """Every op in use, in the standard library. `access_log`, when a list, receives every page access."""

    name = "reference"

    def __init__(self) -> None:
        self.access_log: list[Access] | None = None

    # ---- values in and out

    def weight(self, name: str, values: Any) -> Any:
        """A weight handle: nested lists of floats from lists or anything with `tolist`; quantized tensors pass."""
        if isinstance(values, QuantizedTensor):
            return values
        nested = values.tolist() if hasattr(values, "tolist") else values
        return _floats(nested)

    def to_lists(self, x: Any) -> Any:
        """Plain nested lists of a backend value."""
        return x

    def allocate_kv(self, num_pages: int, page_size: int, groups: Sequence[Any]) -> ListKVPool:
        """An empty page pool for these KV groups."""
        return ListKVPool(num_pages, page_size, groups)

    def batch(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        query_lens: Sequence[int],
        page_table: Sequence[Sequence[Sequence[int]]],
        kv: ListKVPool,
        *,
        logit_rows: Sequence[int] | None = None,
        no_write: Sequence[bool] = (),
        request_ids: Sequence[str] = (),
        parent_rows: Sequence[Sequence[int]] = (),
        shifts: Sequence[int] = (),
    ) -> ForwardBatch:
        """A step from plain lists: S sequences of `query_lens` tokens, page tables [G][S][*].

        `logit_rows` defaults to the last token of each sequence; `no_write[r]` says that row r's K/V is already stored;
        `parent_rows[r]` makes its rows a tree, `shifts[r]` has them turn further: see `ops.batch_fields`.
        """
        fields = batch_fields(token_ids, positions, query_lens, page_table, kv.page_size, no_write, parent_rows, shifts)
        rows = [stop - 1 for stop in fields["cu_seqlens_q"][1:]] if logit_rows is None else list(logit_rows)
        return ForwardBatch(**fields, logit_rows=rows, kv=kv, request_ids=tuple(request_ids))

    # ---- row-wise ops

    def embed(self, ids: Sequence[int], table: Any) -> Matrix:
        """[T], [V, H] -> [T, H]."""
        if isinstance(table, QuantizedTensor):
            return [table.row(i) for i in ids]
        return [list(table[i]) for i in ids]

    def rms_norm(
        self, x: Matrix, weight: Vector, eps: float, *, residual: Matrix | None = None
    ) -> tuple[Matrix, Matrix]:
        """s = x + residual (or x); (rms_norm(s) * weight, s). [T, H]."""
        s = x if residual is None else self.add(x, residual)
        return [_rms(row, weight, eps) for row in s], s

    def layer_norm(self, x: Matrix, weight: Vector, bias: Vector | None, eps: float) -> Matrix:
        """(x - mean) / sqrt(variance + eps) * weight + bias. [T, H]."""
        return [_layer_norm(row, weight, bias, eps) for row in x]

    def linear(
        self, x: Matrix, weight: Any, bias: Vector | None = None, *, adapters: RowAdapters | None = None
    ) -> Matrix:
        """x[T, K] @ weight[N, K]^T + bias[N], and what the rows' adapters add -> [T, N]."""
        if isinstance(weight, QuantizedTensor):
            y = [weight.times(row) for row in x]
        else:
            y = [[sum(map(mul, row, w)) for w in weight] for row in x]
        y = y if bias is None else [list(map(plus, row, bias)) for row in y]
        return y if adapters is None else _adapted(y, x, adapters)

    def qk_norm(self, x: Matrix, weight: Vector, eps: float, *, head_dim: int) -> Matrix:
        """rms_norm of each head. [T, heads * head_dim]."""
        return [[y for head in split_heads(row, head_dim) for y in _rms(head, weight, eps)] for row in x]

    def gated_activation(self, gate: Matrix, up: Matrix, *, kind: str = "silu") -> Matrix:
        """act(gate) * up. [T, I]. Raises InvalidInput for an unknown kind."""
        act = _activation(kind)
        return [[act(g) * u for g, u in zip(gs, us, strict=True)] for gs, us in zip(gate, up, strict=True)]

    def moe(
        self,
        x: Matrix,
        router: Any,
        gate: Sequence[Any],
        up: Sequence[Any],
        down: Sequence[Any],
        *,
        top_k: int,
        normalize: bool,
        kind: str = "silu",
    ) -> Matrix:
        """Each row through its top_k experts, combined in slot order. [T, H]."""
        out = []
        for row, scores in zip(x, self.linear(x, router), strict=True):
            total = [0.0] * len(row)
            for expert, share in _route(scores, top_k, normalize):
                hidden = self.gated_activation(
                    self.linear([row], gate[expert]), self.linear([row], up[expert]), kind=kind
                )
                y = self.linear(hidden, down[expert])[0]
                total = [a + share * b for a, b in zip(total, y, strict=True)]
            out.append(total)
        return out

    def add(self, x: Matrix, y: Matrix) -> Matrix:
        """x + y."""
        return [list(map(plus, a, b)) for a, b in zip(x, y, strict=True)]

    def scale(self, x: Matrix, s: float) -> Matrix:
        """x * s."""
        return [[v * s for v in row] for row in x]

    def select_rows(self, x: Matrix, batch: ForwardBatch) -> Matrix:
        """Rows batch.logit_rows: [T, H] -> [R, H]."""
        return [x[i] for i in batch.logit_rows]

    def logits(self, x: Matrix, weight: Any, *, soft_cap: float = 0.0) -> Matrix:
        """x[R, H] @ weight[V, H]^T, soft-capped -> [R, V]."""
        y = self.linear(x, weight)
        return [[soft_cap * math.tanh(v / soft_cap) for v in row] for row in y] if soft_cap else y

    # ---- positions and pages

    def rope(
        self, q: Matrix, k: Matrix, batch: ForwardBatch, *, rope: RopeTable, head_dim: int
    ) -> tuple[Matrix, Matrix]:
        """Rotate every head of q[T, Q] and k[T, KV] by its token's position."""
        turns = batch.cache.get(rope)
        if turns is None:
            positions = batch.positions if batch.rope_positions is None else batch.rope_positions
            turns = batch.cache[rope] = [_turns(position, rope) for position in positions]
        return _rotate(q, turns, head_dim), _rotate(k, turns, head_dim)

    def write_kv(self, k: Matrix, v: Matrix, batch: ForwardBatch, *, layer: int) -> None:
        """Store k[T, KV] and v[T, KV] of one layer at slot_mapping."""
        pool: ListKVPool = batch.kv
        group, index = pool.where[layer]
        key_group = pool.groups[group]
        for row, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q)):
            for t in range(start, stop):
                slot = batch.slot_mapping[group][t]
                if slot == NO_SLOT:
                    continue
                page, offset = divmod(slot, pool.page_size)
                pool.lanes(page, index)[offset] = (
                    split_heads(k[t], key_group.k_dim),
                    split_heads(v[t], key_group.v_dim),
                )
                self._log(batch, row, page, batch.positions[t], "write")

    def attention(
        self,
        q: Matrix,
        batch: ForwardBatch,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Sequence[float] | None = None,
        head_dim: int,
        sink_tokens: int = 0,
        rope: RopeTable | None = None,
    ) -> Matrix:
        """softmax(scale * q . k) . v over each row's visible positions, read from pages. [T, Q] -> [T, Q]."""
        scoring = Scoring(scale, window, soft_cap, sinks, sink_tokens)
        if rope is not None:
            check_sinks(sink_tokens, window, rope, batch.parent_rows)
        out: Matrix = []
        if batch.mass is not None:
            check_mass(window, batch)
            lanes = self._read_lanes(batch, 0, layer, 0, batch.positions[-1] + 1)
            batch.mass[layer] = mass_of([split_heads(row, head_dim) for row in q], batch.positions, lanes, scoring)
        for row, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q)):
            if start == stop:
                continue
            begin, first = batch.positions[start], scoring.first_visible(batch.positions[start])
            end = begin + stop - start
            lanes = self._read_lanes(batch, row, layer, first, end) if first < end else []
            sunk = self._read_lanes(batch, row, layer, 0, min(sink_tokens, end)) if sink_tokens else []
            parents = batch.parent_rows[row] if batch.parent_rows else ()
            for t in range(start, stop):
                heads, position = split_heads(q[t], head_dim), batch.positions[t]
                seen = path_lanes(lanes, begin - first, parents, t - start) if parents else lanes
                turned = _turned_back(heads, scoring.turned_by(position), rope) if rope and sunk else ()
                out.append(attend(heads, position, first, seen, scoring, sunk[: position + 1], turned))
        return out

    def copy_pages(self, kv: ListKVPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source to page target, for each (source, target)."""
        for source, target in pairs:
            kv.copy_page(source, target)

    def move_slots(self, kv: ListKVPool, moves: Sequence[tuple[int, int]]) -> None:
        """Slot source to slot target, in order."""
        for source, target in moves:
            kv.move_slot(source, target)

    def compact(
        self,
        kv: ListKVPool,
        sources: Sequence[int],
        targets: Sequence[int],
        mass: Mapping[int, Matrix],
        policy: Voting,
        carried: Mapping[int, Matrix] | None = None,
    ) -> dict[int, Matrix]:
        """What stays of the tokens in pages sources to pages targets, chosen for each layer and head by its mass, and
        carried; that of those that stay.
        """
        stays: dict[int, Matrix] = {}
        for layer, heads in mass.items():
            before = carried[layer] if carried else [[]] * len(heads)
            scores = [list(map(plus, old, new)) + new[len(old) :] for old, new in zip(before, heads, strict=True)]
            kept = [policy.kept(each) if targets else range(len(each)) for each in scores]
            if targets:
                kv.keep(kv.where[layer][1], sources, targets, kept)
            stays[layer] = [[each[at] for at in places] for each, places in zip(scores, kept, strict=True)]
        return stays

    def swap_out(self, kv: ListKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source into host page target, for each pair."""
        swap_out(kv, host, pairs)

    def swap_in(self, kv: ListKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Host page source into page target, for each pair. Raises CorruptPages, changing nothing, for bad ones."""
        swap_in(kv, host, pairs)

    # ---- sampling: the definitions are in sampling.py

    def process_logits(self, logits: Matrix, rows: Sequence[SamplingRow]) -> Matrix:
        """New logits after bias, bans and penalties. [R, V]."""
        return [sampling.process_row(row, wanted) for row, wanted in zip(logits, rows, strict=True)]

    def sample(self, logits: Matrix, rows: Sequence[SamplingRow]) -> list[int]:
        """One id per row. Raises RowError naming the rows from which nothing can be drawn."""
        return sampling.sample(logits, rows)

    def logprobs(
        self, logits: Matrix, ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs]:
        """Logprobs of ids[r], of the k[r] most likely and of chosen[r], from raw logits."""
        return [sampling.logprobs_row(*row) for row in zip(logits, ids, k, chosen, strict=True)]

    def pool(self, x: Matrix, spans: Sequence[PoolSpan]) -> Matrix:
        """One vector for each span. [S, H]."""
        return [_pooled(x[span.first : span.stop], span) for span in spans]

    # ---- inside

    def _read_lanes(self, batch: ForwardBatch, row: int, layer: int, first: int, stop: int) -> list[Any]:
        """(key, value) by head of positions first .. stop - 1 of one sequence."""
        group, index = batch.kv.where[layer]
        pages, size = batch.page_table[group][row], batch.kv.page_size
        lanes: list[Any] = []
        for place in range(first // size, (stop - 1) // size + 1):
            low, high = max(first - place * size, 0), min(stop - place * size, size)
            lanes += batch.kv.lanes(pages[place], index)[low:high]
            if self.access_log is not None:
                for offset in range(low, high):
                    self._log(batch, row, pages[place], place * size + offset, "read")
        if None in lanes:
            missing = first + lanes.index(None)
            raise InvariantBroken(f"position {missing} of sequence {row} is read but was never written")
        return lanes

    def _log(self, batch: ForwardBatch, row: int, page: int, position: int, kind: str) -> None:
        if self.access_log is not None:
            request = batch.request_ids[row] if batch.request_ids else ""
            self.access_log.append((request, page, position, kind))


def _pooled(rows: Matrix, span: PoolSpan) -> Vector:
    if span.kind == "last":
        return rows[-1]
    total = rows[0] if span.carried is None else span.carried
    for row in () if span.kind == "cls" else rows[span.carried is None :]:
        total = list(map(plus, total, row))
    return list(total)


def _adapted(y: Matrix, x: Matrix, adapters: RowAdapters) -> Matrix:
    out = []
    for row, inputs, place in zip(y, x, adapters.rows, strict=True):
        if place in adapters.factors:
            a, b, scale = adapters.factors[place]
            low = [scale * sum(map(mul, inputs, w)) for w in a]  # [r]
            row = [value + sum(map(mul, low, w)) for value, w in zip(row, b, strict=True)]
        out.append(row)
    return out


def _floats(values: Any) -> Any:
    if values and isinstance(values[0], (list, tuple)):
        return [_floats(row) for row in values]
    return [float(v) for v in values]


def _rms(row: Sequence[float], weight: Vector, eps: float) -> Vector:
    inverse = 1.0 / math.sqrt(sum(map(mul, row, row)) / len(row) + eps)
    return [v * inverse * w for v, w in zip(row, weight, strict=True)]


def _layer_norm(row: Vector, weight: Vector, bias: Vector | None, eps: float) -> Vector:
    mean = sum(row) / len(row)
    centred = [v - mean for v in row]
    inverse = 1.0 / math.sqrt(sum(map(mul, centred, centred)) / len(row) + eps)
    y = [v * inverse * w for v, w in zip(centred, weight, strict=True)]
    return y if bias is None else list(map(plus, y, bias))


def _silu(g: float) -> float:
    if g < -700.0:  # exp(-g) would overflow; the limit is -0.0
        return -0.0
    return g / (1.0 + math.exp(-g))


def _gelu_tanh(g: float) -> float:
    return 0.5 * g * (1.0 + math.tanh(SQRT_2_OVER_PI * (g + 0.044715 * g * g * g)))


ACTIVATIONS: Mapping[str, Any] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def _activation(kind: str) -> Any:
    if kind not in ACTIVATIONS:
        raise InvalidInput("kind", kind, f"known activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]


def _route(scores: Vector, top_k: int, normalize: bool) -> Iterator[tuple[int, float]]:
    """(expert, share), the most likely first, ties by lower id."""
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    order = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top_k]
    total = sum(weights[e] for e in order) if normalize else sum(weights)
    return ((e, weights[e] / total) for e in order)


def _turns(position: int, rope: RopeTable) -> tuple[Vector, Vector]:
    angles = [position * frequency for frequency in rope.inv_freq]
    factor = rope.attention_factor
    return [math.cos(a) * factor for a in angles], [math.sin(a) * factor for a in angles]


def _rotate(x: Matrix, turns: Sequence[tuple[Vector, Vector]], head_dim: int) -> Matrix:
    return [
        [y for head in split_heads(row, head_dim) for y in _rotate_head(head, cos, sin)]
        for row, (cos, sin) in zip(x, turns, strict=True)
    ]


def _turned_back(heads: Sequence[Vector], by: int, rope: RopeTable) -> list[Vector]:
    """Rotated queries as they are `by` positions nearer to the beginning."""
    cos, sin = _turns(by, rope)
    return [_rotate_head(list(head), cos, [-s for s in sin]) for head in heads]


def _rotate_head(head: Vector, cos: Vector, sin: Vector) -> Vector:
    half = len(cos)
    low, high, rest = head[:half], head[half : 2 * half], head[2 * half :]
    first = [a * c - b * s for a, b, c, s in zip(low, high, cos, sin, strict=True)]
    second = [b * c + a * s for a, b, c, s in zip(low, high, cos, sin, strict=True)]
    return first + second + rest
