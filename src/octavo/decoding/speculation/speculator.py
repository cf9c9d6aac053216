"""Between scheduler and proposer: asks for drafts before a plan, learns from what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import RowResult, ScheduledRow, StepRows
from octavo.core.request import Branch
from octavo.core.speculation import Guess, drawn_path, may_draft
from octavo.decoding.speculation.control import DraftControl, Taken
from octavo.decoding.speculation.proposer import BranchKey, Proposer

__all__ = ["SpeculationStats", "Speculator"]

MOST_AHEAD = 8  # steps planned ahead, one after the other, while nobody has a draft


class SpeculationStats:
    """What became of drafts, since the start."""

    def __init__(self) -> None:
        self.steps = 0  # with drafts
        self.drafted = self.accepted = 0


class Speculator:
    """For one scheduler. ``most``: drafts of one branch in one step. Without ``control`` it is always that many."""

    def __init__(self, proposer: Proposer, most: int, control: DraftControl | None = None) -> None:
        self.proposer, self.most, self.control = proposer, most, control
        self.stats = SpeculationStats()
        self._branches: dict[BranchKey, tuple[Branch, Taken]] = {}
        self._requests: dict[str, list[int]] = {}  # drafts of those that live, and drawn ones
        self._guessed: dict[BranchKey, Guess] = {}  # for the last plan
        self._seconds = 0.0, 0.0  # of the proposer: drafting, reading; as they stood
        self._owed = 0.0  # of them, those that no step's drafts have been charged with
        self._empty = self._ahead = 0  # calls without a draft, one after the other; steps that may be planned ahead

    def drafts(self, running: Sequence[Branch]) -> dict[BranchKey, Guess]:
        """Drafts for those that run, for the plan that follows."""
        able = [branch for branch in running if may_draft(branch)]
        states = [self._state(branch) for branch in able]
        counts = [self.most] * len(able) if self.control is None else self.control.share(len(able), states, self.most)
        self._seconds = self.proposer.draft_seconds, self.proposer.catch_up_seconds
        asks = [(branch.key, branch.token_ids, count) for branch, count in zip(able, counts, strict=True) if count]
        answers = self.proposer.propose_all(asks) if asks else ()
        found = {key: said for (key, _, _), said in zip(asks, answers, strict=True) if said}
        self._guessed = found
        self._empty = 0 if found else min(self._empty + 1, MOST_AHEAD)
        self._ahead = self._empty
        return found

    def rests(self) -> bool:
        """True if the next step may be planned before this one's tokens are there: nobody had drafts lately."""
        self._ahead -= 1
        return self._ahead >= 0

    def committed(self, rows: Sequence[ScheduledRow], results: Sequence[RowResult], seconds: float) -> None:
        """A step is done, in so many seconds."""
        others, others_results = rows, results
        plain = 0
        if isinstance(rows, StepRows):
            plain, others, others_results = len(rows.slots), rows.others, results[len(rows.slots) :]
        drafts, tokens, decodes_only = 0, plain, True
        for row, result in zip(others, others_results, strict=True):
            decodes_only = decodes_only and row.num_scheduled_tokens == 1 + row.num_drafts and row.flags.sample
            drafts, tokens = drafts + row.num_drafts, tokens + len(result.token_ids)
            if row.num_drafts and (row.request_id, row.choice) not in self._guessed:
                decodes_only = False  # a grammar forced them: nothing is learned from that
            elif row.num_drafts:
                self._saw(row, drawn_path(row, result))
        self.stats.steps += drafts > 0
        drafting, beside = self._taken(drafts)
        if self.control is not None and decodes_only:
            self.control.measured(plain + len(others), drafts, tokens, seconds - beside, drafting, self._owed)
            self._owed = 0.0

    def _taken(self, drafts: int) -> tuple[float, float]:
        """Seconds of this step that went into its drafts, and those that went into reading, or into drafts of which
        none had room: what later drafts have to bring in.
        """
        proposer, (drafted, read) = self.proposer, self._seconds
        self._seconds = proposer.draft_seconds, proposer.catch_up_seconds
        drafting, beside = self._seconds[0] - drafted, self._seconds[1] - read
        if not drafts:
            drafting, beside = 0.0, beside + drafting
        self._owed += beside
        return drafting, beside

    def _saw(self, row: ScheduledRow, path: Sequence[int]) -> None:
        taken = len(path) - 1
        tried = taken + (path[-1] in row.parent_rows)  # those of a tree beside its path were no worse
        self.stats.drafted += row.num_drafts
        self.stats.accepted += taken
        counts = self._requests.setdefault(row.request_id, [0, 0])
        counts[0] += row.num_drafts
        counts[1] += taken
        known = self._branches.get((row.request_id, row.choice))
        if known is not None:
            known[1].saw(tried, taken)
        if self.control is not None:
            self.control.saw(tried, taken)

    def ended(self, branch_key: BranchKey) -> None:
        """A choice has ended."""
        known = self._branches.pop(branch_key, None)
        if known is not None:
            self.proposer.observe(branch_key, known[0].token_ids)
            self.proposer.drop(branch_key)

    def drafts_of(self, request_id: str) -> tuple[float, ...]:
        """Drafts of a request that has ended, and those that were drawn; nothing if there were none."""
        return tuple(map(float, self._requests.pop(request_id, ())))

    def _state(self, branch: Branch) -> Taken:
        known = self._branches.get(branch.key)
        if known is None:
            self._forget_preempted()
            self.proposer.open(branch.key, branch.request.namespace, branch.num_prompt_tokens)
            known = branch, Taken(0.6 if self.control is None else self.control.chance)
            self._branches[branch.key] = known
        return known[1]

    def _forget_preempted(self) -> None:
        """What is remembered is of those that run, as many as there are slots: who comes back begins anew."""
        for key in [key for key, (branch, _) in self._branches.items() if branch.slot is None]:
            del self._branches[key]
            self.proposer.drop(key)
