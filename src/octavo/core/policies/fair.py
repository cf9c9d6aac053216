"""Fair: each tenant gets its share of service, whatever the others send (virtual token counters).

tenant A  #################             A sends ten times as much as there is room for, and waits for itself
tenant B  #### . . #####  . ####        B was away: its counter is lifted on return, so that what it did not
               ^ lifted                  use before is not owed to it
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from octavo.core.policies.base import Key, Policy, PolicySettings, Scene, account_of
from octavo.core.request import Branch, Request

MOST_ABSENT = 4096  # counters kept of tenants that have nothing here


class FairShare(Policy):
    """The tenant that had least service for its weight first (Sheng et al., OSDI 2024: VTC).

    A tenant's counter is the service of its requests: ``prompt_price`` for each prompt token (the whole prompt from
    admission on), ``cached_price`` for each that the cache had, ``output_price`` for each token of output, over the
    tenant's weight. A preempted request pays once. A tenant that comes back is lifted to the least counter of those
    that wait, or, if nobody does, of those that run, or, if nobody is here, of who left last, and never below an
    earlier lift.

    Two tenants that always have something waiting differ by at most 2 max(prompt_price * longest prompt, output_price *
    tokens in the pool) over any time. A tenant below its share of slots and pages may take them from one above its own.
    """

    name = "fair"
    changes_as_it_admits = True
    ages_by_tenant = True
    makes_way = True

    def __init__(self) -> None:
        self._settings, self._weights = PolicySettings(), dict[str, int]()
        self._settled: dict[str, int] = {}  # service of what has ended, and lifts
        self._live: Counter[str] = Counter()  # branches here
        self._absent: dict[str, None] = {}  # tenants without any, the last to leave at the end
        self._level = 0.0  # the last lift
        self._counters: dict[str, float] = {}
        self._owed: dict[str, float] = {}  # admitted prompts' tokens that are still to be computed, over the weight
        self._shares: dict[str, float] = {}  # of slots and pages
        self._slots: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._max_running, self._num_pages = 1, 1

    # -- what the scheduler asks

    def prepare(self, scene: Scene) -> None:
        """Count what everybody had and holds."""
        self._know(scene.settings)
        branches = (*scene.running, *scene.waiting)
        self._counters = self._count(branches, self._service)
        received = self._count(branches, self._received)
        self._owed = {tenant: counter - received[tenant] for tenant, counter in self._counters.items()}
        whole = sum(map(self._weight, self._counters))
        self._shares = {tenant: self._weight(tenant) / whole for tenant in self._counters}
        self._max_running, self._num_pages = scene.max_running, scene.kv.allocator.num_pages
        self._slots, self._pages = Counter(), Counter()
        for branch in scene.running:
            self._slots[account_of(branch.request)] += 1
            self._pages[account_of(branch.request)] += branch.kv_blocks

    def key(self, branch: Branch) -> Key:
        """(counter, slots held): of two that had as much, who holds less."""
        tenant = account_of(branch.request)
        return (self._counters[tenant], self._slots[tenant])

    def place(self, branch: Branch) -> Key:
        """(whether its tenant holds more than its share,): who does gives way to who does not."""
        return (float(self._holds(account_of(branch.request), 0, 0) > 1.0),)

    def turn(self, branch: Branch) -> Key:
        """(prompt tokens that its tenant has under way,): nobody waits behind the many or long prompts of another."""
        tenant = account_of(branch.request)
        coming = 0 if branch.slot is not None else self._settings.prompt_price * branch.num_missing_tokens
        return (self._owed[tenant] + coming / self._weight(tenant),)

    def arrived(self, request: Request, scene: Scene) -> None:
        """Lift the counter of a tenant that had nothing waiting. What a request had elsewhere is not charged here."""
        self._know(scene.settings)
        tenant, branches = account_of(request), (*scene.running, *scene.waiting)
        if all(account_of(branch.request) != tenant for branch in scene.waiting):
            received = self._count(branches, self._received)
            others = scene.waiting or [branch for branch in scene.running if account_of(branch.request) != tenant]
            self._level = max(
                self._level, min((received[account_of(branch.request)] for branch in others), default=0.0)
            )
            short = self._level - received.get(tenant, self._settled.get(tenant, 0) / self._weight(tenant))
            self._add(tenant, max(0, math.ceil(short * self._weight(tenant))))
        for branch in request.live_branches:
            self._live[tenant] += 1
            self._add(tenant, -self._service(branch))
        self._absent.pop(tenant, None)

    def ended(self, branch: Branch) -> None:
        """Settle what it had."""
        tenant = account_of(branch.request)
        self._add(tenant, self._service(branch))
        self._live[tenant] -= 1
        if self._live[tenant] <= 0:
            del self._live[tenant]
            self._absent[tenant] = None
        if not self._live:  # who comes next begins where the last one left: what an idle machine gave is owed to nobody
            self._level = max(self._level, self._settled[tenant] / self._weight(tenant))
        while len(self._absent) > MOST_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._settled[oldest]

    def displaces(self, branch: Branch, victim: Branch, taken: Sequence[Branch] = ()) -> bool:
        """Whether its tenant holds less than its share of slots and pages, and the victim's more, less those taken."""
        own, other = account_of(branch.request), account_of(victim.request)
        if own == other or self._holds(own, 1, 0) > 1.0:
            return False
        gone = [each for each in taken if account_of(each.request) == other]
        return self._holds(other, -len(gone), -sum(each.kv_blocks for each in gone)) > 1.0

    # -- counters

    def _know(self, settings: PolicySettings) -> None:
        if settings is not self._settings:
            self._settings, self._weights = settings, dict(settings.weights)

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)

    def _add(self, tenant: str, service: int) -> None:
        self._settled[tenant] = self._settled.get(tenant, 0) + service

    def _count(self, branches: Iterable[Branch], service: Callable[[Branch], int]) -> dict[str, float]:
        """Service over weight of the tenants of these branches: what has ended, and what these had."""
        had: dict[str, int] = {}
        for branch in branches:
            tenant = account_of(branch.request)
            had[tenant] = had.get(tenant, self._settled.get(tenant, 0)) + service(branch)
        return {tenant: units / self._weight(tenant) for tenant, units in had.items()}

    def _service(self, branch: Branch) -> int:
        """What a branch has had, its whole prompt included; nothing before it was admitted."""
        if not branch.admissions:
            return 0
        prices, cached = self._settings, branch.num_cached_tokens
        prompt = prices.prompt_price * (branch.num_prompt_tokens - cached) + prices.cached_price * cached
        return prompt + prices.output_price * branch.num_output_tokens

    def _received(self, branch: Branch) -> int:
        """The same without the part of its prompt that is still to be computed."""
        if not branch.admissions:
            return 0
        owed = branch.num_prompt_tokens - max(branch.num_computed_tokens, branch.num_cached_tokens)
        return self._service(branch) - self._settings.prompt_price * max(0, owed)

    def _holds(self, tenant: str, slots: int, pages: int) -> float:
        """Slots and pages (and so many more) over the tenant's share of them, whichever is more."""
        share = self._shares[tenant]
        slots_share, pages_share = max(1.0, self._max_running * share), max(1.0, self._num_pages * share)
        return max((self._slots[tenant] + slots) / slots_share, (self._pages[tenant] + pages) / pages_share)
