"""Branches that plainly decode: one token in, one drawn. Most rows of most steps, so they are planned all at once.

step n     token i drawn -----> step n + 1   token i in, token i + 1 drawn
planned                         planned behind it while it runs: all but token i is known
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from octavo.core.batch import PageTableDelta, StepRows
from octavo.core.config import SchedulerConfig
from octavo.core.draft import Draft
from octavo.core.errors import OutOfPages
from octavo.core.kv import KVCacheManager
from octavo.core.request import Branch, RequestState, WaitingReason
from octavo.core.roster import Roster
from octavo.core.rows import decode_rows

__all__ = ["SteadyDecodes"]

_DECODING, _NOT_BLOCKED = RequestState.DECODING, WaitingReason.NONE  # an enum's attribute is looked up slowly


class SteadyDecodes:
    """Finds them, and makes their rows as columns."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, roster: Roster) -> None:
        self.config, self.kv, self.roster = config, kv, roster
        self._last: list[Branch] = []  # of the last plan, and their rows
        self._last_rows: StepRows | None = None

    def choose(self, draft: Draft, budget: int) -> tuple[list[Branch], list[Branch]]:
        """The branches that get their one token whatever the others ask for, and the others; both by rank.

        There are none of the former while tokens or pages are short, somebody starves or has claims on pages, or the
        culprit of an error is looked for: then everybody is served one by one.
        """
        running = self.roster.running
        if draft.puts_off_bulk or draft.held:
            running = [branch for branch in running if draft.allows(branch)]
        steady: list[Branch] = []
        rest: list[Branch] = []
        if draft.only is not None or len(running) > budget:
            return [], running
        oldest, most, drafts = draft.step - self.config.stall_steps, self.config.max_preemptions, draft.proposed
        for branch in running:
            if branch.last_step <= oldest or branch.num_preemptions >= most:
                return [], running
            if branch.state is _DECODING and branch.is_plain and branch.waiting_reason is _NOT_BLOCKED:
                is_due = self.kv.compacts and self._is_due(branch)
                (rest if is_due or branch.key in drafts else steady).append(branch)
            else:
                rest.append(branch)
        if not rest:
            return steady, rest
        columns = [min(b.num_missing_tokens, self.config.max_prefill_chunk) // self.kv.page_size + 2 for b in rest]
        columns += [self.kv.compaction_pages(b.key, b.num_resident_tokens) for b in rest if self._is_due(b)]
        if self.kv.free_pages() < (len(steady) + sum(columns)) * len(self.kv.groups):
            return [], running
        return steady, rest

    def decode(self, steady: list[Branch], draft: Draft) -> StepRows | None:
        """A row for each branch, as columns; or None, leaving nothing changed, if there are too few pages."""
        last, like, self._last, self._last_rows = self._last, self._last_rows, [], None
        if not steady:
            return None
        starts = self._page_starts(steady)
        deltas = self._take_all(steady, starts, draft) if starts else {}
        if deltas is None:
            return None
        before = [branch.last_step for branch in steady]
        draft.undo.push(lambda: _restore_steps(steady, before))
        if self.roster.waiting:
            for branch in steady:
                self.roster.computing(branch, draft.undo)
        for branch in steady:
            branch.last_step = draft.step
        draft.steady = steady
        rows = decode_rows(steady, deltas, like if steady == last else None)
        self._last, self._last_rows = steady, rows
        return rows

    def _take_all(
        self, steady: Sequence[Branch], starts: Sequence[int], draft: Draft
    ) -> dict[int, tuple[PageTableDelta, ...]] | None:
        """`take_pages` for the next token of those at these indices, by index; or None, leaving nothing changed."""
        mark, deltas = draft.undo.mark(), {}
        for index in starts:
            found = self.take_pages(steady[index], 1, draft)
            if found is None:
                draft.undo.rollback_to(mark)
                return None
            if found:
                deltas[index] = found
        return deltas

    def _page_starts(self, steady: Sequence[Branch], ahead: int = 0) -> list[int]:
        """Those whose token begins a page, writes to a shared one, or whose page table the runner does not know."""
        size, unsettled = self.kv.page_size, self.kv.unsettled
        found = [index for index, branch in enumerate(steady) if not (branch.num_resident_tokens + ahead) % size]
        if unsettled:
            found += [i for i, b in enumerate(steady) if b.key in unsettled and (b.num_resident_tokens + ahead) % size]
        return found

    def fill_ahead(self, draft: Draft, flying: Draft) -> bool:
        """The step behind one in flight that only decodes: a row for each branch that goes on for all that is known.

        False, leaving nothing changed, if somebody waits, nobody goes on, or pages are short.
        """
        if flying.others or not isinstance(flying.rows, StepRows) or self.roster.waiting or draft.only is not None:
            return False
        if flying.puts_off_bulk and not draft.puts_off_bulk:
            return False  # the bulk requests are to have their turn
        if self.kv.compacts and any(self._is_due(branch, 1) for branch in flying.steady):
            return False  # what their tokens see is not known yet
        goes_on = [b.slot == s and draft.allows(b) for b, s in zip(flying.steady, flying.rows.slots, strict=True)]
        index = [i for i, b in enumerate(flying.steady) if goes_on[i] and b.num_tokens + 1 < b.token_limit]
        branches = [flying.steady[i] for i in index]
        before = [branch.last_step for branch in branches]
        draft.undo.push(lambda: _restore_steps(branches, before))
        deltas = {}
        for at in self._page_starts(branches, 1):
            found = self.take_pages(branches[at], 2, draft)
            if found is None:
                draft.undo.rollback()
                return False
            if found:
                deltas[at] = found
        for branch in branches:
            branch.last_step = draft.step
        like = flying.rows if len(branches) == len(flying.steady) else None
        draft.steady, draft.behind = branches, index
        draft.rows = decode_rows(branches, deltas, like, 1)
        return bool(branches)

    def take_pages(self, branch: Branch, tokens: int, draft: Draft) -> tuple[PageTableDelta, ...] | None:
        """Cover the next ``tokens`` tokens with pages: what the runner's tables lack; None leaves nothing changed."""
        draft.undo.push(partial(self._count_pages, branch))  # runs after `reserve` is taken back
        try:
            if self._is_due(branch):
                self.kv.compact(branch.key, branch.token_ids[: branch.num_resident_tokens], draft.undo)
            deltas = self.kv.reserve(branch.key, branch.num_resident_tokens + tokens, draft.undo)
        except OutOfPages:
            return None
        if deltas:
            self._count_pages(branch)
        return deltas

    def _is_due(self, branch: Branch, ahead: int = 0) -> bool:
        return self.kv.is_due(branch.num_resident_tokens + ahead, branch.num_prompt_tokens)

    def _count_pages(self, branch: Branch) -> None:
        branch.kv_blocks = self.kv.num_branch_pages(branch.key)


def _restore_steps(branches: Sequence[Branch], steps: Sequence[int]) -> None:
    for branch, step in zip(branches, steps, strict=True):
        branch.last_step = step
