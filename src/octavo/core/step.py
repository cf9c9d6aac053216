"""The end of a step: commit its result, or charge its failure to whom it belongs.

plan -> in flight -> commit: tokens, states, pages and events at once
                  -> undo, then charge: a RowError to its rows; any other error is retried by halves
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Sequence

from octavo.core.batch import DrawnRows, GangMove, RowResult, ScheduledRow, StepResult, StepRows
from octavo.core.draft import BranchKey, Draft
from octavo.core.errors import CorruptPages, InvalidInput, RowError
from octavo.core.gang import members, units
from octavo.core.gang_move import facts_of_move, make_move, move_fault
from octavo.core.kv import KVCacheManager
from octavo.core.request import Branch, FinishReason, Request, RequestState
from octavo.core.roster import Roster
from octavo.core.speculation import draft_fault, rest_of


class Committer:
    """Applies results. Cancelled branches are passed over: their tokens are dropped."""

    def __init__(self, kv: KVCacheManager, roster: Roster, vocab_size: int | None) -> None:
        self.kv = kv
        self.roster = roster
        self.vocab_size = vocab_size
        self._frees_behind = any(group.window for group in kv.groups)

    def check(self, draft: Draft, result: StepResult) -> None:
        """Raise ``InvalidInput``, changing nothing, if ``result`` does not answer this step."""
        if result.step != draft.step:
            raise InvalidInput("result.step", result.step, f"give the result of step {draft.step}")
        if len(result.rows) != len(draft.rows):
            raise InvalidInput("result.rows", f"{len(result.rows)} rows", f"give one for each of {len(draft.rows)}")

    def apply(self, draft: Draft, result: StepResult, now: float) -> None:
        """Apply every row; the step's pages may be reused afterwards."""
        self.kv.end_step(draft.step)
        for move in result.moves:
            self.roster.timeline.record("gang", now, request=move.request_id, **facts_of_move(move))
        self._record(draft.step, result.rows, now)
        done = 0
        if isinstance(result.rows, DrawnRows) and isinstance(draft.rows, StepRows):
            done = self._apply_drawn(draft.steady, draft.rows, result.rows.ids, now)
        if done == len(draft.rows):
            return
        for branch, row, outcome in zip(draft.branches[done:], draft.rows[done:], result.rows[done:], strict=True):
            if branch.is_live and branch.slot == row.slot:
                error = outcome.error or self._fault(branch, row, outcome)
                if error is None:
                    self._apply_row(branch, row, outcome, now)
                else:
                    fail_request(self.roster, branch, error, now)
        for unit in units(branch for branch in draft.served if branch.request.gang):
            self._move(unit[0].request, result.moves, now)

    def _move(self, request: Request, moves: Sequence[GangMove], now: float) -> None:
        """Let a gang go on that has drawn, if it has."""
        if all(branch.num_missing_tokens for branch in request.live_branches):
            return
        move = next((move for move in moves if move.request_id == request.request_id), None)
        error = move_fault(request, move, self.vocab_size)
        if move is None or error is not None:
            fail_request(self.roster, request.branches[0], error or "", now)
        else:
            make_move(self.kv, self.roster, request, move, now)

    def _record(self, step: int, rows: Sequence[RowResult], now: float) -> None:
        """Tell the token of each row, None where there is none; the errors of those that failed alone; all else."""
        drawn, others = (rows.ids, rows.others) if isinstance(rows, DrawnRows) else ([], rows)
        tokens: Sequence[int | None] = drawn
        errors, more = None, {}
        if others:
            tokens = [*drawn, *(row.token_ids[0] if row.token_ids else None for row in others)]
            errors = [(at, row.error) for at, row in enumerate(others, len(drawn)) if row.error is not None] or None
            found = rest_of(enumerate(others, len(drawn)))
            more = {"more": found} if found else {}
        self.roster.timeline.record("tokens", now, step=step, tokens=tokens, drawn=len(drawn), errors=errors, **more)

    def _apply_drawn(self, steady: Sequence[Branch], rows: StepRows, ids: Sequence[int], now: float) -> int:
        """``_apply_row`` for all plain decodes at once, if their tokens are in order; the number of rows applied.

        Pages have something to do with it only where one is full.
        """
        if not ids or len(ids) != len(steady) or min(ids) < 0 or not max(ids) < (self.vocab_size or sys.maxsize):
            return 0
        live, indices, tokens = steady, rows.output_indices, ids
        if [branch.slot for branch in steady] != rows.slots:  # some have ended since the plan
            kept = [i for i, branch in enumerate(steady) if branch.slot == rows.slots[i]]
            live, indices, tokens = [steady[i] for i in kept], [indices[i] for i in kept], [ids[i] for i in kept]
        self.roster.events.append_drawn(live, indices, tokens)
        size, frees_behind = self.kv.page_size, self._frees_behind
        for branch, token in zip(live, tokens, strict=True):
            resident = branch.advance(token)
            if token in branch.end_ids or resident + 1 >= branch.token_limit:
                ending = find_ending(branch)
                if ending is not None:
                    self.roster.finish(branch, *ending, now=now)
                    continue
            if frees_behind:
                self._commit_pages(branch, now)
            elif not resident % size:
                self.kv.defer_commit(branch.key, branch.token_ids, resident, now)
        return len(ids)

    def _commit_pages(self, branch: Branch, now: float) -> None:
        self.kv.commit(branch.key, branch.token_ids, branch.num_resident_tokens, now)
        if self._frees_behind:
            branch.kv_blocks = self.kv.num_branch_pages(branch.key)

    def _fault(self, branch: Branch, row: ScheduledRow, outcome: RowResult) -> str | None:
        """What is wrong with a row's result, if anything."""
        wrong = draft_fault(row, outcome)
        if wrong is not None:
            return wrong
        if self.vocab_size is not None and any(not 0 <= token < self.vocab_size for token in outcome.token_ids):
            return f"the model returned {list(outcome.token_ids)}, outside the vocabulary of {self.vocab_size}"
        if row.flags.sample and row.flags.logprobs >= 0 and len(outcome.logprobs) != len(outcome.token_ids):
            return f"the model returned {len(outcome.logprobs)} logprobs for {len(outcome.token_ids)} tokens"
        if branch.params.pooling and row.start + row.num_scheduled_tokens == branch.num_tokens and not outcome.hidden:
            return "the model returned no pooled state at the end of the prompt"
        predicted = min(row.num_scheduled_tokens, branch.num_prompt_tokens - 1 - row.start)
        if row.flags.prompt_logprobs >= 0 and len(outcome.prompt_logprobs) != predicted:
            return f"the model returned {len(outcome.prompt_logprobs)} prompt logprobs for {predicted} tokens"
        return None

    def _apply_row(self, branch: Branch, row: ScheduledRow, outcome: RowResult, now: float) -> None:
        branch.num_resident_tokens = row.start + row.num_scheduled_tokens - row.num_drafts
        branch.num_computed_tokens = max(branch.num_computed_tokens, branch.num_resident_tokens)
        self._gather_prompt_logprobs(branch, row, outcome)
        if branch.num_missing_tokens == 0 and branch.state is RequestState.PREFILLING:
            branch.transition(RequestState.DECODING)
        if branch.request.gang:  # what it goes on with is said of all of them
            self._commit_pages(branch, now)
            return
        ending = None
        for i, token in enumerate(outcome.token_ids):
            self.roster.deliver(branch, token, outcome.logprobs[i] if row.flags.logprobs >= 0 else None)
            ending = find_ending(branch)
            if ending is not None:
                break
        if row.num_drafts:
            self._keep_drawn(branch, row)
        if branch.num_missing_tokens == 0:  # max_tokens = 0
            branch.hidden = outcome.hidden
            ending = FinishReason.STOP if branch.params.pooling else FinishReason.LENGTH, None
        if ending is not None:
            self.roster.finish(branch, *ending, now=now)
            return
        self._commit_pages(branch, now)

    def _keep_drawn(self, branch: Branch, row: ScheduledRow) -> None:
        """Of the drafts, those that were drawn are resident."""
        branch.num_resident_tokens = branch.num_tokens - 1
        branch.num_computed_tokens = max(branch.num_computed_tokens, branch.num_resident_tokens)
        self.kv.give_back(branch.key, branch.num_resident_tokens)
        branch.kv_blocks = self.kv.num_branch_pages(branch.key)

    def _gather_prompt_logprobs(self, branch: Branch, row: ScheduledRow, outcome: RowResult) -> None:
        """Keep the logprobs of prompt tokens start + 1, start + 2, ... that are not known yet."""
        known = len(branch.prompt_logprobs) - row.start  # of this row's
        if branch.wants_prompt_logprobs and known >= 0:
            wanted = branch.num_prompt_tokens - 1 - row.start
            branch.prompt_logprobs += outcome.prompt_logprobs[known:wanted]


def find_ending(branch: Branch) -> tuple[FinishReason, int | str | None] | None:
    """Whether the last output token ends the choice: the token-level stop rules.

    An end-of-sequence or stop token counts from ``min_tokens`` tokens before it on. The limit on tokens comes last.
    """
    params, token = branch.params, branch.token_ids[-1]
    if token in branch.end_ids and branch.num_output_tokens > params.min_tokens:
        is_eos = token in branch.request.eos_token_ids and not params.ignore_eos
        return FinishReason.STOP, None if is_eos else token
    if branch.num_tokens >= branch.request.token_limit:
        return FinishReason.LENGTH, None
    return None


def fail_request(roster: Roster, branch: Branch, error: str, now: float) -> None:
    """End the whole request of ``branch`` as failed."""
    roster.abandon_request(branch.request, RequestState.FAILED, FinishReason.ERROR, now, error)


class Isolation:
    """Finds the culprit of an error that nobody owns: the failed step's branches run again by halves, alone at last.

    While groups are left, a step schedules the branches of the first one only.
    """

    def __init__(self) -> None:
        self._groups: deque[tuple[BranchKey, ...]] = deque()

    @property
    def is_active(self) -> bool:
        """True while suspects are left to run."""
        return bool(self._groups)

    def next_group(self) -> Collection[BranchKey] | None:
        """Whom the next step may schedule; None: everybody."""
        return self._groups[0] if self._groups else None

    def clear_group(self) -> None:
        """The first group ran well, or there was nothing of it left to run."""
        if self._groups:
            self._groups.popleft()

    def clear(self) -> None:
        """Look for nobody any more."""
        self._groups.clear()

    def charge(self, draft: Draft, error: Exception) -> list[Branch]:
        """The branches to blame for a failed step; if that is not known yet, the next steps find out.

        Nobody is to blame for a page of the host tier that went bad: it has been dropped, and the step is tried again.
        """
        if isinstance(error, CorruptPages) and error.pages:
            if {copy.source for copy in draft.swaps.ins}.issuperset(error.pages):
                return []
        self.clear_group()
        if isinstance(error, RowError) and error.rows and all(0 <= row < len(draft.rows) for row in error.rows):
            return [draft.branches[row] for row in error.rows]
        suspects = units(draft.branches)
        if len(suspects) == 1:
            return draft.branches
        middle = (len(suspects) + 1) // 2
        for half in (suspects[middle:], suspects[:middle]):
            self._groups.appendleft(tuple(branch.key for unit in half for branch in members(unit[0])))
        return []
