"""Loops in the output: a pattern of tokens that comes again and again, until whoever watches ends the choice."""

from __future__ import annotations

from octavo.core.samplers import Repetition

__all__ = ["LoopDetector"]


class LoopDetector:
    """Says when the last tokens are a pattern of min_pattern_size to max_pattern_size tokens, min_count times in a row.

    A fold over output ids. For each size p it counts how many of the last tokens equal the one p places before: the
    pattern stands there `count / p + 1` times.
    """

    def __init__(self, wanted: Repetition) -> None:
        self._sizes = range(wanted.min_pattern_size, wanted.max_pattern_size + 1)
        self._enough = [size * (wanted.min_count - 1) for size in self._sizes]
        self._counts = [0] * len(self._sizes)
        self._tokens: list[int] = []  # the last ones: as many as the largest pattern has

    def push(self, token_id: int) -> bool:
        """One more token; whether it completes a loop."""
        tokens, counts, found = self._tokens, self._counts, False
        for place, size in enumerate(self._sizes):
            if size <= len(tokens) and tokens[-size] == token_id:
                counts[place] += 1
                found = found or counts[place] >= self._enough[place]
            else:
                counts[place] = 0
        tokens.append(token_id)
        if len(tokens) > self._sizes[-1]:
            del tokens[0]
        return found
