"""Paged attention in plain lists: the definition of the op.

A row reads the positions it may see from pages, in blocks of 64 and chunks of 512 *absolute* positions:

    positions   0 .. 63 | 64 .. 127 | ... | 448 .. 511 || 512 .. 575 | ...
                block     block             block         block
                '-------------- chunk ----------------'  '--- chunk ...

Blocks are merged ascending into their chunk, chunks ascending into the result, each with the running maximum of
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). The borders depend on positions alone, so a
token's bits do not depend on how its sequence was cut into steps. A position that a row may not see enters no maximum
and no sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import itemgetter, mul
from typing import Any

from octavo.backends.list_pages import Heads
from octavo.backends.ops import ATTENTION_BLOCK, ATTENTION_CHUNK
from octavo.core.draft_tree import path_of

Block = tuple[int, list[Sequence[float]], list[tuple[float, ...]]]  # chunk, keys by position, values by dimension
Partial = tuple[float, float, list[float]]  # running maximum, sum of exp(score - maximum), weighted sum of values


@dataclass(frozen=True)
class Scoring:
    """What turns a query and a key into a score, and which positions count."""

    scale: float
    window: int = 0  # 0: all up to the row's own position
    soft_cap: float = 0.0
    sinks: Sequence[float] | None = None  # one logit per query head
    sink_tokens: int = 0  # at the beginning, that a window leaves in sight

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees, behind the sink tokens."""
        return max(self.sink_tokens, position - self.window + 1) if self.window else 0

    def turned_by(self, position: int) -> int:
        """Positions by which a query is turned back for the sink tokens."""
        return max(0, position - (self.sink_tokens + self.window - 1))


def attend(
    heads: Sequence[Sequence[float]],
    position: int,
    first_lane: int,
    lanes: Sequence[tuple[Heads, Heads]],
    scoring: Scoring,
    sink_lanes: Sequence[tuple[Heads, Heads]] = (),
    turned: Sequence[Sequence[float]] = (),
) -> list[float]:
    """One token's output, [heads * v_dim]; `lanes[i]` is (key, value) by KV head of position `first_lane + i`.

    `sink_lanes`: the same of the sink tokens up to `position`, which the queries `turned` see.
    """
    start = scoring.first_visible(position)
    kv_heads = len((lanes or sink_lanes)[0][0])
    group = len(heads) // kv_heads
    out: list[float] = []
    for kv_head in range(kv_heads):
        blocks = list(blocks_of(start, position + 1, first_lane, lanes, kv_head))
        first = list(blocks_of(0, len(sink_lanes), 0, sink_lanes, kv_head))
        for head in range(kv_head * group, (kv_head + 1) * group):
            chunks = _chunks(turned[head], first, scoring) if first else []
            out += _attend_head(chunks + _chunks(heads[head], blocks, scoring), scoring, head)
    return out


def mass_of(
    rows: Sequence[Sequence[Sequence[float]]],
    positions: Sequence[int],
    lanes: Sequence[tuple[Heads, Heads]],
    scoring: Scoring,
) -> list[list[float]]:
    """[kv heads][positions]: of each key the weights that the rows [heads][head_dim] give it, over rows and heads."""
    kv_heads = len(lanes[0][0])
    mass = [[0.0] * len(lanes) for _ in range(kv_heads)]
    for heads, position in zip(rows, positions, strict=True):
        for head, query in enumerate(heads):
            kv_head = head // (len(heads) // kv_heads)
            keys = [lane[0][kv_head] for lane in lanes[: position + 1]]
            scores = _scores(query, keys, scoring)
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights)
            for at, weight in enumerate(weights):
                mass[kv_head][at] += weight / total
    return mass


def path_lanes(lanes: Sequence[Any], history: int, parents: Sequence[int], row: int) -> list[Any]:
    """What a tree row sees of its sequence's slots: the first `history`, then its ancestors and itself."""
    return [*lanes[:history], *(lanes[history + r] for r in path_of(parents, row))]


def blocks_of(
    start: int, stop: int, first_lane: int, lanes: Sequence[tuple[Heads, Heads]], kv_head: int
) -> Iterator[Block]:
    """The positions start .. stop - 1 of one KV head, cut at the absolute borders of blocks."""
    low = start
    while low < stop:
        high = min(stop, low - low % ATTENTION_BLOCK + ATTENTION_BLOCK)
        seen = lanes[low - first_lane : high - first_lane]
        keys = [lane[0][kv_head] for lane in seen]
        yield low // ATTENTION_CHUNK, keys, list(zip(*[lane[1][kv_head] for lane in seen], strict=True))
        low = high


def _chunks(query: Sequence[float], blocks: Sequence[Block], scoring: Scoring) -> list[Partial]:
    return [
        reduce(_merge, (_block_partial(query, keys, columns, scoring) for _, keys, columns in chunk))
        for _, chunk in groupby(blocks, key=itemgetter(0))
    ]


def _attend_head(chunks: Sequence[Partial], scoring: Scoring, head: int) -> list[float]:
    maximum, denominator, sums = reduce(_merge, chunks)
    if scoring.sinks is not None:
        top = max(maximum, scoring.sinks[head])
        shrink = math.exp(maximum - top)
        sums = [x * shrink for x in sums]
        denominator = denominator * shrink + math.exp(scoring.sinks[head] - top)
    return [x / denominator for x in sums]


def _block_partial(
    query: Sequence[float], keys: list[Sequence[float]], columns: list[tuple[float, ...]], scoring: Scoring
) -> Partial:
    scores = _scores(query, keys, scoring)
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return top, sum(weights), [sum(map(mul, weights, column)) for column in columns]


def _scores(query: Sequence[float], keys: Sequence[Sequence[float]], scoring: Scoring) -> list[float]:
    scale, cap = scoring.scale, scoring.soft_cap
    scores = [scale * sum(map(mul, query, key)) for key in keys]
    return [cap * math.tanh(score / cap) for score in scores] if cap else scores


def _merge(older: Partial, newer: Partial) -> Partial:
    top = max(older[0], newer[0])
    a, b = math.exp(older[0] - top), math.exp(newer[0] - top)
    sums = [a * x + b * y for x, y in zip(older[2], newer[2], strict=True)]
    return top, a * older[1] + b * newer[1], sums
