"""Candidates of one prompt become the choices that are returned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from octavo.core.params import SamplingParams
from octavo.decoding.ranking import best_of

__all__ = ["Best"]


class Best:
    """Holds the deltas of all candidates until the last one has ended; then come the best, a delta each.

    Beams have their order when they come: those behind the first n are left out, and nothing is held.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._held: list[list[Any]] = [[] for _ in range(params.num_branches)]
        self._open = params.num_branches

    def take(self, delta: Any) -> Iterable[Any]:
        """What can be shown after one more delta."""
        if self._params.use_beam_search:
            return (delta,) if delta.choice < self._params.n else ()
        self._held[delta.choice].append(delta)
        self._open -= delta.finish_reason is not None
        if self._open:
            return ()
        logprobs = [[entry for delta in held for entry in delta.logprobs or ()] for held in self._held]
        return [self._whole(choice, candidate) for choice, candidate in enumerate(best_of(self._params, logprobs))]

    def _whole(self, choice: int, candidate: int) -> Any:
        held = self._held[candidate]
        return replace(
            held[-1],
            choice=choice,
            text="".join(delta.text for delta in held),
            token_ids=tuple(token for delta in held for token in delta.token_ids),
            logprobs=tuple(entry for delta in held for entry in delta.logprobs or ()),
            prompt_logprobs=next((d.prompt_logprobs for d in held if d.prompt_logprobs is not None), None),
        )
