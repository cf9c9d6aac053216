"""The swaps of the step being planned: what leaves for the host tier and for disk, and what comes back from both.

A step moves pages in this order: from memory to disk, swap-outs, swap-ins, page copies; then it writes. So a page that
is evicted for a need of this very step leaves before anything overwrites it, and what comes back may be copied from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.batch import PageCopy
from octavo.core.errors import InvariantBroken
from octavo.core.host_tier import HostTier
from octavo.core.prefix_node import TOMBSTONE, PrefixNode
from octavo.core.undo import UndoLog

__all__ = ["NO_SWAPS", "SwapPlan", "Swaps"]


class Swaps(NamedTuple):
    """The moves of one step between page pool, host memory and disk."""

    outs: tuple[PageCopy, ...] = ()  # pool -> memory
    ins: tuple[PageCopy, ...] = ()  # memory or disk -> pool
    sinks: tuple[PageCopy, ...] = ()  # memory -> disk


NO_SWAPS = Swaps()


class SwapPlan:
    """Swap-outs wait for the next step that runs, whoever caused them; swap-ins belong to the step being planned."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        tier.on_free, tier.on_sink, tier.may_sink = self._call_off_out, self._plan_sink, self._has_bytes
        self._sinks: dict[int, int] = {}  # page of disk -> host page
        self._outs: dict[int, int] = {}  # host page -> page of the pool
        self._leaving: dict[int, int] = {}  # and the other way round
        self._ins: dict[int, int] = {}  # page of the pool -> host page, pinned
        self._taken: list[int] = []  # pinned host pages of the decision that was just made
        self._steps: dict[int, list[int]] = {}

    def evicted(self, leaf: PrefixNode) -> None:
        """The leaf is about to lose its last column: keep it, unless a window has passed part of it."""
        column = leaf.columns[-1]
        if TOMBSTONE in column:
            self.tier.pass_over(leaf)
            return
        for page, host in zip(column, self.tier.keep(leaf), strict=False):
            self._outs[host] = page
            self._leaving[page] = host

    def is_leaving(self, page: int) -> bool:
        """True if the page is free, or somebody else's, and its old bytes are still to be read."""
        return page in self._leaving

    def plan_ins(self, hosts: Sequence[int], pages: Sequence[int]) -> None:
        """Read pinned host pages into fresh pages of the pool."""
        self._ins.update(zip(pages, hosts, strict=True))

    def call_off(self, page: int) -> None:
        """Nobody owns this page of the pool any more: what was to be read into it is not."""
        if page in self._ins:
            self.tier.unpin(self._ins.pop(page))

    def take(self, undo: UndoLog) -> Swaps:
        """The swaps of a decision, once. What a failed step was to write is not relied on."""
        sinks = tuple(PageCopy(host, disk) for disk, host in self._sinks.items())
        outs = tuple(PageCopy(page, host) for host, page in self._outs.items())
        ins = tuple(PageCopy(host, page) for page, host in self._ins.items())
        written = [copy.target for copy in (*sinks, *outs)]
        for host in written:
            self.tier.pin(host)
        self._taken += [*written, *self._ins.values()]
        self._sinks, self._outs, self._leaving, self._ins = {}, {}, {}, {}
        if written:
            undo.push(lambda: self.tier.drop(written))
        return Swaps(outs, ins, sinks)

    def start_step(self, step: int) -> None:
        """The decision that took the swaps is in flight. Raises `InvariantBroken` if swap-ins were left behind."""
        if self._ins:
            raise InvariantBroken(f"{len(self._ins)} swap-ins were planned but not taken")
        self._steps[step], self._taken = self._taken, []

    def end_step(self, step: int) -> None:
        """The step runs no more. Idempotent."""
        for host in self._steps.pop(step, ()):
            self.tier.unpin(host)

    def flush(self) -> None:
        """Forget what the tier keeps."""
        self.tier.flush()

    def audit(self) -> None:
        """Check the tier, and the plan against it. Raises `InvariantBroken`."""
        self.tier.audit()
        if {page: host for host, page in self._outs.items()} != self._leaving:
            raise InvariantBroken("two swap-outs of one page")
        pins = [*self._ins.values(), *self._taken, *(host for hosts in self._steps.values() for host in hosts)]
        if self.tier.pin_counts() != {host: pins.count(host) for host in pins}:
            raise InvariantBroken("the pinned host pages are not those that steps read and write")

    def _plan_sink(self, host: int, disk: int) -> None:
        self._sinks[disk] = host

    def _has_bytes(self, hosts: Sequence[int]) -> bool:
        """False while pages of memory wait for what is to be written there."""
        return not any(host in self._outs for host in hosts)

    def _call_off_out(self, host: int) -> None:
        """The page of the tier is free: what was to be written there is not."""
        self._sinks.pop(host, None)
        if host in self._outs:
            del self._leaving[self._outs.pop(host)]
