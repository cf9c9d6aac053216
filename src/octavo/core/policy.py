"""The order of service: a policy ranks branches, lowest first, and nobody is passed over for ever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from octavo.core.errors import InvalidInput
from octavo.core.request import Branch
from octavo.core.undo import UndoLog


class Policy(Protocol):
    """Ranks branches: the lowest rank is served first and preempted last."""

    name: str

    def rank(self, branch: Branch) -> tuple[int, ...]:
        """A key that is different for every branch and does not change while it lives."""


class FirstCome:
    """First come, first served; ``priority`` is not looked at."""

    name = "fcfs"

    def rank(self, branch: Branch) -> tuple[int, ...]:
        """(arrival, choice)."""
        return (branch.arrival_index, branch.choice)


class PriorityFirst:
    """Lower ``priority`` numbers first, then first come."""

    name = "priority"

    def rank(self, branch: Branch) -> tuple[int, ...]:
        """(priority, arrival, choice)."""
        return (branch.request.priority, branch.arrival_index, branch.choice)


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstCome, "priority": PriorityFirst}


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ``InvalidInput`` for an unknown one."""
    if name not in POLICIES:
        raise InvalidInput("policy", name, f"choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def service_order(waiting: Iterable[Branch], policy: Policy, bypass_limit: int) -> list[Branch]:
    """Waiting branches in the order in which they are to be admitted.

    A branch that ``bypass_limit`` later arrivals have passed goes first, oldest first. Those that could still pass it
    are older or have been passed as often, so no later arrival is admitted before it any more.
    """

    def key(branch: Branch) -> tuple[int, ...]:
        if branch.bypassed >= bypass_limit:
            return (0, branch.arrival_index, branch.choice)
        return (1, *policy.rank(branch))

    return sorted(waiting, key=key)


def count_bypass(waiting: Iterable[Branch], admitted: Branch, undo: UndoLog) -> None:
    """Note, with every branch that has waited longer than ``admitted``, that it was passed."""
    passed = [branch for branch in waiting if branch.arrival_index < admitted.arrival_index]

    def count(step: int) -> None:
        for branch in passed:
            branch.bypassed += step

    count(1)
    undo.push(lambda: count(-1))
