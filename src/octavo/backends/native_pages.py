"""Pages of K/V in the native library: the pool of the native backend, and a `KVStore` for the core's cache manager."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.list_pages import layer_map
from octavo.backends.native_lib import KV_TYPES, check, close_with, library
from octavo.core.errors import InvalidInput
from octavo.core.kv_groups import KVGroup

MIN_PAGE = 16  # tokens; a page is 16 * 2^n


def page_bytes(engine: Any, page_size: int, groups: Sequence[KVGroup]) -> int:
    """Bytes of one page, scales and padding included. Raises InvalidInput for a shape that no kernel takes."""
    return check(library().octavo_kv_bytes(engine, *_shape(page_size, groups)), "page_size")


def _shape(page_size: int, groups: Sequence[KVGroup]) -> tuple[int, int, int, int, int]:
    """type, page size, kv heads, head size, layers of a group."""
    shapes = {(g.num_kv_heads, g.k_dim, g.v_dim, g.dtype) for g in groups}
    group = groups[0]
    if len(shapes) != 1 or group.k_dim != group.v_dim or group.dtype not in KV_TYPES:
        raise InvalidInput("groups", sorted(shapes), "the native backend takes groups of one shape, fp32, bf16 or int8")
    if page_size < MIN_PAGE or page_size & (page_size - 1):
        raise InvalidInput("page_size", page_size, "the native backend takes pages of 16, 32, 64, ... tokens")
    depth = max(len(g.layers) + g.padded_layers for g in groups)
    return KV_TYPES[group.dtype], page_size, group.num_kv_heads, group.k_dim, depth


class PageTables:
    """Page tables of all slots as one array [groups, slots, pages], changed by deltas, never rebuilt; -1: no page."""

    def __init__(self, num_groups: int, slots: int = 64, pages: int = 64) -> None:
        self.array = np.full((num_groups, slots, pages), -1, np.int32)
        self.shifts = np.zeros(slots, np.int32)  # by slot: how much further than to their places rows turn
        self.is_shifted = False  # any of them

    def shift(self, slot: int, by: int) -> None:
        """Keys were left out of a sequence: its rows turn so much further."""
        self.shifts[slot] = by
        self.is_shifted = self.is_shifted or by > 0

    def clear(self, slot: int) -> None:
        """A new sequence takes the slot."""
        self._grow(slot + 1, 1)
        self.array[:, slot] = -1
        self.shifts[slot] = 0

    def place(self, slot: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Entries first, first + 1, ... of one table."""
        self._grow(slot + 1, first + len(pages))
        self.array[group, slot, first : first + len(pages)] = pages

    def _grow(self, slots: int, pages: int) -> None:
        groups, old_slots, old_pages = self.array.shape
        if slots <= old_slots and pages <= old_pages:
            return
        shape = (groups, max(old_slots, 2 * slots), max(old_pages, 2 * pages))
        grown = np.full(shape, -1, np.int32)
        grown[:, :old_slots, :old_pages] = self.array
        self.array = grown
        self.shifts = np.concatenate([self.shifts, np.zeros(shape[1] - old_slots, np.int32)])


class NativeKVPool:
    """`num_pages` pages of `page_size` tokens, zeroed. They hold the stored type: reading gives what was kept.

    Raises InvalidInput for groups that differ in shape or an impossible page size.
    """

    def __init__(self, engine: Any, num_pages: int, page_size: int, groups: Sequence[KVGroup]) -> None:
        self._lib = library()
        self.num_pages, self.page_size, self.groups = num_pages, page_size, tuple(groups)
        self.where = layer_map(groups)  # layer -> (group, index within the group)
        kind, _, self.num_kv_heads, self.head_dim, self.depth = _shape(page_size, groups)
        self.handle = self._lib.octavo_kv_open(
            engine.handle, kind, page_size, self.num_kv_heads, self.head_dim, self.depth, num_pages
        )
        if not self.handle:
            raise InvalidInput("kv_memory", num_pages, self._lib.octavo_error().decode())
        self.engine = engine  # outlives the pool
        self.programs: dict[Any, Any] = {}  # of each compiled model that runs over these pages
        close_with(self, self._lib.octavo_kv_close, self.handle)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source to page target, for each pair. Raises InvalidInput for a page past the pool."""
        flat = np.ascontiguousarray(pairs, np.int32).reshape(-1)
        check(self._lib.octavo_kv_copy_pages(self.handle, flat.ctypes.data, len(flat) // 2), "pages")

    def copy_page(self, src: int, dst: int) -> None:
        """All slots of page `src` to page `dst`."""
        self.copy_pages([(src, dst)])

    @property
    def stored_bytes(self) -> int:
        """Bytes of one page in host memory: as they lie. Raises InvalidInput if the library cannot show them."""
        if not hasattr(self._lib, "octavo_kv_page"):
            remedy = "this native library has no host tier: build it again (native/build.sh), or give none"
            raise InvalidInput("host_kv_memory", "set", remedy)
        return int(self._lib.octavo_kv_page_bytes(self.handle))

    def save_page(self, page: int, out: memoryview) -> None:
        """All bytes of the page."""
        out[:] = self._memory(page)

    def load_page(self, page: int, data: memoryview) -> None:
        """Make the page hold what `save_page` wrote."""
        self._memory(page)[:] = data

    def _memory(self, page: int) -> memoryview:
        """The bytes of one page, where they lie. Raises InvalidInput for a page past the pool."""
        show = self._lib.octavo_kv_page
        show.restype, show.argtypes = c.c_void_p, (c.c_void_p, c.c_int32)
        address = show(self.handle, page)
        if not address:
            raise InvalidInput("page", page, self._lib.octavo_error().decode())
        size = self._lib.octavo_kv_page_bytes(self.handle)
        return memoryview((c.c_uint8 * size).from_address(address)).cast("B")

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Slot source (page * page_size + offset) to slot target, all layers, in order."""
        flat = np.ascontiguousarray(moves, np.int64).reshape(-1)
        check(self._lib.octavo_kv_move_slots(self.handle, flat.ctypes.data, len(flat) // 2), "slots")

    def keep(self, sources: Sequence[int], targets: Sequence[int], kept: NDArray[np.int64]) -> None:
        """Place kept[layer, kv head, i] of pages `sources` to place i of pages `targets`; of one KV group."""
        arrays = [np.ascontiguousarray(each, np.int32) for each in (sources, targets, kept)]
        if arrays[2].shape[:2] != (self.depth, self.num_kv_heads):
            raise InvalidInput("kept", kept.shape, f"give {self.depth} layers of {self.num_kv_heads} heads")
        keep = self._lib.octavo_kv_keep
        keep.restype, keep.argtypes = c.c_int32, (c.c_void_p, *(c.c_void_p, c.c_int32) * 3)
        given = (value for a in arrays for value in (a.ctypes.data, a.shape[-1]))
        check(keep(self.handle, *given), "pages")

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Store one token's key and value, all layers flattened."""
        keys, values = self._layers(key), self._layers(value)
        slot = page * self.page_size + offset
        for layer in range(len(keys)):
            k, v = keys[layer], values[layer]
            check(self._lib.octavo_kv_write(self.handle, layer, slot, k.ctypes.data, v.ctypes.data), "slot")

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """One token's key and value as stored, all layers flattened."""
        shape = (self.depth, self.num_kv_heads * self.head_dim)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        slot = page * self.page_size + offset
        for layer in range(self.depth):
            k, v = keys[layer], values[layer]
            check(self._lib.octavo_kv_read(self.handle, layer, slot, k.ctypes.data, v.ctypes.data), "slot")
        return keys.ravel().tolist(), values.ravel().tolist()

    def forget(self, page: int) -> None:
        """The page is free. Its bytes may stay: no lane reaches them before they are written again."""

    def _layers(self, flat: Sequence[float]) -> NDArray[np.float32]:
        width = self.num_kv_heads * self.head_dim
        values = np.ascontiguousarray(flat, np.float32)
        if not 0 < values.size <= self.depth * width or values.size % width:
            raise InvalidInput("key or value", f"{values.size} values", f"give up to {self.depth} layers of {width}")
        return values.reshape(-1, width)
