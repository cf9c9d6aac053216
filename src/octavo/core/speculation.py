"""Drafts: tokens that a branch may draw next, computed with its next token and so verified in the same step.

decode           token n - 1 in                    token n drawn                resident n
with 2 drafts    token n - 1, d0, d1 in            tokens n, n + 1, n + 2 drawn; d0 was right, d1 was not:
                                                   tokens n, n + 1 count        resident n + 1

They come from outside and change no token, only how many a step yields: so they get what a step has left, and nobody
waits, loses pages or computes less of a prompt for them. What was written for those that were wrong lies behind what is
resident: nobody reads it, it is written over, and pages with nothing else in them are given back.

They may be a tree (`DraftTree`): several guesses for one place, of which the step goes along those that are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.core.batch import PageTableDelta, RowResult, ScheduledRow
from octavo.core.draft import BranchKey, Draft
from octavo.core.draft_tree import DraftTree, rows_along
from octavo.core.errors import InvalidInput
from octavo.core.request import Branch, RequestState

__all__ = [
    "Guess",
    "add_drafts",
    "check_drafts",
    "draft_fault",
    "drawn_path",
    "facts_of_drafts",
    "guess_of",
    "may_draft",
    "rest_of",
]

Guess = Sequence[int] | DraftTree  # drafts each after the one before, or a tree
Reserve = Callable[[Branch, int, Draft], tuple[PageTableDelta, ...] | None]
_DECODING = RequestState.DECODING


def may_draft(branch: Branch) -> bool:
    """True for a branch whose next step computes one token, if nothing more is asked for than what it draws.

    With mirostat none has: what may be drawn after a token depends on how likely that was.
    """
    apart = branch.request.gang or branch.params.mirostat
    return branch.state is _DECODING and not apart and branch.num_missing_tokens == 1


def check_drafts(proposed: Mapping[BranchKey, Guess], vocab_size: int | None) -> dict[BranchKey, DraftTree]:
    """The drafts of those that have any. Raises ``InvalidInput`` for what is no token id of the vocabulary."""
    found = {}
    for key, guess in proposed.items():
        if not len(guess):
            continue
        found[key] = tree = guess if isinstance(guess, DraftTree) else DraftTree.chain(guess)
        if min(tree.token_ids) < 0 or (vocab_size is not None and max(tree.token_ids) >= vocab_size):
            raise InvalidInput("drafts", list(tree.token_ids), f"token ids are 0 to {vocab_size and vocab_size - 1}")
    return found


def facts_of_drafts(proposed: Mapping[BranchKey, DraftTree]) -> list[tuple[Any, ...]]:
    """Drafts as JSON values: [request, choice, tokens], and of trees their parents."""
    return [
        (*key, list(tree.token_ids)) if tree.is_chain else (*key, list(tree.token_ids), list(tree.parents))
        for key, tree in proposed.items()
    ]


def guess_of(facts: Sequence[Any]) -> tuple[BranchKey, Guess]:
    """Whose drafts these are, of `facts_of_drafts`, and the drafts."""
    request_id, choice, token_ids, *parents = facts
    return (request_id, choice), DraftTree(tuple(token_ids), tuple(parents[0])) if parents else token_ids


def add_drafts(
    draft: Draft, budget: int, chunk: int, reserve: Reserve, until_due: Callable[[Branch], int] | None = None
) -> None:
    """Lengthen the rows of those that have drafts, by rank, while there are tokens, pages and time for it.

    ``until_due``: the most tokens that a branch's row may have.
    """
    for row, branch in zip(draft.others, draft.served, strict=True):
        drafts = draft.proposed.get(branch.key)
        if drafts is None or not may_draft(branch) or not row.flags.sample:
            continue
        count = min(len(drafts), budget, chunk - 1, branch.token_limit - branch.num_tokens - 1)
        count = count if until_due is None else min(count, until_due(branch) - 1)
        if count > 0 and draft.allowance is not None:
            count = draft.allowance.verify(row.start, count)
        deltas = reserve(branch, 1 + count, draft) if count > 0 else None
        if deltas is not None:
            _lengthen(row, drafts.first(count))
            row.page_deltas += deltas
            budget -= count


def _lengthen(row: ScheduledRow, drafts: DraftTree) -> None:
    row.token_ids += drafts.token_ids
    row.num_drafts, row.reason = len(drafts), f"{row.reason} with {len(drafts)} drafts"
    if not drafts.is_chain:
        row.flags, row.reason = replace(row.flags, parent_rows=drafts.parent_rows()), f"{row.reason} in a tree"


def drawn_path(row: ScheduledRow, outcome: RowResult) -> list[int]:
    """The rows (`ScheduledRow.parent_rows`) along the drafts that were drawn, from the last known token's on."""
    return rows_along(row.drafts, row.parent_rows, outcome.token_ids[:-1])


def draft_fault(row: ScheduledRow, outcome: RowResult) -> str | None:
    """What is wrong with the number of tokens that a row came to, or with drafts that it took for drawn."""
    tokens, most = outcome.token_ids, (1 + row.num_drafts) * row.flags.sample
    if not int(row.flags.sample) <= len(tokens) <= most:
        return f"the model returned {len(tokens)} tokens for a row that samples {most}"
    if len(tokens) > 1 and len(drawn_path(row, outcome)) < len(tokens):
        return f"the model went on from drafts {list(row.drafts)}, and drew {list(tokens)}"
    return None


def rest_of(rows: Iterable[tuple[int, RowResult]]) -> list[tuple[int, list[int]]] | None:
    """(row, tokens behind its first) of the rows that came to several tokens, if there are any."""
    return [(at, list(row.token_ids[1:])) for at, row in rows if len(row.token_ids) > 1] or None
