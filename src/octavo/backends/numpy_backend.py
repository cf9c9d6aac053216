"""The NumPy backend: float32, all rows at once, matrix products by BLAS.

BLAS chooses kernels by shape, so a row's last bits may depend on how many rows share the product: the same tokens
outside near ties, not the same bits (design, promise 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import numpy_attention, numpy_sampling
from octavo.backends.host_pages import HostPages, swap_in, swap_out
from octavo.backends.numpy_eviction import compact
from octavo.backends.numpy_pages import NumpyKVPool
from octavo.backends.numpy_pooling import pool
from octavo.backends.numpy_quantized import NumpyQuantized
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
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Voting
from octavo.core.kv_groups import KVGroup

Floats = NDArray[np.float32]

FEW_ROWS = 32  # up to here weight @ x^T is the faster order: 25% at 16 rows


class NumpyBackend:
    """Every op in use, on float32 arrays."""

    name = "numpy"

    # ---- values in and out

    def weight(self, name: str, values: Any) -> Any:
        """A weight handle: a contiguous float32 array; quantized tensors stay packed."""
        if isinstance(values, QuantizedTensor):
            return NumpyQuantized.of(values)
        return np.ascontiguousarray(values, np.float32)

    def to_lists(self, x: Any) -> Any:
        """Plain nested lists of a backend value."""
        return x.tolist() if isinstance(x, np.ndarray) else x

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """The value as an array."""
        return np.asarray(x)

    def allocate_kv(self, num_pages: int, page_size: int, groups: Sequence[KVGroup]) -> NumpyKVPool:
        """An empty page pool for these KV groups. Raises InvalidInput for groups that it cannot hold."""
        return NumpyKVPool(num_pages, page_size, groups)

    def batch(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        query_lens: Sequence[int],
        page_table: Sequence[Sequence[Sequence[int]]],
        kv: NumpyKVPool,
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
        for name in ("token_ids", "positions", "cu_seqlens_q", "seq_lens", "slot_mapping", "rope_positions"):
            fields[name] = None if fields[name] is None else np.asarray(fields[name], np.int64)
        rows = fields["cu_seqlens_q"][1:] - 1 if logit_rows is None else np.asarray(logit_rows, np.int64)
        return ForwardBatch(**fields, logit_rows=rows, kv=kv, request_ids=tuple(request_ids))

    # ---- row-wise ops

    def embed(self, ids: Any, table: Any) -> Floats:
        """[T], [V, H] -> [T, H]."""
        if isinstance(table, NumpyQuantized):
            return table.rows(np.asarray(ids))
        return table.take(ids, axis=0)

    def rms_norm(self, x: Floats, weight: Floats, eps: float, *, residual: Any = None) -> tuple[Floats, Floats]:
        """s = x + residual (or x); (rms_norm(s) * weight, s). [T, H]."""
        s = x if residual is None else x + residual
        return _rms(s, weight, eps), s

    def layer_norm(self, x: Floats, weight: Floats, bias: Any, eps: float) -> Floats:
        """(x - mean) / sqrt(variance + eps) * weight + bias. [T, H]."""
        y = _rms(x - x.mean(axis=-1, keepdims=True), weight, eps)
        return y if bias is None else y + bias

    def linear(self, x: Floats, weight: Any, bias: Any = None, *, adapters: RowAdapters | None = None) -> Floats:
        """x[T, K] @ weight[N, K]^T + bias[N], and what the rows' adapters add -> [T, N]."""
        if isinstance(weight, NumpyQuantized):
            y = weight.times(x)
        elif 1 < len(x) <= FEW_ROWS:
            y = np.ascontiguousarray((weight @ x.T).T)
        else:
            y = x @ weight.T
        if bias is not None:
            y += bias
        if adapters is not None:
            for place, (a, b, scale) in adapters.factors.items():
                rows = np.flatnonzero(np.equal(adapters.rows, place))
                y[rows] += np.float32(scale) * (x[rows] @ a.T) @ b.T
        return y

    def qk_norm(self, x: Floats, weight: Floats, eps: float, *, head_dim: int) -> Floats:
        """rms_norm of each head. [T, heads * head_dim]."""
        return _rms(x.reshape(len(x), -1, head_dim), weight, eps).reshape(x.shape)

    def gated_activation(self, gate: Floats, up: Floats, *, kind: str = "silu") -> Floats:
        """act(gate) * up. [T, I]. Raises InvalidInput for an unknown kind."""
        if kind == "silu":
            with np.errstate(over="ignore"):
                return gate / (np.float32(1.0) + np.exp(-gate)) * up
        if kind == "gelu_tanh":
            inner = np.float32(np.sqrt(2.0 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
            return np.float32(0.5) * gate * (np.float32(1.0) + np.tanh(inner)) * up
        raise InvalidInput("kind", kind, "known activations: silu, gelu_tanh")

    def moe(
        self,
        x: Floats,
        router: Any,
        gate: Sequence[Any],
        up: Sequence[Any],
        down: Sequence[Any],
        *,
        top_k: int,
        normalize: bool,
        kind: str = "silu",
    ) -> Floats:
        """Each row through its top_k experts, combined in slot order. [T, H]. Only chosen experts are read."""
        scores = self.linear(x, router)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]  # stable: ties by lower id
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = np.take_along_axis(weights, order, axis=1)
        shares /= (shares if normalize else weights).sum(axis=1, keepdims=True)
        slots = np.empty((len(x), order.shape[1], x.shape[1]), np.float32)
        for expert in np.unique(order).tolist():
            rows, places = np.nonzero(order == expert)
            hidden = self.gated_activation(
                self.linear(x[rows], gate[expert]), self.linear(x[rows], up[expert]), kind=kind
            )
            slots[rows, places] = self.linear(hidden, down[expert])
        total = shares[:, :1] * slots[:, 0]
        for place in range(1, order.shape[1]):
            total += shares[:, place : place + 1] * slots[:, place]
        return total

    def add(self, x: Floats, y: Floats) -> Floats:
        """x + y."""
        return x + y

    def scale(self, x: Floats, s: float) -> Floats:
        """x * s."""
        return x * np.float32(s)

    def select_rows(self, x: Floats, batch: ForwardBatch) -> Floats:
        """Rows batch.logit_rows: [T, H] -> [R, H]."""
        return x.take(batch.logit_rows, axis=0)

    def logits(self, x: Floats, weight: Any, *, soft_cap: float = 0.0) -> Floats:
        """x[R, H] @ weight[V, H]^T, soft-capped -> [R, V]."""
        y = self.linear(x, weight)
        return np.float32(soft_cap) * np.tanh(y / np.float32(soft_cap)) if soft_cap else y

    # ---- positions and pages

    def rope(
        self, q: Floats, k: Floats, batch: ForwardBatch, *, rope: RopeTable, head_dim: int
    ) -> tuple[Floats, Floats]:
        """Rotate every head of q[T, Q] and k[T, KV] by its token's position."""
        if rope not in batch.cache:
            positions = batch.positions if batch.rope_positions is None else batch.rope_positions
            angles = positions[:, None, None] * np.asarray(rope.inv_freq, np.float64)  # [T, 1, rotary / 2]
            batch.cache[rope] = [(f(angles) * rope.attention_factor).astype(np.float32) for f in (np.cos, np.sin)]
        cos, sin = batch.cache[rope]
        return _rotate(q, cos, sin, head_dim), _rotate(k, cos, sin, head_dim)

    def write_kv(self, k: Floats, v: Floats, batch: ForwardBatch, *, layer: int) -> None:
        """Store k[T, KV] and v[T, KV] of one layer at slot_mapping."""
        group, index = batch.kv.where[layer]
        slots = batch.slot_mapping[group]
        written = slots != NO_SLOT
        if not written.all():
            slots, k, v = slots[written], k[written], v[written]
        batch.kv.keys[index][slots] = k
        batch.kv.values[index][slots] = v

    def attention(
        self,
        q: Floats,
        batch: ForwardBatch,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Any = None,
        head_dim: int,
        sink_tokens: int = 0,
        rope: RopeTable | None = None,
    ) -> Floats:
        """softmax(scale * q . k) . v over each row's visible positions, read from pages. [T, Q] -> [T, Q]."""
        scoring = numpy_attention.Scoring(layer, scale, window, soft_cap, sinks, head_dim, sink_tokens)
        if batch.mass is not None:
            check_mass(window, batch)
            batch.mass[layer] = numpy_attention.mass(q, batch, scoring)
        if rope is None or not sink_tokens:
            return numpy_attention.attention(q, batch, scoring)
        check_sinks(sink_tokens, window, rope, batch.parent_rows)
        nearer = np.maximum(batch.positions - (sink_tokens + window - 1), 0)[:, None, None]
        angles = nearer * np.asarray(rope.inv_freq, np.float64)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(-angles).astype(np.float32)
        return numpy_attention.attention(q, batch, scoring, _rotate(q, cos, sin, head_dim))

    def copy_pages(self, kv: NumpyKVPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source to page target, for each (source, target)."""
        for source, target in pairs:
            kv.copy_page(source, target)

    def move_slots(self, kv: NumpyKVPool, moves: Sequence[tuple[int, int]]) -> None:
        """Slot source to slot target, in order."""
        for source, target in moves:
            kv.move_slot(source, target)

    def compact(
        self,
        kv: NumpyKVPool,
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

    def swap_out(self, kv: NumpyKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source into host page target, for each pair."""
        swap_out(kv, host, pairs)

    def swap_in(self, kv: NumpyKVPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Host page source into page target, for each pair. Raises CorruptPages, changing nothing, for bad ones."""
        swap_in(kv, host, pairs)

    # ---- sampling

    def process_logits(self, logits: Floats, rows: Sequence[SamplingRow]) -> Floats:
        """New logits after bias, bans and penalties. [R, V]."""
        return numpy_sampling.process_logits(logits, rows)

    def sample(self, logits: Floats, rows: Sequence[SamplingRow]) -> list[int]:
        """One id per row. Raises RowError naming the rows from which nothing can be drawn."""
        return numpy_sampling.sample(logits, rows)

    def logprobs(
        self, logits: Floats, ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs]:
        """Logprobs of ids[r], of the k[r] most likely and of chosen[r], from raw logits."""
        return [numpy_sampling.logprobs_row(*row) for row in zip(logits, ids, k, chosen, strict=True)]

    def pool(self, x: Floats, spans: Sequence[PoolSpan]) -> list[NDArray[np.float64]]:
        """One vector for each span. [S, H]."""
        return pool(x, spans)


def _rms(s: Floats, weight: Floats, eps: float) -> Floats:
    mean = np.square(s).mean(axis=-1, keepdims=True)
    return s * (np.float32(1.0) / np.sqrt(mean + np.float32(eps))) * weight


def _rotate(x: Floats, cos: Floats, sin: Floats, head_dim: int) -> Floats:
    half = cos.shape[2]
    heads = x.reshape(len(x), -1, head_dim)
    low, high = heads[..., :half], heads[..., half : 2 * half]
    out = heads.copy() if 2 * half < head_dim else np.empty_like(heads)
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    return out.reshape(x.shape)
