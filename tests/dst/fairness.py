"""Nobody waits or stalls for ever: counted here, apart from the scheduler's own counters."""

from __future__ import annotations

from dst.invariants import Broken
from octavo.core.batch import ScheduleDecision
from octavo.core.gang import leads, members
from octavo.core.request import Branch, WaitingReason
from octavo.core.scheduler import ContinuousBatchScheduler

MOST_IDLE_TURNS = 4


class Fairness:
    """Watches the steps of one scheduler."""

    def __init__(self, scheduler: ContinuousBatchScheduler, pages_can_fail: bool) -> None:
        self.scheduler = scheduler
        self.pages_can_fail = pages_can_fail
        self.config = scheduler.config
        # one more to run without shared pages, where they are what a failed grab leaves without
        self.most_preemptions = max(1, self.config.max_preemptions) + pages_can_fail
        self.passed: dict[tuple[str, int], int] = {}  # later arrivals that were admitted while it waited
        self.stalled: dict[tuple[str, int], int] = {}  # steps without a token while it ran
        self.idle_turns = 0
        self._admitted: dict[tuple[str, int], int] = {}  # how often, by the last step that ran well
        self._planned: list[tuple[str, int]] = []
        self._left_out: list[tuple[str, int]] | None = None

    def planned(self, decision: ScheduleDecision) -> None:
        """A step is about to run: who was passed over, who got nothing."""
        roster = self.scheduler._roster
        known = {branch.key: branch for branch in roster.running}
        entered = [branch for branch in known.values() if self._has_entered(branch)]
        self._planned, self._left_out = [], None
        if self.scheduler._isolation.is_active:
            return  # the culprit of an error is looked for: only some may be scheduled
        waiting = [branch for branch in roster.waiting if not branch.awaits_scores] if entered else ()
        self._planned = [branch.key for branch in waiting for other in entered if self._passes(other, branch)]
        served = {(row.request_id, row.choice) for row in decision.rows}
        ready = [branch for branch in roster.running if branch.waiting_reason is not WaitingReason.KV]
        self._left_out = [b.key for b in ready if all(member.key not in served for member in members(b))]

    def _has_entered(self, branch: Branch) -> bool:
        """True in the step in which a branch has got its slot; of a gang, one stands for all."""
        return branch.admissions != self._admitted.get(branch.key, 0) and leads(branch)

    def _passes(self, entered: Branch, waiting: Branch) -> bool:
        """True for a later arrival; where tenants have shares, of the same tenant."""
        same = entered.request.tenant == waiting.request.tenant or not self.scheduler.policy.ages_by_tenant
        return same and entered.arrival_index > waiting.arrival_index

    def executed(self) -> None:
        """The step ran well."""
        self._admitted.update((branch.key, branch.admissions) for branch in self.scheduler._roster.running)
        for key in self._planned:
            self.passed[key] = self.passed.get(key, 0) + 1
            if self.passed[key] > self.config.bypass_limit:
                raise Broken("I17", f"{key} was passed by {self.passed[key]} later arrivals")
        if self._left_out is None:
            return
        before, self.stalled = self.stalled, {}
        bound = self.config.stall_steps + self.config.max_running_requests
        for key in self._left_out:
            self.stalled[key] = before.get(key, 0) + 1
            if self.stalled[key] > bound:
                raise Broken("I17", f"{key} runs, and got no token for {self.stalled[key]} steps")

    def stepped(self, progress: bool) -> None:
        """A turn is over: did anything happen?"""
        roster = self.scheduler._roster
        self.idle_turns = 0 if progress or not roster.requests else self.idle_turns + 1
        if self.idle_turns > MOST_IDLE_TURNS:
            raise Broken("I18", f"{self.idle_turns} turns without a token, and {len(roster.requests)} requests wait")
        for branch in () if self.pages_can_fail else roster.running:
            if branch.waiting_reason is WaitingReason.KV and branch.num_preemptions >= self.config.max_preemptions:
                raise Broken("I18", f"{branch.key} has a claim on pages, and finds none")
        for branch in roster.waiting:
            if branch.num_preemptions > self.most_preemptions:
                raise Broken("I19", f"{branch.key} was preempted {branch.num_preemptions} times")
