"""Between scheduler and proposer: asks for drafts before a plan, learns from what became of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from octavo.core.batch import RowResult, ScheduledRow, StepRows
from octavo.core.request import Branch
from octavo.core.speculation import Guess, drawn_path, may_draft
from octavo.decoding.speculation.control import DraftControl, Taken
from octavo.decoding.speculation.proposer import BranchKey, Proposer

__all__ = ["SpeculationStats", "Speculator"]

_log = logging.getLogger(__name__)
MOST_AHEAD = 8  # steps planned ahead, one after the other, while nobody has a draft
LONGEST_AHEAD = 64  # the same where it is known that nobody will have any
LEAST_PREFILL = 32  # tokens of prompts in a step from which the time of one is taken
MOST_TOLD = 200  # characters of an error
USUAL_OUTPUT = 128.0  # tokens, before any output has ended


class SpeculationStats:
    """What became of drafts, since the start."""

    def __init__(self) -> None:
        self.steps = 0  # with drafts
        self.drafted = self.accepted = 0


class Speculator:
    """For one scheduler. ``most``: drafts of one branch in one step. Without ``control`` it is always that many.

    A proposer that fails is never asked again: ``fault`` says why, and there are no drafts any more.
    """

    def __init__(self, proposer: Proposer, most: int, control: DraftControl | None = None) -> None:
        self.proposer, self.most, self.control = proposer, most, control
        self.stats = SpeculationStats()
        self.fault = self._untold = ""
        self._branches: dict[BranchKey, tuple[Branch, Taken]] = {}
        self._requests: dict[str, list[int]] = {}  # drafts of those that live, and drawn ones
        self._guessed: dict[BranchKey, Guess] = {}  # for the last plan
        self._seconds = 0.0, 0.0  # of the proposer: drafting, reading; as they stood
        self._read = 0  # tokens that the proposer had read
        self._usual_output = USUAL_OUTPUT  # of those that have ended, lately
        self._owed = 0.0  # of them, those that no step's drafts have been charged with
        self._able = self._rows = 0  # branches that might have had drafts; rows of the last step
        self._empty = self._ahead = 0  # calls without a draft, one after the other; steps that may be planned ahead

    def drafts(self, running: Sequence[Branch]) -> dict[BranchKey, Guess]:
        """Drafts for those that run, for the plan that follows."""
        self._guessed = {}
        if not self.fault:
            try:
                self._guessed = self._drafts(running)
            except Exception as error:
                self.fail(error)
        self._empty = 0 if self._guessed else min(self._empty + 1, MOST_AHEAD)
        self._ahead = self._empty
        if self.fault:
            self._ahead = LONGEST_AHEAD
        elif self.control is not None and not self._guessed:
            self._ahead = max(self._empty, min(self.control.rests(self._able), LONGEST_AHEAD))
        return self._guessed

    def fail(self, error: Exception) -> None:
        """The proposer did what it must not: go on without it, and without what it told."""
        self.fault = self._untold = f"{type(error).__name__}: {error}"[:MOST_TOLD]
        self._guessed, self._branches = {}, {}
        _log.error("guessing tokens failed and is off from now on: %s", self.fault, exc_info=error)

    def take_fault(self) -> str:
        """`fault`, if it has not been told yet."""
        untold, self._untold = self._untold, ""
        return untold

    def _drafts(self, running: Sequence[Branch]) -> dict[BranchKey, Guess]:
        able = [branch for branch in running if may_draft(branch)]
        self._able = len(able)
        counts = self._counts(able)
        self._seconds = self.proposer.draft_seconds, self.proposer.catch_up_seconds
        self._read = self.proposer.num_read
        asks = [(branch.key, branch.token_ids, count) for branch, count in zip(able, counts, strict=True) if count]
        answers = self.proposer.propose_all(asks) if asks else ()
        return {key: said for (key, _, _), said in zip(asks, answers, strict=True) if said}

    def rehearse(self) -> None:
        """Learn what drafts take, before anybody waits for them."""
        if self.control is None:
            return
        try:
            for told in self.proposer.rehearse():
                self.control.rehearsed(*told)
        except Exception as error:
            self.fail(error)

    def _counts(self, able: Sequence[Branch]) -> list[int]:
        """How many drafts each may have."""
        states = [self._state(branch) for branch in able]
        if self.control is None:
            return [self.most] * len(able)
        if self.proposer.reads and not self.control.rests(len(able)):
            for branch, state in zip(able, states, strict=True):
                state.unread = self.proposer.unread(branch.key, branch.token_ids)
                state.left = self._expected(branch)
        return self.control.share(len(able), states, self.most)

    def _expected(self, branch: Branch) -> float:
        """Tokens that a branch is expected to draw: as long as others were, and twice what it has at least."""
        drawn = branch.num_tokens - branch.num_prompt_tokens
        return min(branch.token_limit - branch.num_tokens, max(drawn, self._usual_output - drawn))

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
        drafts, tokens, decodes_only, scheduled = 0, plain, True, plain
        for row, result in zip(others, others_results, strict=True):
            decodes_only = decodes_only and row.num_scheduled_tokens == 1 + row.num_drafts and row.flags.sample
            drafts, tokens = drafts + row.num_drafts, tokens + len(result.token_ids)
            scheduled += row.num_scheduled_tokens
            if row.num_drafts and (row.request_id, row.choice) not in self._guessed:
                decodes_only = False  # a grammar forced them: nothing is learned from that
            elif row.num_drafts:
                self._saw(row, drawn_path(row, result))
        if len(rows) != self._rows:  # what is known of so many is another thing
            self._rows, self._ahead = len(rows), 0
        self.stats.steps += drafts > 0
        drafting, beside = self._taken(drafts)
        if self.control is None:
            return
        if decodes_only:
            passes = self._passes() if self.proposer.reads and drafts else (0, 0.0)
            self.control.measured(plain + len(others), drafts, tokens, seconds - beside, drafting, self._owed, passes)
            self._owed = 0.0
        elif not drafts and scheduled >= LEAST_PREFILL:
            self.control.prefill.saw(scheduled, seconds - beside)

    def _passes(self) -> tuple[int, float]:
        """Passes that a draft model made for the last plan, and branches in one."""
        lengths = [len(guess) for guess in self._guessed.values()]
        depth = max(lengths, default=0)
        return depth, sum(lengths) / depth if depth else 0.0

    def _taken(self, drafts: int) -> tuple[float, float]:
        """Seconds of this step that went into its drafts, and those that went into reading, or into drafts of which
        none had room: what later drafts have to bring in.
        """
        proposer, (drafted, read) = self.proposer, self._seconds
        self._seconds = proposer.draft_seconds, proposer.catch_up_seconds
        drafting, beside = self._seconds[0] - drafted, self._seconds[1] - read
        num_read, self._read = proposer.num_read - self._read, proposer.num_read
        if num_read and self.control is not None:
            self.control.reading.saw(num_read, beside)
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
        if known is None:
            return
        drawn = known[0].num_tokens - known[0].num_prompt_tokens
        self._usual_output += (drawn - self._usual_output) / 16
        try:
            self.proposer.observe(branch_key, known[0].token_ids)
            self.proposer.drop(branch_key)
        except Exception as error:
            self.fail(error)

    def flush(self) -> None:
        """Forget what the proposer keeps of branches that have ended."""
        try:
            if not self.fault:
                self.proposer.flush()
        except Exception as error:
            self.fail(error)

    def drafts_of(self, request_id: str) -> tuple[float, ...]:
        """Drafts of a request that has ended, and those that were drawn; nothing if there were none."""
        return tuple(map(float, self._requests.pop(request_id, ())))

    def _state(self, branch: Branch) -> Taken:
        known = self._branches.get(branch.key)
        if known is None:
            self._forget_preempted()
            self.proposer.open(branch.key, branch.request.namespace, branch.num_prompt_tokens)
            self.proposer.draws_as(branch.key, branch.params, branch.seed)
            known = branch, Taken(0.6 if self.control is None else self.control.chance)
            self._branches[branch.key] = known
        return known[1]

    def _forget_preempted(self) -> None:
        """What is remembered is of those that run, as many as there are slots: who comes back begins anew."""
        for key in [key for key, (branch, _) in self._branches.items() if branch.slot is None]:
            del self._branches[key]
            self.proposer.drop(key)
