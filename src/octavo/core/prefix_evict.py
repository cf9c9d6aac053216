"""What to evict next: a heap over a logical clock of unlocked leaves and of windowed pages that nobody owns."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from octavo.core.pages import PageAllocator
from octavo.core.prefix_node import PrefixNode

_LEAF, _PAGE = 0, 1
_MIN_HEAP = 64


class EvictionQueue:
    """Least recently used first, by a logical clock, so that the order is the same in every run.

    Entries are not removed when they become wrong (the leaf was locked, used again or got a child; the page was used
    again): they are recognised when they come to the top. Whatever becomes evictable is pushed at that moment.
    """

    def __init__(self, allocator: PageAllocator, windowed: tuple[bool, ...]) -> None:
        self._allocator = allocator
        self._windowed = windowed  # per group
        self._clock = 0
        self._pushes = 0
        self._limit = _MIN_HEAP
        self._heap: list[tuple[int, int, int, PrefixNode | int]] = []  # (stamp, kind, push number, leaf or page)
        self._holder: dict[int, tuple[PrefixNode, int]] = {}  # windowed page -> its node and group
        self._page_stamp: dict[int, int] = {}

    # ---- leaves

    def touch(self, node: PrefixNode) -> None:
        """The node is used now."""
        self._clock += 1
        self.stamp(node, self._clock)

    def stamp(self, node: PrefixNode, stamp: int) -> None:
        """The node was last used at `stamp`."""
        node.stamp = stamp
        self.settle(node)

    def settle(self, node: PrefixNode) -> None:
        """Queue the node if it is an unlocked leaf."""
        if self._is_free_leaf(node):
            self._push(node.stamp, _LEAF, node)

    # ---- windowed pages

    def hold(self, page: int, node: PrefixNode, group: int) -> None:
        """The tree owns the page now, in this node."""
        if self._windowed[group]:
            self._holder[page] = (node, group)
            self._page_stamp[page] = self._clock

    def moved(self, node: PrefixNode) -> None:
        """The node's pages came from another node."""
        for group, windowed in enumerate(self._windowed):
            for column in node.columns if windowed else ():
                if column[group] in self._holder:
                    self._holder[column[group]] = (node, group)

    def forget(self, page: int) -> None:
        """The tree lets go of the page."""
        if self._holder.pop(page, None) is not None:
            del self._page_stamp[page]

    def holder(self, page: int) -> tuple[PrefixNode, int]:
        """The node and the group of a windowed page that the tree owns."""
        return self._holder[page]

    def stamp_page(self, page: int) -> None:
        """A branch has just used the page (if it is a windowed one of the tree)."""
        if page in self._holder:
            self._page_stamp[page] = self._clock

    def page_evictable(self, page: int) -> None:
        """Nobody but the tree owns the page any more."""
        if page in self._holder:
            self._push(self._page_stamp[page], _PAGE, page)

    # ---- the heap

    def first(self) -> PrefixNode | int | None:
        """The next leaf to trim or page to entomb; None if there is nothing."""
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0][3]
            heappop(self._heap)
        return None

    def _push(self, stamp: int, kind: int, item: PrefixNode | int) -> None:
        self._pushes += 1
        heappush(self._heap, (stamp, kind, self._pushes, item))
        if len(self._heap) > self._limit:
            self._compact()

    def _compact(self) -> None:
        """Drop wrong and double entries, so that the heap stays as small as what it speaks of."""
        best: dict[PrefixNode | int, tuple[int, int, int, PrefixNode | int]] = {}
        for entry in self._heap:
            if self._is_valid(entry):
                best.setdefault(entry[3], entry)
        self._heap = list(best.values())
        heapify(self._heap)
        self._limit = max(_MIN_HEAP, 2 * len(self._heap))

    def _is_valid(self, entry: tuple[int, int, int, PrefixNode | int]) -> bool:
        item = entry[3]
        if isinstance(item, PrefixNode):
            return self._is_free_leaf(item) and item.stamp == entry[0]
        return self._page_stamp.get(item) == entry[0] and self._allocator.is_evictable(item)

    @staticmethod
    def _is_free_leaf(node: PrefixNode) -> bool:
        return node.alive and node.parent is not None and not node.children and not node.locks
