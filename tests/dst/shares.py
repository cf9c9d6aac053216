"""The bound of virtual token counters, in every interval of every run: two tenants that wait do not drift apart."""

from __future__ import annotations

from itertools import combinations

from dst.invariants import Broken
from octavo.core.batch import ScheduleDecision
from octavo.core.request import Branch, WaitingReason
from octavo.core.scheduler import ContinuousBatchScheduler


class Shares:
    """What each tenant has had (its prompts, twice their output), and how far two that both wait differ.

    Sheng et al., OSDI 2024: over any time in which both always have something waiting, the difference changes by at
    most 2 max(prompt price * longest prompt, output price * tokens in the pool).
    """

    def __init__(self, scheduler: ContinuousBatchScheduler, longest_prompt: int) -> None:
        self.scheduler = scheduler
        settings, kv = scheduler.config.policies, scheduler.kv
        self.prices = settings.prompt_price, settings.output_price
        pool = kv.allocator.num_pages * kv.page_size
        if any(group.window for group in kv.groups):  # it holds longer sequences than it has places
            pool = max(pool, scheduler.config.max_running_requests * scheduler.config.max_seq_len)
        self.bound = 2 * max(self.prices[0] * longest_prompt, self.prices[1] * pool)
        self.had: dict[str, float] = {}
        self._paid: set[tuple[str, int]] = set()
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}  # differences since both began to wait

    def stepped(self, decision: ScheduleDecision) -> None:
        """A step ran well: count it, and look at every two tenants that wait."""
        roster = self.scheduler._roster
        known = {branch.key: branch for branch in roster.running}
        for row in decision.rows:
            branch = known.get((row.request_id, row.choice))
            if branch is not None:  # else it ended while the step was planned ahead
                self._pay(branch, row.flags.sample)
        waiting = {b.request.tenant for b in roster.waiting if b.waiting_reason is not WaitingReason.PREFIX}
        if self.scheduler._isolation.is_active:
            waiting = set()  # only suspects may run
        before, self._ranges = self._ranges, {}
        for first, second in combinations(sorted(waiting), 2):
            self._compare(first, second, before)

    def _pay(self, branch: Branch, samples: bool) -> None:
        """As in the paper, a prompt is paid for when it is admitted, once."""
        service = self.prices[1] * samples
        if branch.key not in self._paid:
            self._paid.add(branch.key)
            service += self.prices[0] * (branch.num_prompt_tokens - branch.num_cached_tokens)
        self.had[branch.request.tenant] = self.had.get(branch.request.tenant, 0) + service

    def _compare(self, first: str, second: str, before: dict[tuple[str, str], tuple[float, float]]) -> None:
        difference = self.had.get(first, 0) - self.had.get(second, 0)
        low, high = before.get((first, second), (difference, difference))
        low, high = self._ranges[first, second] = min(low, difference), max(high, difference)
        if high - low > self.bound:
            raise Broken("VTC", f"{first!r} and {second!r} drift apart by {high - low}; the bound is {self.bound}")
