"""Who drives gangs: after each step, beam search says how those that have drawn go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.batch import ScheduleDecision, StepResult, StepRows, TokenLogprobs
from octavo.core.request import Request
from octavo.decoding.beam import next_move

__all__ = ["with_moves"]


def with_moves(decision: ScheduleDecision, result: StepResult, find: Callable[[str], Request | None]) -> StepResult:
    """The result with a move for each request with beams that has drawn. ``find`` knows the live requests."""
    rows = decision.rows.others if isinstance(decision.rows, StepRows) else decision.rows
    if not rows:
        return result
    first = len(result.rows) - len(rows)
    drawn: dict[str, dict[int, TokenLogprobs]] = {}
    failed: set[str] = set()
    for at, row in enumerate(rows, first):
        if not row.flags.sample or row.flags.logprobs < 0:
            continue
        outcome = result.rows[at]
        if outcome.error is not None or not outcome.logprobs:
            failed.add(row.request_id)
        else:
            drawn.setdefault(row.request_id, {})[row.choice] = outcome.logprobs[0]
    moves = []
    for request_id, entries in drawn.items():
        request = find(request_id)
        if request is not None and request.params.use_beam_search and request_id not in failed:
            moves.append(next_move(request, entries))
    return replace(result, moves=(*result.moves, *moves)) if moves else result
