"""The host tier: what the prefix cache evicts goes into host memory, from there to disk, and comes back from both.

    root (namespace) -- column -- column -- column      a column: the units of one page, and its host page in each group
                           |                            a column without pages is only a way to what is below it
                           +------- column -- tail      a tail: a column of fewer units than a page holds

Units are compared, never hashes of them: an entry is found by the units of its column under the entry before it. Here
is only the book-keeping; the bytes, with a checksum for each page, are the runner's (`octavo.engine.tiers`). Pages are
numbered through: memory [0, num_pages), then disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.prefix_node import PrefixNode
from octavo.core.tier_entry import HostEntry, HostStats, SavedColumn, TierQueue, longest_child, saved_column

__all__ = ["HostEntry", "HostStats", "HostTier", "SavedColumn"]


class HostTier:
    """`num_pages` pages of memory and `disk_pages` of disk, given to columns; the least recently used one makes room.

    What leaves memory goes to disk: `on_sink(page, disk page)`, if `may_sink(pages)` says that their bytes are there.
    A column that others lead from leaves memory only if there is a disk, and leaves the disk only if memory has it.
    A page that is pinned (a step reads or writes it) is not reused. `on_free(page)` is called when one becomes free.
    Each call costs what the columns that it names cost.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, disk_pages: int = 0, on_free: Callable[[int], None] | None = None
    ) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise InvalidInput("host_pages", num_pages, "give a positive integer, or 0 for no host tier")
        if isinstance(disk_pages, bool) or not isinstance(disk_pages, int) or disk_pages < 0:
            raise InvalidInput("disk_pages", disk_pages, "give an integer >= 0")
        self.num_pages, self.disk_pages, self.page_size, self.on_free = num_pages, disk_pages, page_size, on_free
        self.on_sink: Callable[[int, int], None] = lambda page, disk: None
        self.may_sink: Callable[[Sequence[int]], bool] = lambda pages: True
        self.stats = HostStats()
        self._free = list(range(num_pages))
        self._free_disk = list(range(num_pages, num_pages + disk_pages))
        self._roots: dict[str, HostEntry] = {}
        self._holder: dict[int, HostEntry] = {}  # by page
        self._pins: dict[int, int] = {}
        self._doomed: dict[int, None] = {}  # given back, but pinned
        self._clock = self._numbers = 0
        self._queue, self._disk_queue = TierQueue(self._may_go), TierQueue(self._may_leave_disk)
        self._way: list[HostEntry] = []  # to the last column of the leaf that was trimmed last
        self._way_leaf: PrefixNode | None = None

    # ---- keeping

    def keep(self, leaf: PrefixNode) -> tuple[int, ...]:
        """Pages of memory for the last column of a leaf that is being evicted; empty if it is there, or no room is.

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
        self._hold(entry, pages)
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
            if tail is not None and not self._is_pinned(tail.pages + tail.disk):
                self._clear(tail)

    def _hold(self, entry: HostEntry, pages: Sequence[int]) -> None:
        for page in pages:
            self._holder[page] = entry

    def _take(self, count: int) -> tuple[int, ...]:
        """Free pages of memory, pushing others out for them; none if there are not so many."""
        while len(self._free) < count:
            entry = self._queue.first()
            if entry is None:
                return ()
            self.stats.pushed_out += len(entry.pages)
            self._sink(entry)
            self._leave(entry)
        return tuple(heappop(self._free) for _ in range(count))

    def _sink(self, entry: HostEntry) -> None:
        """What is about to leave memory goes to disk, unless it is there, or its bytes are not here yet."""
        if not self.disk_pages or entry.disk or not self.may_sink(entry.pages):
            return
        while len(self._free_disk) < len(entry.pages):
            oldest = self._disk_queue.first()
            if oldest is None:
                return
            self.stats.disk_pushed_out += len(oldest.disk)
            self._leave_disk(oldest)
        entry.disk = tuple(heappop(self._free_disk) for _ in entry.pages)
        self._hold(entry, entry.disk)
        self.stats.sunk += len(entry.disk)
        for page, disk in zip(entry.pages, entry.disk, strict=True):
            self.on_sink(page, disk)

    # ---- finding

    def match(self, namespace: str, units: Sequence[int], first: int) -> list[HostEntry]:
        """The columns kept of `units` from column `first` on, up to the first that is missing; perhaps a tail last."""
        entry, size = self._roots.get(namespace), self.page_size
        found: list[HostEntry] = []
        column = 0
        while entry is not None and column * size < len(units):
            wanted = tuple(units[column * size : (column + 1) * size])
            entry = entry.children.get(wanted) if column < first else longest_child(entry, wanted)
            if entry is None or (column >= first and not entry.held):
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
            if entry.pages:
                self.stats.restored += len(entry.pages)
            else:
                self.stats.disk_restored += len(entry.disk)

    def is_on_disk(self, page: int) -> bool:
        """True for the number of a page of disk."""
        return page >= self.num_pages

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
        """What these pages hold cannot be relied on: the columns that name them are forgotten there."""
        for page in pages:
            entry = self._holder.get(page)
            if entry is None:
                continue
            self.stats.dropped += len(entry.disk if self.is_on_disk(page) else entry.pages)
            if self.is_on_disk(page):
                self._leave_disk(entry)
            else:
                self._leave(entry)

    def flush(self) -> None:
        """Forget everything."""
        for page in list(self._holder):
            if page in self._holder:
                self._clear(self._holder[page])

    @property
    def num_held(self) -> int:
        """Pages that hold a column, in memory or on disk."""
        return len(self._holder)

    @property
    def num_used(self) -> tuple[int, int]:
        """Pages that are not free, in memory and on disk."""
        return self.num_pages - len(self._free), self.disk_pages - len(self._free_disk)

    def _clear(self, entry: HostEntry) -> None:
        """The entry has no pages any more, here or there; it goes, and what led only to it."""
        disk, entry.disk = entry.disk, ()
        self._give_back(disk)
        self._leave(entry)

    def _leave(self, entry: HostEntry) -> None:
        """The entry leaves memory."""
        pages, entry.pages = entry.pages, ()
        self._give_back(pages)
        self._tidy(entry)

    def _leave_disk(self, entry: HostEntry) -> None:
        disk, entry.disk = entry.disk, ()
        self._give_back(disk)
        self._tidy(entry)

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            del self._holder[page]
            if page in self._pins:
                self._doomed[page] = None
            else:
                self._release(page)

    def _release(self, page: int) -> None:
        heappush(self._free_disk if self.is_on_disk(page) else self._free, page)
        if self.on_free is not None:
            self.on_free(page)

    def _tidy(self, entry: HostEntry) -> None:
        """Take the entry, and those above it, out of the tree as far as they hold nothing and lead nowhere."""
        while not entry.held and not entry.children:
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
        """Queue the entry where it may be pushed out."""
        self._queue.settle(entry)
        self._disk_queue.settle(entry)

    def _may_go(self, entry: HostEntry) -> bool:
        leads = bool(entry.children) and not self.disk_pages
        return bool(entry.pages) and not leads and not self._is_pinned(entry.pages)

    def _may_leave_disk(self, entry: HostEntry) -> bool:
        leads = bool(entry.children) and not entry.pages
        return bool(entry.disk) and not leads and not self._is_pinned(entry.disk)

    def _is_pinned(self, pages: Sequence[int]) -> bool:
        return any(page in self._pins for page in pages)

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

    # ---- over a restart

    def saved(self) -> list[SavedColumn]:
        """What is on disk, with the ways to it; parents come first."""
        kept: dict[int, HostEntry] = {}
        for page, holder in self._holder.items():
            entry: HostEntry | None = holder if self.is_on_disk(page) else None
            while entry is not None and entry.parent is not None and entry.number not in kept:
                kept[entry.number] = entry
                entry = entry.parent
        return [saved_column(kept[number], self.num_pages) for number in sorted(kept)]  # children are younger

    def adopt(self, columns: Sequence[SavedColumn]) -> None:
        """Go on with what `saved` gave, of this many pages or of others. Raises `InvalidInput` if it was another's.

        Call it on an empty tier.
        """
        by_number: dict[int, HostEntry] = {}
        free = dict.fromkeys(self._free_disk)
        for column in columns:
            parent = by_number.get(column.parent) if column.parent else self._root(column.namespace)
            units, disk = tuple(column.units), tuple(page + self.num_pages for page in column.pages)
            if parent is None or units in parent.children or column.number in by_number or column.number < 1:
                raise InvalidInput("columns", column.number, "give what `saved` gave: parents first, each once")
            if len(dict.fromkeys(disk)) != len(disk) or any(page not in free for page in disk):
                raise InvalidInput("columns", column.pages, "give pages that the disk tier has, each once")
            for page in disk:
                del free[page]
            entry = parent.children[units] = HostEntry(column.number, column.namespace, parent, units)
            by_number[column.number], entry.stamp, entry.disk = entry, column.stamp, disk
            self._hold(entry, disk)
            self._numbers, self._clock = max(self._numbers, column.number), max(self._clock, column.stamp)
        self._free_disk = list(free)
        for entry in by_number.values():
            self._tidy(entry)

    def audit(self) -> None:
        """Recount: free, held and given back but pinned are all pages. Raises `InvariantBroken` on any difference."""
        every = list(range(self.num_pages + self.disk_pages))
        if sorted([*self._free, *self._free_disk, *self._holder, *self._doomed]) != every:
            raise InvariantBroken("a host page is not exactly one of free, held, and given back but pinned")
        held: list[int] = []
        queued, on_disk = self._queue.queued(), self._disk_queue.queued()
        entries = list(self._roots.values())
        while entries:
            entry = entries.pop()
            entries += entry.children.values()
            held += entry.pages + entry.disk
            if any(child.parent is not entry or child.units != key for key, child in entry.children.items()):
                raise InvariantBroken(f"host entry {entry.number} has a child in the wrong place")
            if not entry.held and not entry.children:
                raise InvariantBroken(f"host entry {entry.number} holds nothing and leads nowhere")
            if any(self._holder.get(page) is not entry for page in entry.pages + entry.disk):
                raise InvariantBroken(f"host entry {entry.number} names a page that it does not hold")
            if any(map(self.is_on_disk, entry.pages)) or not all(map(self.is_on_disk, entry.disk)):
                raise InvariantBroken(f"host entry {entry.number} has pages of the other kind")
            key = (entry.stamp, entry.number)
            if (self._may_go(entry) and key not in queued) or (self._may_leave_disk(entry) and key not in on_disk):
                raise InvariantBroken(f"host entry {entry.number} may go and is not in the queue")
        if len(held) != len(self._holder):
            raise InvariantBroken("a host page is held by an entry that is not in the tree")
        if any(page not in self._holder and page not in self._doomed for page in self._pins):
            raise InvariantBroken("a free host page is pinned")
