"""The bound of virtual token counters, in every interval of every run: two tenants that wait do not drift apart."""

from __future__ import annotations

from itertools import combinations

from dst.invariants import Broken
from octavo.core.batch import ScheduleDecision
from octavo.core.gang import leads, members
from octavo.core.request import Branch, WaitingReason
from octavo.core.scheduler import ContinuousBatchScheduler


class Shares:
    """What each tenant has had (its prompts, twice their output), and how far two that both wait differ.

    Sheng et al., OSDI 2024: over any time in which both always have something waiting, the difference of their services
    over their weights changes by at most 2 max(prompt price * longest prompt, output price * tokens in the pool), over
    the smaller weight.
    """

    def __init__(self, scheduler: ContinuousBatchScheduler, longest_prompt: int, has_gangs: bool) -> None:
        self.scheduler = scheduler
        settings, kv = scheduler.config.policies, scheduler.kv
        self.settings, self.weights = settings, dict(settings.weights)
        pool = kv.allocator.num_pages * kv.page_size
        if has_gangs or any(group.window for group in kv.groups):  # it holds more of sequences than it has places
            pool = max(pool, scheduler.config.max_running_requests * scheduler.config.max_seq_len)
        prompt = max(settings.prompt_price, settings.cached_price) * longest_prompt
        self.bound = 2 * max(prompt, settings.output_price * pool)
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
        gang, prices, service = members(branch), self.settings, 0
        for member in gang if leads(branch) else ():
            if member.key not in self._paid:
                self._paid.add(member.key)
                cached = member.num_cached_tokens
                service += prices.prompt_price * (member.num_prompt_tokens - cached) + prices.cached_price * cached
        alone = branch.request.gang and not branch.num_output_tokens  # it draws for all
        service += prices.output_price * samples * (len(gang) if alone else 1)
        tenant = branch.request.tenant
        self.had[tenant] = self.had.get(tenant, 0) + service / self.weights.get(tenant, 1)

    def _compare(self, first: str, second: str, before: dict[tuple[str, str], tuple[float, float]]) -> None:
        difference = self.had.get(first, 0) - self.had.get(second, 0)
        low, high = before.get((first, second), (difference, difference))
        low, high = self._ranges[first, second] = min(low, difference), max(high, difference)
        bound = self.bound / min(self.weights.get(first, 1), self.weights.get(second, 1))
        if high - low > bound + 1e-6:
            raise Broken("VTC", f"{first!r} and {second!r} drift apart by {high - low}; the bound is {bound}")
