"""Deadline: the earliest first, and nothing is spent on what cannot be done in time."""

from __future__ import annotations

import math

from octavo.core.policies.base import Key, Policy
from octavo.core.request import Branch


class EarliestDeadline(Policy):
    """Earliest ``deadline`` first; requests without one come last.

    Optimal on one machine as long as everything can be done in time (Liu and Layland 1973); past that point it would
    spend itself on what is late anyway, so the scheduler sheds a waiting request that its forecast calls hopeless.
    """

    name = "deadline"
    sheds = True

    def key(self, branch: Branch) -> Key:
        """(deadline,)."""
        deadline = branch.request.deadline
        return (math.inf if deadline is None else deadline,)
