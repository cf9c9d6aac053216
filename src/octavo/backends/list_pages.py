"""Pages of K/V as plain lists: the pool of the reference backend, and a `KVStore` for the core's cache manager."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.errors import InvalidInput, InvariantBroken, UseAfterRelease
from octavo.core.kv_groups import KVGroup

Heads = Sequence[Sequence[float]]  # one token of one layer: [kv heads][dim]
Lane = tuple[Heads, Heads] | None  # key and value of one slot; None: never written


class ListKVPool:
    """K/V of all groups: `pages[page][layer within its group][offset]` is one token's (key, value), or None.

    A page belongs to one group at a time, so groups share page ids. Through `write` and `read` (the `KVStore` protocol)
    a token's key is its layers x heads x dim, flattened; through `lanes` it is one layer, by head.
    """

    def __init__(self, num_pages: int, page_size: int, groups: Sequence[KVGroup]) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.groups = tuple(groups)
        self.where = layer_map(groups)  # layer -> (group, index within the group)
        self._depth = max(len(group.layers) for group in groups)
        self._key_size = groups[0].num_kv_heads * groups[0].k_dim
        self._value_size = groups[0].num_kv_heads * groups[0].v_dim
        self._pages: dict[int, list[list[Lane]]] = {}

    def lanes(self, page: int, index: int) -> list[Lane]:
        """The slots of one page for the layer at `index` within its group. Raises InvariantBroken past the pool."""
        return self._page(page)[index]

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Store one token's key and value, all layers flattened. Raises InvalidInput for a wrong length."""
        group = self.groups[0]
        keys = self._split(key, group.num_kv_heads, group.k_dim)
        values = self._split(value, group.num_kv_heads, group.v_dim)
        for index, lane in enumerate(zip(keys, values, strict=True)):
            self.lanes(page, index)[offset] = lane

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """One token's key and value, all layers flattened. Raises UseAfterRelease if there are none."""
        lanes = [layer[offset] for layer in self._page(page)]
        written = [lane for lane in lanes if lane is not None]
        if not written:
            raise UseAfterRelease(f"page {page}, slot {offset} holds no key and value")
        key = [x for lane in written for head in lane[0] for x in head]
        value = [x for lane in written for head in lane[1] for x in head]
        return key, value

    def copy_page(self, src: int, dst: int) -> None:
        """All slots of page `src` to page `dst`."""
        self._page(dst)[:] = [list(layer) for layer in self._page(src)]

    @property
    def stored_bytes(self) -> int:
        """Bytes of one page in host memory: for each layer and slot whether it was written, its key and its value."""
        return self._depth * self.page_size * 8 * (1 + self._key_size + self._value_size)

    def save_page(self, page: int, out: memoryview) -> None:
        """All slots of the page, numbers as they are."""
        numbers, nothing = array("d"), [0.0] * (1 + self._key_size + self._value_size)
        for layer in self._page(page):
            for lane in layer:
                numbers.extend(nothing if lane is None else [1.0, *(x for part in lane for head in part for x in head)])
        out[:] = numbers.tobytes()

    def load_page(self, page: int, data: memoryview) -> None:
        """Make the page hold what `save_page` wrote."""
        numbers, at, group = array("d", bytes(data)), 0, self.groups[0]
        for layer in self._page(page):
            for offset in range(self.page_size):
                key = numbers[at + 1 : at + 1 + self._key_size].tolist()
                value = numbers[at + 1 + self._key_size : at + 1 + self._key_size + self._value_size].tolist()
                lane = split_heads(key, group.k_dim), split_heads(value, group.v_dim)
                layer[offset] = lane if numbers[at] else None
                at += 1 + self._key_size + self._value_size

    def move_slot(self, source: int, target: int) -> None:
        """All layers of slot `source` (page * page_size + offset) to slot `target`."""
        from_page, from_offset = divmod(source, self.page_size)
        to_page, to_offset = divmod(target, self.page_size)
        for old, new in zip(self._page(from_page), self._page(to_page), strict=True):
            new[to_offset] = old[from_offset]

    def keep(self, index: int, sources: Sequence[int], targets: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Of the layer at `index`: place kept[head][i] of pages `sources` to place i of pages `targets`."""
        lanes = [lane for page in sources for lane in self.lanes(page, index)]
        for at, places in enumerate(zip(*kept, strict=True)):
            held = [lanes[place] for place in places]
            if None in held:
                raise InvariantBroken(f"a place of {places} stays but was never written")
            page, offset = targets[at // self.page_size], at % self.page_size
            keys, values = ([lane[part][head] for head, lane in enumerate(held) if lane] for part in (0, 1))
            self.lanes(page, index)[offset] = (keys, values)

    def forget(self, page: int) -> None:
        """Drop a page's contents: a later read of it raises."""
        self._pages.pop(page, None)

    def _page(self, page: int) -> list[list[Lane]]:
        if page not in self._pages:
            if not 0 <= page < self.num_pages:
                raise InvariantBroken(f"page {page} is used, but the pool has pages 0 to {self.num_pages - 1}")
            self._pages[page] = [[None] * self.page_size for _ in range(self._depth)]
        return self._pages[page]

    def _split(self, flat: Sequence[float], heads: int, dim: int) -> list[list[list[float]]]:
        if len(flat) % (heads * dim) or not 0 < len(flat) <= self._depth * heads * dim:
            remedy = f"give {self._depth} layers x {heads} heads x {dim} values, flattened"
            raise InvalidInput("key or value", f"{len(flat)} values", remedy)
        rows = split_heads(flat, dim)
        return [rows[i : i + heads] for i in range(0, len(rows), heads)]


def layer_map(groups: Sequence[KVGroup]) -> dict[int, tuple[int, int]]:
    """layer -> (group, index within the group)."""
    return {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}


def split_heads(flat: Sequence[float], dim: int) -> list[list[float]]:
    """[heads * dim] -> [heads][dim]."""
    return [list(flat[i : i + dim]) for i in range(0, len(flat), dim)]
