"""A step while it is being planned, and, once planned, the step in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.batch import PageCopy, Preemption, ScheduledRow
from octavo.core.gap import Allowance
from octavo.core.policies import Key
from octavo.core.request import Branch
from octavo.core.undo import UndoLog

BranchKey = tuple[str, int]


class Outcome(Enum):
    """What became of a waiting branch's turn."""

    ENTERED = "entered"
    WAITS = "waits"  # for a prefix that is being computed
    NO_ROOM = "no room"
    LATER = "later"  # those that decode wait for this step already


@dataclass
class Draft:
    """A step while it is being planned, and, once planned, the step in flight."""

    step: int
    now: float
    only: Collection[BranchKey] | None = None  # schedule nothing else
    undo: UndoLog = field(default_factory=UndoLog)
    steady: list[Branch] = field(default_factory=list)  # whose rows are columns
    served: list[Branch] = field(default_factory=list)  # one for each of `others`
    others: list[ScheduledRow] = field(default_factory=list)
    rows: Sequence[ScheduledRow] = ()  # of `steady`, then `others`: once all are there
    copies: list[PageCopy] = field(default_factory=list)
    swap_ins: tuple[PageCopy, ...] = ()
    preemptions: list[Preemption] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # planned ahead: each row's index in the step in flight
    turn: Key | None = None  # prefills whose turn comes later get nothing in this step
    allowance: Allowance | None = None  # for prefill, where there is a bound on the gaps of those that decode

    @property
    def branches(self) -> list[Branch]:
        """One for each row."""
        return self.steady + self.served

    @property
    def num_other_tokens(self) -> int:
        """Tokens of `others`."""
        return sum(row.num_scheduled_tokens for row in self.others)

    def without_rows(self, branches: Sequence[Branch]) -> list[Branch]:
        """Those that run and get nothing so far."""
        placed = {branch.key for branch in self.branches}
        return [branch for branch in branches if branch.slot is not None and branch.key not in placed]

    def allows(self, branch: Branch) -> bool:
        """True if this step may schedule the branch."""
        return self.only is None or branch.key in self.only

    @property
    def prefill_is_spent(self) -> bool:
        """True once no more prefill may begin beside those that decode."""
        return self.allowance is not None and self.allowance.is_spent
