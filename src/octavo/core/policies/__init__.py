"""The order of service: policies by name, put together, and nobody passed over for ever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.errors import InvalidInput
from octavo.core.policies.base import Key, Policy, PolicySettings, Scene, account_of
from octavo.core.policies.deadline import EarliestDeadline
from octavo.core.policies.fair import FairShare
from octavo.core.policies.prefix import LongestPrefix
from octavo.core.policies.priority import PriorityFirst
from octavo.core.policies.shortest import ShortestWork
from octavo.core.request import Branch, Request
from octavo.core.undo import UndoLog

__all__ = [
    "POLICIES",
    "Chain",
    "Key",
    "Policy",
    "PolicySettings",
    "Scene",
    "count_bypass",
    "full_place",
    "full_rank",
    "make_policy",
    "service_order",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Policy, PriorityFirst, EarliestDeadline, FairShare, LongestPrefix, ShortestWork)
}


class Chain(Policy):
    """Several policies: the first decides, the next breaks its ties."""

    def __init__(self, parts: Iterable[Policy]) -> None:
        self.parts = tuple(parts)
        self.name = ",".join(part.name for part in self.parts)
        self.changes_as_it_admits = any(part.changes_as_it_admits for part in self.parts)
        self.ages_by_tenant = any(part.ages_by_tenant for part in self.parts)
        self.makes_way = any(part.makes_way for part in self.parts)
        self.sheds = any(part.sheds for part in self.parts)

    def prepare(self, scene: Scene) -> None:
        """All of them."""
        for part in self.parts:
            part.prepare(scene)

    def key(self, branch: Branch) -> Key:
        """One after the other."""
        return tuple(item for part in self.parts for item in part.key(branch))

    def rank(self, branch: Branch) -> Key:
        """One after the other."""
        return tuple(item for part in self.parts for item in part.rank(branch))

    def place(self, branch: Branch) -> Key:
        """One after the other."""
        return tuple(item for part in self.parts for item in part.place(branch))

    def turn(self, branch: Branch) -> Key:
        """One after the other."""
        return tuple(item for part in self.parts for item in part.turn(branch))

    def arrived(self, request: Request, scene: Scene) -> None:
        """All of them."""
        for part in self.parts:
            part.arrived(request, scene)

    def ended(self, branch: Branch) -> None:
        """All of them."""
        for part in self.parts:
            part.ended(branch)

    def displaces(self, branch: Branch, victim: Branch, taken: Sequence[Branch] = ()) -> bool:
        """Whether one says so, and to those before it the victim is not ahead."""
        for part in self.parts:
            if part.displaces(branch, victim, taken):
                return True
            if part.rank(victim) < part.rank(branch):
                return False
        return False


def make_policy(names: str) -> Policy:
    """The policy of that name, or of several: ``priority,fair``.

    Raises ``InvalidInput`` for an unknown or a repeated one.
    """
    found = [name.strip() for name in names.split(",")] if isinstance(names, str) else [""]
    unknown = [name for name in found if name not in POLICIES]
    if unknown or len({*found}) < len(found):
        raise InvalidInput("policy", names, f"give one of {', '.join(POLICIES)}, or several once each: priority,fair")
    parts = [POLICIES[name]() for name in found]
    return parts[0] if len(parts) == 1 else Chain(parts)


def full_rank(policy: Policy, branch: Branch) -> Key:
    """A policy's rank, different for every branch; bulk requests come last."""
    return (branch.request.bulk, *policy.rank(branch), branch.arrival_index, branch.choice)


def full_place(policy: Policy, branch: Branch) -> Key:
    """Among those that run, in this step: the last gives way to the first."""
    return (branch.request.bulk, *policy.place(branch), *branch.rank)


def service_order(waiting: Iterable[Branch], policy: Policy, bypass_limit: int) -> list[Branch]:
    """Waiting branches in the order in which they are to be admitted, those of bulk requests last.

    A branch that ``bypass_limit`` later arrivals have passed goes first, oldest first; under a policy that ages by
    tenant, first among those of its tenant. Those that could still pass it are older or have been passed as often, so
    no later arrival (of its tenant) is admitted before it any more.
    """
    both: tuple[list[Branch], list[Branch]] = ([], [])
    for branch in waiting:
        both[branch.request.bulk].append(branch)
    return [branch for kind in both if kind for branch in _in_order(kind, policy, bypass_limit)]


def _in_order(waiting: list[Branch], policy: Policy, bypass_limit: int) -> list[Branch]:
    def aged_first(branch: Branch) -> tuple[bool, Key]:
        aged = branch.bypassed >= bypass_limit
        return (not aged, (*(() if aged else policy.key(branch)), branch.arrival_index, branch.choice))

    if not policy.ages_by_tenant:
        return sorted(waiting, key=aged_first)
    order = sorted(waiting, key=lambda branch: (*policy.key(branch), branch.arrival_index, branch.choice))
    if all(branch.bypassed < bypass_limit for branch in order):
        return order
    own: dict[str, list[Branch]] = {}
    for branch in sorted(order, key=aged_first, reverse=True):
        own.setdefault(account_of(branch.request), []).append(branch)
    return [own[account_of(branch.request)].pop() for branch in order]  # each tenant keeps its places


def count_bypass(waiting: Iterable[Branch], admitted: Branch, undo: UndoLog, by_tenant: bool = False) -> None:
    """Note, with every branch that has waited longer than ``admitted`` (``by_tenant``: of its tenant), that it was
    passed. Bulk requests are there to be passed, and who waits for another choice of its request is not passed."""
    passed = [b for b in waiting if b.arrival_index < admitted.arrival_index and not b.request.bulk]
    passed = [branch for branch in passed if not branch.awaits_scores]
    if by_tenant:
        passed = [branch for branch in passed if branch.request.tenant == admitted.request.tenant]

    def count(step: int) -> None:
        for branch in passed:
            branch.bypassed += step

    count(1)
    undo.push(lambda: count(-1))
