"""Where pages lie outside the pool, and their moves: host memory and disk, for one runner.

host memory --sinks--> disk        all of it before anything overwrites what leaves
pool --swap-outs--> host memory
host memory, disk --swap-ins--> pool
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo.backends.host_pages import HostPages
from octavo.core.batch import ScheduleDecision
from octavo.core.errors import CorruptPages
from octavo.engine.disk_pages import DiskPages

__all__ = ["Tiers"]

Pairs = Sequence[tuple[int, int]]


class Tiers:
    """Moves the pages of decisions. Pages of disk are numbered from `host.num_pages` on."""

    def __init__(
        self, backend: Any, pool: Any, host: HostPages, disk: DiskPages | None, clock: Callable[[], float]
    ) -> None:
        self.backend, self.pool, self.host, self.disk, self.clock = backend, pool, host, disk, clock
        self.moved: deque[tuple[str, int, float]] = deque()  # tier, pages that came back, seconds
        self.pages_out = self.pages_in = self.pages_bad = 0  # of host memory
        self._left = 0  # the step whose sinks and swap-outs were made last

    def swap(self, decision: ScheduleDecision) -> None:
        """What leaves, then what returns. A decision that is sent again finds its evicted pages overwritten: what left
        has left. Raises `CorruptPages` before the step's rows write anything."""
        if decision.step != self._left and (decision.swap_outs or decision.sinks):
            for move in decision.sinks:
                self._sink(move.source, move.target - self.host.num_pages)
            if decision.swap_outs:
                outs = [(move.source, move.target) for move in decision.swap_outs]
                self.backend.swap_out(self.pool, self.host, outs)
                self.pages_out += len(outs)
            self._left = decision.step
        if decision.swap_ins:
            self._return([(move.source, move.target) for move in decision.swap_ins])

    def take_lost(self) -> list[int]:
        """Pages of disk, as decisions name them, that hold nothing after all."""
        return [] if self.disk is None else [page + self.host.num_pages for page in self.disk.take_lost()]

    def _sink(self, source: int, page: int) -> None:
        if self.disk is not None and self.host.is_sound(source):
            self.disk.write(page, self.host.view(source))
        elif self.disk is not None:
            self.disk.lose(page, "memory")

    def _return(self, ins: Pairs) -> None:
        first = self.host.num_pages
        in_memory = [pair for pair in ins if pair[0] < first]
        on_disk: dict[int, list[int]] = {}  # a page may be wanted in several places
        for source, target in ins:
            if source >= first:
                on_disk.setdefault(source - first, []).append(target)
        if in_memory:
            self._timed("host", len(in_memory), self._from_memory, in_memory)
        if on_disk:
            self._timed("disk", len(on_disk), self._from_disk, on_disk)

    def _timed(self, tier: str, count: int, move: Callable[[Any], None], pages: Any) -> None:
        started = self.clock()
        try:
            move(pages)
        finally:  # a disk that is too slow is one to learn of
            self.moved.append((tier, count, self.clock() - started))

    def _from_memory(self, pairs: Pairs) -> None:
        try:
            self.backend.swap_in(self.pool, self.host, pairs)
        except CorruptPages as error:
            self.pages_bad += len(error.pages)
            raise
        self.pages_in += len(pairs)

    def _from_disk(self, targets: dict[int, list[int]]) -> None:
        if self.disk is None:
            raise CorruptPages([page + self.host.num_pages for page in targets], "there is no disk tier")
        try:
            for page, data in self.disk.read(list(targets)):
                for target in targets[page]:
                    self.pool.load_page(target, memoryview(data))
        except CorruptPages as error:
            raise CorruptPages([page + self.host.num_pages for page in error.pages], str(error)) from None
