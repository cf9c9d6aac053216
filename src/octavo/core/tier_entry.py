"""The plain records of the host tier: its columns, its counters, and the order in which they make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

__all__ = ["HostEntry", "HostStats", "SavedColumn", "TierQueue", "longest_child", "saved_column"]

_MIN_HEAP = 64


class SavedColumn(NamedTuple):
    """A column of the disk tier as it is kept over a restart; `parent` 0: right below the root of its namespace."""

    number: int
    parent: int
    stamp: int
    namespace: str
    units: Sequence[int]
    pages: Sequence[int]  # numbered from 0; empty: only a way


class HostEntry:
    """One column: the units of a page below those of its parent, and the pages that hold it, in memory, on disk."""

    __slots__ = ("children", "disk", "namespace", "number", "pages", "parent", "stamp", "units")

    def __init__(self, number: int, namespace: str, parent: HostEntry | None, units: tuple[int, ...]) -> None:
        self.number = number
        self.namespace = namespace
        self.parent = parent
        self.units = units
        self.children: dict[tuple[int, ...], HostEntry] = {}
        self.pages: tuple[int, ...] = ()
        self.disk: tuple[int, ...] = ()
        self.stamp = 0  # logical time of last use

    @property
    def held(self) -> tuple[int, ...]:
        """Its pages in memory, or else on disk; empty: only a way."""
        return self.pages or self.disk


@dataclass
class HostStats:
    """Counters of pages since start, and of tokens looked up behind what the page pool had."""

    kept: int = 0  # evicted from the pool into memory
    restored: int = 0  # planned to be read back from memory
    pushed_out: int = 0  # of memory, for others, least recently used first
    dropped: int = 0  # of either: their step failed, or their bytes are not what was written
    sunk: int = 0  # from memory to disk
    disk_restored: int = 0  # planned to be read back from disk
    disk_pushed_out: int = 0
    query_units: int = 0
    hit_units: int = 0


class TierQueue:
    """What may be pushed out, least recently used first. Wrong entries are known when they come to the top."""

    def __init__(self, may_go: Callable[[HostEntry], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, HostEntry]] = []  # (stamp, number, entry)
        self._limit = _MIN_HEAP

    def settle(self, entry: HostEntry) -> None:
        """Queue the entry if it may go: something has changed about it."""
        if self._may_go(entry):
            heappush(self._heap, (entry.stamp, entry.number, entry))
            if len(self._heap) > self._limit:
                self._heap = list({each: None for each in self._heap if self._is_valid(each)})
                heapify(self._heap)
                self._limit = max(_MIN_HEAP, 2 * len(self._heap))

    def first(self) -> HostEntry | None:
        """The next one to push out; None if none may go."""
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0][2]
            heappop(self._heap)
        return None

    def queued(self) -> dict[tuple[int, int], None]:
        """Stamp and number of all that is queued, wrong or not: for audits."""
        return {queued[:2]: None for queued in self._heap}

    def _is_valid(self, queued: tuple[int, int, HostEntry]) -> bool:
        return queued[2].stamp == queued[0] and self._may_go(queued[2])


def saved_column(entry: HostEntry, first_disk_page: int) -> SavedColumn:
    """An entry as it is kept over a restart."""
    parent = 0 if entry.parent is None else entry.parent.number
    pages = tuple(page - first_disk_page for page in entry.disk)
    return SavedColumn(entry.number, parent, entry.stamp, entry.namespace, entry.units, pages)


def longest_child(entry: HostEntry, units: tuple[int, ...]) -> HostEntry | None:
    """The child of all of `units`, or the longest tail that they begin with."""
    for count in range(len(units), 0, -1):
        child = entry.children.get(units[:count])
        if child is not None:
            return child
    return None
