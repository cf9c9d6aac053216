"""Pages of K/V as arrays, and the index arrays of a step's attention: made once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.backends.list_pages import layer_map
from octavo.backends.ops import ATTENTION_BLOCK, ATTENTION_CHUNK, ForwardBatch
from octavo.core.draft_tree import path_of
from octavo.core.errors import InvalidInput
from octavo.core.kv_groups import KVGroup

Ints = NDArray[np.int64]


class NumpyKVPool:
    """`keys` and `values`: [layer within its group, slot, heads * dim]; slot = page * page_size + offset.

    One slot past the last page stays zero: lanes that a row must not see are gathered from it, so that what lies in
    unused slots never reaches a result. Raises InvalidInput for groups that differ in shape, or are not fp32.
    """

    def __init__(self, num_pages: int, page_size: int, groups: Sequence[KVGroup]) -> None:
        shapes = {(g.num_kv_heads, g.k_dim, g.v_dim, g.dtype) for g in groups}
        if len(shapes) != 1 or groups[0].dtype != "fp32":
            raise InvalidInput("groups", sorted(shapes), "the numpy backend takes groups of one shape, in fp32")
        group = groups[0]
        depth = max(len(g.layers) for g in groups)
        self.num_pages, self.page_size, self.groups = num_pages, page_size, tuple(groups)
        self.num_kv_heads = group.num_kv_heads
        self.where = layer_map(groups)  # layer -> (group, index within the group)
        self.zero_slot = num_pages * page_size
        self._scratch: dict[str, NDArray[np.float32]] = {}
        self.keys = np.zeros((depth, self.zero_slot + 1, group.num_kv_heads * group.k_dim), np.float32)
        self.values = np.zeros((depth, self.zero_slot + 1, group.num_kv_heads * group.v_dim), np.float32)

    def scratch(self, name: str, rows: int, columns: int) -> NDArray[np.float32]:
        """[rows, columns] of reused memory: fresh pages from the system cost more than filling them."""
        held = self._scratch.get(name)
        if held is None or held.size < rows * columns:
            held = self._scratch[name] = np.empty(rows * columns, np.float32)
        return held[: rows * columns].reshape(rows, columns)

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Store one token's key and value, all layers flattened."""
        slot = page * self.page_size + offset
        for store, flat in ((self.keys, key), (self.values, value)):
            layers = np.asarray(flat, np.float32).reshape(-1, store.shape[2])
            store[: len(layers), slot] = layers

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """One token's key and value, all layers flattened."""
        slot = page * self.page_size + offset
        return self.keys[:, slot].ravel().tolist(), self.values[:, slot].ravel().tolist()

    def copy_page(self, src: int, dst: int) -> None:
        """All slots of page `src` to page `dst`."""
        size = self.page_size
        for store in (self.keys, self.values):
            store[:, dst * size : (dst + 1) * size] = store[:, src * size : (src + 1) * size]

    @property
    def stored_bytes(self) -> int:
        """Bytes of one page in host memory: keys of all layers, then values."""
        return sum(store[:, : self.page_size].nbytes for store in (self.keys, self.values))

    def save_page(self, page: int, out: memoryview) -> None:
        """All bytes of the page."""
        for pages, saved in self._beside(page, out):
            saved[:] = pages

    def load_page(self, page: int, data: memoryview) -> None:
        """Make the page hold what `save_page` wrote."""
        for pages, saved in self._beside(page, data):
            pages[:] = saved

    def _beside(self, page: int, memory: memoryview) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The page's keys and values, each with its place in `memory`."""
        pages = [store[:, page * self.page_size : (page + 1) * self.page_size] for store in (self.keys, self.values)]
        flat = np.frombuffer(memory, np.float32)
        parts = np.split(flat, [pages[0].size])
        return [(each, part.reshape(each.shape)) for each, part in zip(pages, parts, strict=True)]

    def move_slot(self, source: int, target: int) -> None:
        """All layers of slot `source` to slot `target`."""
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def keep(self, sources: Sequence[int], targets: Sequence[int], kept: Ints) -> None:
        """Place kept[layer, kv head, i] of pages `sources` to place i of pages `targets`; of one KV group."""
        layers, heads, count = kept.shape
        slots_of = lambda pages, at: np.asarray(pages)[at // self.page_size] * self.page_size + at % self.page_size  # noqa: E731
        source, target = slots_of(sources, kept), slots_of(targets, np.arange(count))
        layer, head = np.arange(layers)[:, None, None], np.arange(heads)[None, :, None]
        for store in (self.keys, self.values):
            by_head = store.reshape(len(store), -1, heads, store.shape[2] // heads)
            by_head[layer, target, head] = by_head[layer, source, head]

    def forget(self, page: int) -> None:
        """The page is free. Its bytes may stay: no lane reaches them before they are written again."""


@dataclass(frozen=True)
class ChunkLanes:
    """What B rows read from one 512-position chunk. Lanes that no query of a row may see come from the zero slot."""

    rows: Ints | None  # which rows of the unit take part; None: all
    slots: Ints  # [B, L]
    hidden: NDArray[np.bool_]  # [B, n, L] True: the query may not see the lane
    is_sinks: bool = False  # the sink tokens, which other queries see


@dataclass(frozen=True)
class Unit:
    """Sequences with the same number of query tokens, attended together: `tokens` [B, n] are their token rows."""

    tokens: Ints
    chunks: tuple[ChunkLanes, ...]  # ascending


def units_of(batch: ForwardBatch, group: int, window: int, sink_tokens: int = 0) -> tuple[Unit, ...]:
    """The attention work of a step for one group and window, cached in the batch. One-token rows form one unit, and so
    does each row of a tree.
    """
    key = ("units", group, window, sink_tokens)
    if key not in batch.cache:
        spans = [(row, start, stop) for row, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q.tolist()))]
        trees = [row for row, parents in enumerate(batch.parent_rows) if parents]
        single = [span for span in spans if span[2] - span[1] == 1 or span[0] in trees]
        decodes = [(row, t, t + 1) for row, start, stop in single for t in range(start, stop)]
        prefills = [[span] for span in spans if span not in single]
        parts = ([decodes] if decodes else []) + prefills
        batch.cache[key] = tuple(make_unit(batch, group, window, part, sink_tokens) for part in parts)
    return batch.cache[key]


def make_unit(
    batch: ForwardBatch, group: int, window: int, spans: Sequence[tuple[int, int, int]], sink_tokens: int = 0
) -> Unit:
    """The unit of sequences (row, first token, last token + 1), all of one length."""
    tokens = np.array([range(start, stop) for _, start, stop in spans], np.int64)  # [B, n]
    positions = batch.positions[tokens]
    first = np.maximum(positions[:, 0] - window + 1, sink_tokens) if window else np.zeros(len(spans), np.int64)
    table = page_array(batch, group)[[row for row, _, _ in spans]]
    stop = positions[:, -1] + 1
    paths = _paths(batch, spans)
    numbers = range(int(first.min()) // ATTENTION_CHUNK, (int(stop.max()) - 1) // ATTENTION_CHUNK + 1)
    chunks = [
        _chunk(number, table, positions, first, stop, window, batch.kv, paths)
        for number in numbers
        if (np.minimum(stop, (number + 1) * ATTENTION_CHUNK) > np.maximum(first, number * ATTENTION_CHUNK)).any()
    ]
    if sink_tokens:
        sinks = _chunk(0, table, positions, 0 * first, np.minimum(stop, sink_tokens), 0, batch.kv, paths)
        chunks.insert(0, replace(sinks, is_sinks=True))
    return Unit(tokens, tuple(chunks))


def _paths(batch: ForwardBatch, spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, Ints]]:
    """Of those spans that are tree rows: which, the first position beyond the history, the positions of their slots."""
    found = []
    for place, (row, start, _) in enumerate(spans):
        parents = batch.parent_rows[row] if batch.parent_rows else ()
        if parents:
            begin = int(batch.cu_seqlens_q[row])
            path = np.array(path_of(parents, start - begin), np.int64)
            found.append((place, int(batch.positions[begin]), int(batch.positions[begin]) + path))
    return found


def page_array(batch: ForwardBatch, group: int) -> Ints:
    """The page tables of one group as one array [S, *], padded with -1."""
    key = ("pages", group)
    if key not in batch.cache:
        rows = batch.page_table[group]
        table = np.full((len(rows), max(map(len, rows))), -1, np.int64)
        for row, pages in enumerate(rows):
            table[row, : len(pages)] = pages
        batch.cache[key] = table
    return batch.cache[key]


def _chunk(
    number: int,
    table: Ints,
    positions: Ints,
    first: Ints,
    stop: Ints,
    window: int,
    pool: NumpyKVPool,
    paths: Sequence[tuple[int, int, Ints]],
) -> ChunkLanes:
    """`paths`: of rows whose slots are not those of their positions."""
    low = np.maximum(first, number * ATTENTION_CHUNK)
    high = np.minimum(stop, (number + 1) * ATTENTION_CHUNK)
    active = np.flatnonzero(high > low)
    rows = None if len(active) == len(first) else active
    low, high, table, positions = low[active], high[active], table[active], positions[active]
    begin = int(low.min()) // ATTENTION_BLOCK * ATTENTION_BLOCK
    end = -(-int(high.max()) // ATTENTION_BLOCK) * ATTENTION_BLOCK
    lanes = np.arange(begin, end)  # [L]
    live = (lanes >= low[:, None]) & (lanes < high[:, None])
    places = np.where(live, lanes, low[:, None])  # [B, L] whose slots they lie in
    for row, history, path in paths:
        for at in np.flatnonzero(active == row):
            mine = live[at] & (lanes >= history)
            places[at, mine] = path[lanes[mine] - history]
    pages = np.take_along_axis(table, places // pool.page_size, axis=1)
    slots = np.where(live, pages * pool.page_size + places % pool.page_size, pool.zero_slot)
    seen = (lanes <= positions[:, :, None]) & live[:, None]
    if window:
        seen &= lanes > positions[:, :, None] - window
    return ChunkLanes(rows, slots, ~seen)
