"""Beam search: how a gang goes on after each of its steps, by the rules of ``transformers`` 5 (`GenerationMixin`).

score       of a beam: the sum of its tokens' logprobs; of one that has ended: that / length ** length_penalty, its end
            token counted
step        candidates are all beams with all of their tokens, the best first. Of the first `width`, those that end (an
            end token, or the limit on tokens) join the ended ones, of which the best `width` are kept. The first
            `width` that do not end go on.
end         at the limit on tokens; with early_stopping once `width` have ended; else once `width` have ended and the
            best beam, at its score / length ** length_penalty, would not be better than the worst of them. That
            length is the present one, or with "never" and a positive penalty the longest it could come to

All of it is a function of the branches' logprobs and of `Request.ended`: nothing is kept here, so nothing can be lost.
Ties go to the lower choice, then to the lower token id; an ended beam stays before an equal one that ends later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.core.batch import GangEnding, GangMove, TokenLogprobs
from octavo.core.request import FinishReason, Request

__all__ = ["next_move", "score"]


@dataclass(frozen=True)
class _Candidate:
    """A beam and one more token."""

    total: float  # of its logprobs
    parent: int
    place: int  # of the token among the parent's most likely ones, from 0
    token_id: int
    logprob: float


def score(ending: GangEnding, length_penalty: float) -> float:
    """What beams that have ended are ranked by."""
    return _total(ending.logprobs) / float(len(ending.token_ids)) ** length_penalty


def next_move(request: Request, drawn: Mapping[int, TokenLogprobs]) -> GangMove:
    """How the gang goes on. ``drawn``: of each choice that has drawn, the most likely tokens of its logits
    (``params.num_top_logprobs`` of them).
    """
    params, width = request.params, len(request.branches)
    length = request.branches[0].num_output_tokens + 1
    limit = request.token_limit - len(request.prompt_token_ids)
    candidates = _candidates(request, drawn, length)
    ended = _ended(request, drawn, candidates[:width], length, limit)
    running = [each for each in candidates if each.token_id not in request.end_ids][:width]
    if _is_over(request, ended, running, length, limit):
        endings = ended + ended[-1:] * (width - len(ended))  # where a vocabulary has no more
        return GangMove(request.request_id, endings=endings, ended=ended)
    running += running[-1:] * (width - len(running))
    return GangMove(
        request.request_id,
        parents=tuple(each.parent for each in running),
        token_ids=tuple(each.token_id for each in running),
        logprobs=tuple(_shown(drawn[each.parent], each, params.logprobs or 0) for each in running),
        ended=ended,
    )


def _candidates(request: Request, drawn: Mapping[int, TokenLogprobs], length: int) -> list[_Candidate]:
    """Every beam with its likely tokens, best first; without end tokens as long as there must be more tokens."""
    too_early = request.end_ids if length <= request.params.min_tokens else frozenset()
    found = []
    for choice, entry in sorted(drawn.items()):
        before = _total(request.branches[choice].logprobs)
        likely = entry.top or ((entry.token_id, entry.logprob),)
        for place, (token, logprob) in enumerate(likely):
            if token not in too_early:
                found.append(_Candidate(before + logprob, choice, place, token, logprob))
    return sorted(found, key=lambda each: (-each.total, each.parent, each.place))


def _ended(
    request: Request, drawn: Mapping[int, TokenLogprobs], best: Sequence[_Candidate], length: int, limit: int
) -> tuple[GangEnding, ...]:
    """The best that have ended, with those that end now."""
    now = [
        _ending(request, drawn[each.parent], each)
        for each in best
        if each.token_id in request.end_ids or length >= limit
    ]
    penalty = request.params.length_penalty
    ranked = sorted([*request.ended, *now], key=lambda ending: -score(ending, penalty))
    return tuple(ranked[: len(request.branches)])


def _is_over(
    request: Request, ended: Sequence[GangEnding], running: Sequence[_Candidate], length: int, limit: int
) -> bool:
    params = request.params
    if length >= limit or not running:
        return True
    if len(ended) < len(request.branches):
        return False
    if params.early_stopping is True:
        return True
    at = limit if params.early_stopping == "never" and params.length_penalty > 0.0 else length
    return running[0].total / float(at) ** params.length_penalty <= score(ended[-1], params.length_penalty)


def _ending(request: Request, entry: TokenLogprobs, candidate: _Candidate) -> GangEnding:
    branch, token, params = request.branches[candidate.parent], candidate.token_id, request.params
    stops = token in request.end_ids
    is_eos = token in request.eos_token_ids and not params.ignore_eos
    return GangEnding(
        token_ids=(*branch.output_token_ids, token),
        finish_reason=(FinishReason.STOP if stops else FinishReason.LENGTH).value,
        stop_reason=token if stops and not is_eos else None,
        logprobs=(*branch.logprobs, _shown(entry, candidate, params.logprobs or 0)),
    )


def _shown(entry: TokenLogprobs, candidate: _Candidate, most: int) -> TokenLogprobs:
    """The logprobs of the candidate's token beside as many likely ones as were asked for."""
    rank = 1 + candidate.place
    return replace(entry, token_id=candidate.token_id, logprob=candidate.logprob, rank=rank, top=entry.top[:most])


def _total(logprobs: Sequence[TokenLogprobs]) -> float:
    """Their exact sum, rounded once: the order does not matter."""
    return math.fsum([entry.logprob for entry in logprobs])
