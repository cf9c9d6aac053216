"""The host tier: what the prefix cache evicts goes into host memory, and comes back from there.

    root (namespace) -- column -- column -- column      a column: the units of one page, and its host page in each group
                           |                            a column without pages is only a way to what is below it
                           +------- column -- tail      a tail: a column of fewer units than a page holds

Units are compared, never hashes of them: an entry is found by the units of its column under the entry before it. Here
is only the book-keeping; the bytes, with a checksum for each page, are the runner's (`octavo.engine.host_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.prefix_node import PrefixNode

__all__ = ["HostEntry", "HostStats", "HostTier"]

_MIN_HEAP = 64


class HostEntry:
    """One column: the units of a page below those of its parent, and the host pages that hold it."""

    __slots__ = ("children", "namespace", "number", "pages", "parent", "stamp", "units")

    def __init__(self, number: int, namespace: str, parent: HostEntry | None, units: tuple[int, ...]) -> None:
        self.number = number
        self.namespace = namespace
        self.parent = parent
        self.units = units
        self.children: dict[tuple[int, ...], HostEntry] = {}
        self.pages: tuple[int, ...] = ()
        self.stamp = 0  # logical time of last use


@dataclass
class HostStats:
    """Counters of pages since start."""

    kept: int = 0  # evicted from the pool into the tier
    restored: int = 0  # planned to be read back
    pushed_out: int = 0  # for others, least recently used first
    dropped: int = 0  # their step failed, or their bytes are not what was written


class HostTier:
    """`num_pages` host pages, given to columns; the least recently used one that nothing depends on makes room.

    A page that is pinned (a step reads or writes it) is not reused. `on_free(page)` is called when one becomes free.
    Each call costs what the columns that it names cost.
    """

    def __init__(self, num_pages: int, page_size: int, *, on_free: Callable[[int], None] | None = None) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise InvalidInput("host_pages", num_pages, "give a positive integer, or 0 for no host tier")
        self.num_pages, self.page_size, self.on_free = num_pages, page_size, on_free
        self.stats = HostStats()
        self._free = list(range(num_pages))
        self._roots: dict[str, HostEntry] = {}
        self._holder: dict[int, HostEntry] = {}  # by host page
        self._pins: dict[int, int] = {}
        self._doomed: dict[int, None] = {}  # given back, but pinned
        self._clock = self._numbers = 0
        self._heap: list[tuple[int, int, HostEntry]] = []  # (stamp, number, entry): wrong ones are known at the top
        self._limit = _MIN_HEAP
        self._way: list[HostEntry] = []  # to the last column of the leaf that was trimmed last
        self._way_leaf: PrefixNode | None = None

    # ---- keeping

    def keep(self, leaf: PrefixNode) -> tuple[int, ...]:
        """Host pages for the last column of a leaf that is being evicted; empty if it is there already, or no room is.

        Call `pass_over` instead for a column that is not kept.
        """
        units = tuple(leaf.units[(len(leaf.columns) - 1) * self.page_size :])
        entry = self._entry_above(leaf).children.get(units)
        if entry is not None and entry.pages:
            self._touch(entry)
            return ()
        pages = self._take(len(leaf.columns[-1]))
        parent = self._entry_above(leaf)  # taking pages may have cut it off
        if not pages:
            self._tidy(parent)
            return ()
        entry = parent.children.get(units) or self._add(parent, units)
        self._drop_covered(parent, units)
        entry.pages = pages
        for page in pages:
            self._holder[page] = entry
        self.stats.kept += len(pages)
        self._touch(entry)
        return pages

    def pass_over(self, leaf: PrefixNode) -> None:
        """The leaf loses its last column and nothing of it is kept."""
        if self._way_leaf is leaf:
            del self._way[leaf.end :]

    def _entry_above(self, leaf: PrefixNode) -> HostEntry:
        """The entry under which the leaf's last column goes. Leaves are trimmed from the end: the way is remembered."""
        depth, size = leaf.end - 1, self.page_size
        way = self._way
        if self._way_leaf is not leaf or len(way) <= depth or not self._is_attached(way[depth]):
            way = [self._root(leaf.namespace)]
            units = [unit for node in leaf.path() for unit in node.units]
            for start in range(0, depth * size, size):
                column = tuple(units[start : start + size])
                way.append(way[-1].children.get(column) or self._add(way[-1], column))
        self._way_leaf, self._way = leaf, way[: depth + 1]
        return way[depth]

    def _is_attached(self, entry: HostEntry) -> bool:
        if entry.parent is None:
            return self._roots.get(entry.namespace) is entry
        return entry.parent.children.get(entry.units) is entry

    def _drop_covered(self, parent: HostEntry, units: tuple[int, ...]) -> None:
        """A column with more of the same units is worth more than a tail of them."""
        for count in range(1, len(units)):
            tail = parent.children.get(units[:count])
            if tail is not None and not self._is_pinned(tail):
                self._clear(tail)

    def _take(self, count: int) -> tuple[int, ...]:
        """Free host pages, pushing others out for them; none if there are not so many."""
        while len(self._free) < count:
            entry = self._oldest()
            if entry is None:
                return ()
            self.stats.pushed_out += len(entry.pages)
            self._clear(entry)
        return tuple(heappop(self._free) for _ in range(count))

    # ---- finding

    def match(self, namespace: str, units: Sequence[int], first: int) -> list[HostEntry]:
        """The columns kept of `units` from column `first` on, up to the first that is missing; perhaps a tail last."""
        entry, size = self._roots.get(namespace), self.page_size
        found: list[HostEntry] = []
        column = 0
        while entry is not None and column * size < len(units):
            wanted = tuple(units[column * size : (column + 1) * size])
            entry = entry.children.get(wanted) if column < first else _longest_child(entry, wanted)
            if entry is None or (column >= first and not entry.pages):
                break
            if column >= first:
                found.append(entry)
            column += 1
            if len(entry.units) < size:
                break
        return found

    def use(self, entries: Sequence[HostEntry]) -> None:
        """The entries are being read: each is now used later than those before it."""
        for entry in reversed(entries):
            self._touch(entry)
            self.stats.restored += len(entry.pages)

    # ---- pins

    def pin(self, page: int) -> None:
        """A step reads or writes the page: it is not reused before as many `unpin`."""
        self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        """Take one `pin` back."""
        if page not in self._pins:
            raise InvariantBroken(f"host page {page} is not pinned")
        self._pins[page] -= 1
        if self._pins[page]:
            return
        del self._pins[page]
        if page in self._doomed:
            del self._doomed[page]
            self._release(page)
        else:
            self._settle(self._holder[page])

    def pin_counts(self) -> dict[int, int]:
        """How often each pinned page is pinned."""
        return dict(self._pins)

    # ---- dropping

    def drop(self, pages: Sequence[int]) -> None:
        """What these pages hold cannot be relied on: the columns that name them are forgotten."""
        for page in pages:
            entry = self._holder.get(page)
            if entry is not None:
                self.stats.dropped += len(entry.pages)
                self._clear(entry)

    def flush(self) -> None:
        """Forget everything."""
        for page in list(self._holder):
            if page in self._holder:
                self._clear(self._holder[page])

    @property
    def num_held(self) -> int:
        """Pages that hold a column."""
        return len(self._holder)

    def _clear(self, entry: HostEntry) -> None:
        """The entry has no pages any more; it goes, and what led only to it."""
        pages, entry.pages = entry.pages, ()
        for page in pages:
            del self._holder[page]
            if page in self._pins:
                self._doomed[page] = None
            else:
                self._release(page)
        self._tidy(entry)

    def _release(self, page: int) -> None:
        heappush(self._free, page)
        if self.on_free is not None:
            self.on_free(page)

    def _tidy(self, entry: HostEntry) -> None:
        """Take the entry, and those above it, out of the tree as far as they hold nothing and lead nowhere."""
        while not entry.pages and not entry.children:
            parent = entry.parent
            if parent is None:
                self._roots.pop(entry.namespace, None)
                return
            del parent.children[entry.units]
            entry = parent
        self._settle(entry)

    # ---- order of use

    def _touch(self, entry: HostEntry) -> None:
        self._clock += 1
        entry.stamp = self._clock
        self._settle(entry)

    def _settle(self, entry: HostEntry) -> None:
        """Queue the entry if it may be pushed out."""
        if self._may_go(entry):
            heappush(self._heap, (entry.stamp, entry.number, entry))
            if len(self._heap) > self._limit:
                self._heap = list({each: None for each in self._heap if self._is_valid(each)})
                heapify(self._heap)
                self._limit = max(_MIN_HEAP, 2 * len(self._heap))

    def _oldest(self) -> HostEntry | None:
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0][2]
            heappop(self._heap)
        return None

    def _is_valid(self, queued: tuple[int, int, HostEntry]) -> bool:
        return queued[2].stamp == queued[0] and self._may_go(queued[2])

    def _may_go(self, entry: HostEntry) -> bool:
        return bool(entry.pages) and not entry.children and not self._is_pinned(entry)

    def _is_pinned(self, entry: HostEntry) -> bool:
        return any(page in self._pins for page in entry.pages)

    # ---- shape

    def _root(self, namespace: str) -> HostEntry:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = HostEntry(0, namespace, None, ())
        return root

    def _add(self, parent: HostEntry, units: tuple[int, ...]) -> HostEntry:
        self._numbers += 1
        entry = parent.children[units] = HostEntry(self._numbers, parent.namespace, parent, units)
        return entry

    def audit(self) -> None:
        """Recount: free, held and given back but pinned are all pages. Raises `InvariantBroken` on any difference."""
        if sorted([*self._free, *self._holder, *self._doomed]) != list(range(self.num_pages)):
            raise InvariantBroken("a host page is not exactly one of free, held, and given back but pinned")
        queued = {(entry.number, stamp) for stamp, _, entry in self._heap}
        held: list[int] = []
        entries = list(self._roots.values())
        while entries:
            entry = entries.pop()
            entries += entry.children.values()
            held += entry.pages
            if any(child.parent is not entry or child.units != key for key, child in entry.children.items()):
                raise InvariantBroken(f"host entry {entry.number} has a child in the wrong place")
            if not entry.pages and not entry.children:
                raise InvariantBroken(f"host entry {entry.number} holds nothing and leads nowhere")
            if any(self._holder.get(page) is not entry for page in entry.pages):
                raise InvariantBroken(f"host entry {entry.number} names a page that it does not hold")
            if self._may_go(entry) and (entry.number, entry.stamp) not in queued:
                raise InvariantBroken(f"host entry {entry.number} may go and is not in the queue")
        if len(held) != len(self._holder):
            raise InvariantBroken("a host page is held by an entry that is not in the tree")
        if any(page not in self._holder and page not in self._doomed for page in self._pins):
            raise InvariantBroken("a free host page is pinned")


def _longest_child(entry: HostEntry, units: tuple[int, ...]) -> HostEntry | None:
    """The child of all of `units`, or the longest tail that they begin with."""
    for count in range(len(units), 0, -1):
        child = entry.children.get(units[:count])
        if child is not None:
            return child
    return None
