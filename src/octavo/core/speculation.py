"""Drafts: tokens that a branch may draw next, computed with its next token and so verified in the same step.

decode           token n - 1 in                    token n drawn                resident n
with 2 drafts    token n - 1, d0, d1 in            tokens n, n + 1, n + 2 drawn; d0 was right, d1 was not:
                                                   tokens n, n + 1 count        resident n + 1

They come from outside and change no token, only how many a step yields: so they get what a step has left, and nobody
waits, loses pages or computes less of a prompt for them. What was written for those that were wrong lies behind what is
resident: nobody reads it, it is written over, and pages with nothing else in them are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from octavo.core.batch import PageTableDelta, RowResult, ScheduledRow
from octavo.core.draft import BranchKey, Draft
from octavo.core.errors import InvalidInput
from octavo.core.request import Branch, RequestState

__all__ = ["add_drafts", "check_drafts", "draft_fault", "may_draft", "rest_of"]

Drafts = dict[BranchKey, tuple[int, ...]]
Reserve = Callable[[Branch, int, Draft], tuple[PageTableDelta, ...] | None]
_DECODING = RequestState.DECODING


def may_draft(branch: Branch) -> bool:
    """True for a branch whose next step computes one token, if nothing more is asked for than what it draws."""
    return branch.state is _DECODING and not branch.request.gang and branch.num_missing_tokens == 1


def check_drafts(proposed: Mapping[BranchKey, Sequence[int]], vocab_size: int | None) -> Drafts:
    """The drafts of those that have any. Raises ``InvalidInput`` for what is no token id of the vocabulary."""
    found = {key: tuple(drafts) for key, drafts in proposed.items() if len(drafts)}
    for drafts in found.values():
        if min(drafts) < 0 or (vocab_size is not None and max(drafts) >= vocab_size):
            raise InvalidInput("drafts", list(drafts), f"token ids are 0 to {vocab_size and vocab_size - 1}")
    return found


def add_drafts(draft: Draft, budget: int, chunk: int, reserve: Reserve) -> None:
    """Lengthen the rows of those that have drafts, by rank, while there are tokens, pages and time for it."""
    for row, branch in zip(draft.others, draft.served, strict=True):
        drafts = draft.proposed.get(branch.key, ())
        if not drafts or not may_draft(branch) or not row.flags.sample:
            continue
        count = min(len(drafts), budget, chunk - 1, branch.token_limit - branch.num_tokens - 1)
        if count > 0 and draft.allowance is not None:
            count = draft.allowance.verify(row.start, count)
        deltas = reserve(branch, 1 + count, draft) if count > 0 else None
        if deltas is not None:
            row.token_ids += drafts[:count]
            row.num_drafts, row.reason = count, f"{row.reason} with {count} drafts"
            row.page_deltas += deltas
            budget -= count


def draft_fault(row: ScheduledRow, outcome: RowResult) -> str | None:
    """What is wrong with the number of tokens that a row came to, or with drafts that it took for drawn."""
    tokens, most = outcome.token_ids, (1 + row.num_drafts) * row.flags.sample
    if not int(row.flags.sample) <= len(tokens) <= most:
        return f"the model returned {len(tokens)} tokens for a row that samples {most}"
    if tokens[:-1] != row.drafts[: len(tokens) - 1] and len(tokens) > 1:
        return f"the model went on from drafts {list(row.drafts)}, and drew {list(tokens)}"
    return None


def rest_of(rows: Iterable[tuple[int, RowResult]]) -> list[tuple[int, list[int]]] | None:
    """(row, tokens behind its first) of the rows that came to several tokens, if there are any."""
    return [(at, list(row.token_ids[1:])) for at, row in rows if len(row.token_ids) > 1] or None
