"""Paged attention in NumPy: chunks of 512 absolute positions, ascending, merged with a running maximum.

Inside a chunk one maximum and one matrix product stand for the reference's eight blocks: BLAS orders its own sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.numpy_pages import ChunkLanes, NumpyKVPool, Unit, make_unit, units_of
from octavo.backends.ops import ForwardBatch

Floats = NDArray[np.float32]
Partial = tuple[Floats, Floats, Floats]  # maximum [B, KVH, M], sum [B, KVH, M], weighted values [B, KVH, M, Dv]


@dataclass(frozen=True)
class Scoring:
    """What one attention call fixes for all its rows."""

    layer: int
    scale: float
    window: int
    soft_cap: float
    sinks: Any  # [heads] or None
    head_dim: int
    sink_tokens: int = 0


def attention(q: Floats, batch: ForwardBatch, scoring: Scoring, turned: Floats | None = None) -> Floats:
    """[T, heads * head_dim] -> [T, heads * v_dim], from pages only. ``turned``: the queries for the sink tokens."""
    pool: NumpyKVPool = batch.kv
    group, _ = pool.where[scoring.layer]
    heads = q.shape[1] // scoring.head_dim
    v_dim = pool.values.shape[2] // pool.num_kv_heads
    out = np.empty((len(q), heads * v_dim), np.float32)
    for unit in units_of(batch, group, scoring.window, scoring.sink_tokens):
        y = _attend(q, unit, pool, scoring, turned)
        if unit.tokens.shape[1] > 1 and not np.isfinite(y).all():
            y = _token_by_token(q, unit, batch, scoring, turned)
        out[unit.tokens.ravel()] = y
    return out


def mass(q: Floats, batch: ForwardBatch, scoring: Scoring) -> Floats:
    """[kv heads, positions]: of each key the weights that the rows of the one sequence give it, over rows and heads."""
    pool: NumpyKVPool = batch.kv
    group, index = pool.where[scoring.layer]
    seen = np.arange(int(batch.positions[-1]) + 1)
    pages = np.asarray(batch.page_table[group][0])
    keys = pool.keys[index][pages[seen // pool.page_size] * pool.page_size + seen % pool.page_size]
    heads = q.reshape(len(q), pool.num_kv_heads, -1, scoring.head_dim).transpose(1, 0, 2, 3)  # [KVH, T, group, D]
    by_head = keys.reshape(len(seen), pool.num_kv_heads, -1).transpose(1, 2, 0)
    scores = np.float32(scoring.scale) * (heads.reshape(pool.num_kv_heads, -1, scoring.head_dim) @ by_head)
    if scoring.soft_cap:
        scores = np.float32(scoring.soft_cap) * np.tanh(scores / np.float32(scoring.soft_cap))
    hidden = np.repeat(seen > batch.positions[:, None], heads.shape[2], axis=0)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    found: Floats = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1)
    return found


def _token_by_token(
    q: Floats, unit: Unit, batch: ForwardBatch, scoring: Scoring, turned: Floats | None = None
) -> Floats:
    """A value that is not finite must not reach earlier tokens of its sequence through 0 * inf in a shared product."""
    group, _ = batch.kv.where[scoring.layer]
    first = int(unit.tokens[0, 0])
    row = int(np.searchsorted(batch.cu_seqlens_q, first, side="right")) - 1
    spans = [[(row, int(t), int(t) + 1)] for t in unit.tokens[0]]
    parts = [make_unit(batch, group, scoring.window, span, scoring.sink_tokens) for span in spans]
    return np.concatenate([_attend(q, part, batch.kv, scoring, turned) for part in parts])


def _queries(q: Floats, unit: Unit, kv_heads: int, scoring: Scoring) -> Floats:
    """[T, heads * head_dim] -> [B, KVH, group * n, head_dim], scaled."""
    count, length = unit.tokens.shape
    shaped = q[unit.tokens.ravel()].reshape(count, length, kv_heads, -1, scoring.head_dim)
    queries: Floats = shaped.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, scoring.head_dim)
    return queries * np.float32(scoring.scale)


def _attend(q: Floats, unit: Unit, pool: NumpyKVPool, scoring: Scoring, turned: Floats | None = None) -> Floats:
    """One unit: -> [B * n, heads * v_dim]."""
    count, length = unit.tokens.shape
    kv_heads = pool.num_kv_heads
    queries = _queries(q, unit, kv_heads, scoring)
    for_sinks = queries if turned is None else _queries(turned, unit, kv_heads, scoring)
    group = queries.shape[2] // length  # M = group * n
    total: Partial | None = None
    with np.errstate(invalid="ignore", over="ignore"):
        for chunk in unit.chunks:
            part = _chunk_partial(for_sinks if chunk.is_sinks else queries, chunk, pool, scoring)
            if total is None and chunk.rows is None:
                total = part
            else:
                total = _merge(_empty(queries, part) if total is None else total, part, chunk)
        if total is None:  # a unit has at least the chunk of its own tokens
            return np.empty((0, 0), np.float32)
        y = _normalise(total, scoring, group, length)
    return y.reshape(count, kv_heads, group, length, -1).transpose(0, 3, 1, 2, 4).reshape(count * length, -1)


def _chunk_partial(queries: Floats, chunk: ChunkLanes, pool: NumpyKVPool, scoring: Scoring) -> Partial:
    _, index = pool.where[scoring.layer]
    chosen = queries if chunk.rows is None else queries[chunk.rows]
    keys = _gather(pool.keys[index], chunk, "keys", pool)
    values = _gather(pool.values[index], chunk, "values", pool)
    scores = np.matmul(chosen, keys.swapaxes(2, 3))  # [B, KVH, M, L]
    if scoring.soft_cap:
        cap = np.float32(scoring.soft_cap)
        scores = cap * np.tanh(scores / cap)
    batch, kv_heads, _, lanes = scores.shape
    length = chunk.hidden.shape[1]
    np.copyto(scores.reshape(batch, kv_heads, -1, length, lanes), -np.inf, where=chunk.hidden[:, None, None])
    top = scores.max(axis=3)
    scores -= _finite(top)[..., None]
    weights = np.exp(scores, out=scores)
    return top, weights.sum(axis=3), np.matmul(weights, values)


def _gather(store: Floats, chunk: ChunkLanes, name: str, pool: NumpyKVPool) -> Floats:
    """[slots, heads * dim] -> [B, KVH, L, dim], a view whose rows BLAS can take as they lie.

    It is scratch memory of the pool: valid until the next gather of the same name.
    """
    batch, lanes = chunk.slots.shape
    rows = pool.scratch(name, batch * lanes, store.shape[1])
    store.take(chunk.slots.ravel(), axis=0, out=rows, mode="clip")  # other modes copy through a buffer
    return rows.reshape(batch, lanes, pool.num_kv_heads, -1).transpose(0, 2, 1, 3)


def _finite(top: Floats) -> Floats:
    """Maxima, with 0 for rows that see nothing here, so that exp(-inf - top) is 0 and not NaN."""
    return np.where(top == -np.inf, np.float32(0.0), top)


def _empty(queries: Floats, like: Partial) -> Partial:
    shape = queries.shape[:3]
    zeros = np.zeros(shape, np.float32)
    return np.full(shape, -np.inf, np.float32), zeros, np.zeros((*shape, like[2].shape[3]), np.float32)


def _merge(total: Partial, part: Partial, chunk: ChunkLanes) -> Partial:
    rows: Any = slice(None) if chunk.rows is None else chunk.rows
    old = total[0][rows]
    top = np.maximum(old, part[0])
    base = _finite(top)
    a, b = np.exp(old - base), np.exp(part[0] - base)
    total[2][rows] = a[..., None] * total[2][rows] + b[..., None] * part[2]
    total[1][rows] = a * total[1][rows] + b * part[1]
    total[0][rows] = top
    return total


def _normalise(total: Partial, scoring: Scoring, group: int, length: int) -> Floats:
    top, denominator, sums = total
    if scoring.sinks is not None:
        per_head = np.asarray(scoring.sinks, np.float32).reshape(1, -1, group)
        sinks = np.repeat(per_head, length, axis=2)  # [1, KVH, M]
        base = np.maximum(top, sinks)
        shrink = np.exp(top - base)
        sums = sums * shrink[..., None]
        denominator = denominator * shrink + np.exp(sinks - base)
    return sums / denominator[..., None]
