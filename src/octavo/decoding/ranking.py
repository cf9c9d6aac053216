"""Which of the candidates that `best_of` asks for are returned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams

__all__ = ["best_of", "mean_logprob"]


def mean_logprob(logprobs: Sequence[TokenLogprobs]) -> float:
    """Log probability per token, by which OpenAI's API ranks; of no token at all: the worst."""
    total = math.fsum([entry.logprob for entry in logprobs])
    return total / len(logprobs) if logprobs else -math.inf


def best_of(params: SamplingParams, logprobs: Sequence[Sequence[TokenLogprobs]]) -> list[int]:
    """The ``params.n`` candidates that are returned, best first; the lower one of equals. Beams come in order."""
    ranked = list(range(len(logprobs)))
    if not params.use_beam_search and params.num_branches > params.n:
        ranked.sort(key=lambda candidate: (-mean_logprob(logprobs[candidate]), candidate))
    return ranked[: params.n]
