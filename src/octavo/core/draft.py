"""A step while it is being planned, and, once planned, the step in flight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.batch import PageCopy, Preemption, ScheduleDecision, ScheduledRow, StepRows
from octavo.core.draft_tree import DraftTree
from octavo.core.gap import Allowance
from octavo.core.kv_swaps import NO_SWAPS, Swaps
from octavo.core.policies import Key
from octavo.core.request import Branch
from octavo.core.timeline import Timeline
from octavo.core.undo import UndoLog

BranchKey = tuple[str, int]


class Outcome(Enum):
    """What became of a waiting branch's turn."""

    ENTERED = "entered"
    WAITS = "waits"  # for a prefix that is being computed
    NO_ROOM = "no room"
    LATER = "later"  # those that decode wait for this step already


@dataclass(slots=True, eq=False)
class Draft:
    """A step while it is being planned, and, once planned, the step in flight."""

    step: int
    now: float
    only: Collection[BranchKey] | None = None  # schedule nothing else
    puts_off_bulk: bool = False
    held: Collection[BranchKey] = ()  # who is not to run: what their grammar allows is not known yet
    proposed: Mapping[BranchKey, DraftTree] = field(default_factory=dict)  # drafts of branches
    undo: UndoLog = field(default_factory=UndoLog)
    steady: list[Branch] = field(default_factory=list)  # whose rows are columns
    served: list[Branch] = field(default_factory=list)  # one for each of `others`
    others: list[ScheduledRow] = field(default_factory=list)
    rows: Sequence[ScheduledRow] = ()  # of `steady`, then `others`: once all are there
    copies: tuple[PageCopy, ...] = ()
    swaps: Swaps = NO_SWAPS
    preemptions: list[Preemption] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # planned ahead: each row's index in the step in flight
    turn: Key | None = None  # prefills whose turn comes later get nothing in this step
    allowance: Allowance | None = None  # for prefill, where there is a bound on the gaps of those that decode

    @property
    def branches(self) -> list[Branch]:
        """One for each row."""
        return self.steady + self.served

    @property
    def columns(self) -> StepRows:
        """The rows of `steady`; none where there are none."""
        return self.rows if isinstance(self.rows, StepRows) else StepRows([], [], [], [], [], [], {})

    @property
    def decodes(self) -> tuple[list[str], list[int]]:
        """Requests and choices of `steady`, as the timeline takes them."""
        rows = self.columns
        return rows.request_ids, rows.choices

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
        if self.only is None:
            return not (self.puts_off_bulk and branch.request.bulk) and branch.key not in self.held
        return branch.key in self.only and branch.key not in self.held

    def decision(
        self, model: str, num_waiting: int, num_running: int, freed_slots: tuple[int, ...] = ()
    ) -> ScheduleDecision:
        """What the runner is to do."""
        return ScheduleDecision(
            model=model,
            step=self.step,
            rows=self.rows,
            copies=self.copies,
            swap_ins=self.swaps.ins,
            swap_outs=self.swaps.outs,
            freed_slots=freed_slots,
            preemptions=tuple(self.preemptions),
            num_waiting=num_waiting,
            num_running=num_running,
            sinks=self.swaps.sinks,
        )

    def tell_moves(self, timeline: Timeline) -> None:
        """Record the pages that the step moves before it writes: to disk, to the host tier, and within the pool."""
        outs = (("swap_out", self.swaps.sinks, {"tier": "disk"}), ("swap_out", self.swaps.outs, {"tier": "host"}))
        for kind, moves, where in (*outs, ("copy", self.copies, {})):
            if moves:
                pages = [page for move in moves for page in (move.source, move.target)]
                timeline.record(kind, self.now, step=self.step, pages=pages, **where)

    def tell(self, timeline: Timeline, decision: ScheduleDecision, free: int, budget: int | None) -> None:
        """Record a planned step; what decodes plainly goes in as columns, whatever their length."""
        timeline.record(
            "decision",
            self.now,
            step=self.step,
            decodes=self.decodes,
            rows=[(row.request_id, row.choice, row.num_scheduled_tokens, row.reason) for row in self.others],
            waiting=decision.num_waiting,
            running=decision.num_running,
            free=free,
            budget=budget,
        )

    @property
    def prefill_is_spent(self) -> bool:
        """True once no more prefill may begin beside those that decode."""
        return self.allowance is not None and self.allowance.is_spent
