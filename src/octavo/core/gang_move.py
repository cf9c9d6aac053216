"""One move of a gang, as one transaction: pages, tokens and states of all members change, or nothing does."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.core.batch import GangEnding, GangMove, TokenLogprobs
from octavo.core.gang import members
from octavo.core.kv import KVCacheManager
from octavo.core.params import SamplingParams
from octavo.core.request import Branch, FinishReason, Request, RequestState
from octavo.core.roster import Roster, checkpoint
from octavo.core.undo import UndoLog

__all__ = ["facts_of_move", "make_move", "move_fault", "move_of"]


def move_fault(request: Request, move: GangMove | None, vocab_size: int | None) -> str | None:
    """What is wrong with a move of a gang that has drawn, if anything."""
    if move is None:
        return "the driver said nothing of a gang that has drawn"
    width, drew = len(request.branches), [b.choice for b in request.branches if b.state is RequestState.DECODING]
    if move.endings:
        if len(move.endings) != width:
            return f"the driver ended {len(move.endings)} choices of {width}"
        return next(filter(None, (_ending_fault(request, each, vocab_size) for each in move.endings)), None)
    if len(move.parents) != width or len(move.token_ids) != width:
        return f"the driver gave {len(move.parents)} parents and {len(move.token_ids)} tokens to {width} members"
    if not set(drew).issuperset(move.parents):
        return f"the driver named parents {list(move.parents)}, and {drew} have drawn"
    return _tokens_fault(request, move.token_ids, move.logprobs, vocab_size)


def _ending_fault(request: Request, ending: GangEnding, vocab_size: int | None) -> str | None:
    if not 1 <= len(ending.token_ids) <= request.token_limit - len(request.prompt_token_ids):
        return f"the driver ended a choice with {len(ending.token_ids)} tokens"
    return _tokens_fault(request, ending.token_ids, ending.logprobs, vocab_size)


def _tokens_fault(
    request: Request, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], vocab_size: int | None
) -> str | None:
    if not all(0 <= token < (vocab_size or sys.maxsize) for token in token_ids):
        return f"the driver gave tokens {list(token_ids)}, and the vocabulary has {vocab_size}"
    if request.params.wants_logprobs and len(logprobs) != len(token_ids):
        return f"the driver gave {len(logprobs)} logprobs for {len(token_ids)} tokens"
    return None


def make_move(kv: KVCacheManager, roster: Roster, request: Request, move: GangMove, now: float) -> None:
    """Let every member go on as a faultless move says, or end them all."""
    gang = members(request.branches[0])
    if move.endings:
        for branch, ending in zip(gang, move.endings, strict=True):
            roster.finish(branch, FinishReason(ending.finish_reason), ending.stop_reason, now, ending)
        return
    _go_on(kv, gang, move)
    request.ended = move.ended
    if gang[0].num_tokens >= request.token_limit:
        for branch in gang:
            roster.finish(branch, FinishReason.LENGTH, None, now)


def _go_on(kv: KVCacheManager, gang: Sequence[Branch], move: GangMove) -> None:
    undo = UndoLog()
    before = [(b.token_ids, b.logprobs, b.num_resident_tokens, b.num_computed_tokens) for b in gang]
    for branch, had in zip(gang, before, strict=True):
        undo.push(partial(_give_back, branch, *had))
        undo.push(checkpoint(branch))
    kept = kv.reorder([branch.key for branch in gang], move.parents, undo)
    try:
        for index, branch in enumerate(gang):
            _take_over(branch, *before[move.parents[index]])
            branch.append(move.token_ids[index], move.logprobs[index] if branch.params.wants_logprobs else None)
            branch.kv_blocks = kv.num_branch_pages(branch.key)
    except Exception:
        undo.rollback()
        raise
    finally:
        kv.allocator.retire(kept)


def _take_over(
    branch: Branch, token_ids: list[int], logprobs: list[TokenLogprobs], num_resident: int, num_computed: int
) -> None:
    """Have what another member had, in pages that they share now; the slot knows nothing of it."""
    branch.token_ids, branch.logprobs = list(token_ids), list(logprobs)
    branch.num_resident_tokens, branch.needs_init = num_resident, True
    branch.num_computed_tokens = max(branch.num_computed_tokens, num_computed)
    if branch.state is RequestState.PREFILLING:
        branch.transition(RequestState.DECODING)


def _give_back(
    branch: Branch, token_ids: list[int], logprobs: list[TokenLogprobs], num_resident: int, num_computed: int
) -> None:
    branch.token_ids, branch.logprobs, branch.num_computed_tokens = token_ids, logprobs, num_computed


def facts_of_move(move: GangMove) -> dict[str, object]:
    """What the timeline takes: all but the logprobs."""
    endings = [[list(each.token_ids), each.finish_reason, each.stop_reason] for each in move.endings]
    return {"parents": move.parents, "tokens": move.token_ids, "endings": endings or None}


def move_of(event: Mapping[str, Any], params: SamplingParams) -> GangMove:
    """The inverse; logprobs that were asked for are 0."""

    def scores(tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(token, 0.0, 1) for token in tokens) if params.wants_logprobs else ()

    endings = tuple(GangEnding(tuple(said), why, at, scores(said)) for said, why, at in event["endings"] or ())
    tokens = tuple(event["tokens"])
    return GangMove(event["request"], tuple(event["parents"]), tokens, scores(tokens), endings)
