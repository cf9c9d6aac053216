"""Priority: lower numbers first, and waiting makes a request more urgent."""

from __future__ import annotations

from octavo.core.policies.base import Key, Policy, Scene
from octavo.core.request import Branch


class PriorityFirst(Policy):
    """Lower ``priority`` numbers first; each ``ageing_s`` seconds of waiting count as one level (0: never)."""

    name = "priority"

    def __init__(self) -> None:
        self._now = 0.0
        self._ageing_s = 0.0

    def prepare(self, scene: Scene) -> None:
        """Look at the clock."""
        self._now, self._ageing_s = scene.now, scene.settings.ageing_s

    def key(self, branch: Branch) -> Key:
        """(the level that it has reached,)."""
        level = branch.request.priority
        if self._ageing_s:
            level -= int(max(0.0, self._now - branch.request.arrival) / self._ageing_s)
        return (level,)

    def place(self, branch: Branch) -> Key:
        """(the level that it was given,)."""
        return (branch.request.priority,)

    def rank(self, branch: Branch) -> Key:
        """(the level that it was given,): age gets nobody pages of others."""
        return (branch.request.priority,)
