"""What a token's chance owes to the tokens before it: DRY, no_repeat_ngram_size, banned sequences.

All of it is a function of (parameters, prompt, output so far): `look_back`. `History` gives the same, token by token.

tokens   a b c x a b c          suffix a b c occurs before x: x is what would go on with the repetition, match 3
               ^ i = 3   lengths {3: 3}
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import index

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams

__all__ = ["History", "look_back", "suffix_matches"]

LogitsProcessor = Callable[[Sequence[int], int], Mapping[int, float]]  # (tokens, how many are the prompt's) -> added
_LARGEST = 80.0  # of log(base ** n): what a float32 logit can lose


Found = tuple[tuple[int, ...], dict[int, float]]


def look_back(
    p: SamplingParams, num_prompt_tokens: int, tokens: Sequence[int], processors: Sequence[LogitsProcessor] = ()
) -> Found:
    """The ids that may not come next, and what others' logits lose, after these tokens (prompt, then output)."""
    return History(p, num_prompt_tokens, list(tokens), processors).next()


def suffix_matches(tokens: Sequence[int]) -> dict[int, int]:
    """For each index i >= 1: how many tokens before i equal the last ones of all, where any do.

    A Z-array of the reversed tokens (Main and Lorentz): linear time.
    """
    back = tokens[::-1]
    count, z = len(back), [0] * len(back)
    left = right = 0
    for k in range(1, count):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < count and back[length] == back[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return {count - k: z[k] for k in range(count - 1, 0, -1) if z[k]}


class History:
    """The tokens of one branch, followed. `tokens` is the caller's list: `grown` and `shrunk` say what became of it."""

    def __init__(
        self,
        p: SamplingParams,
        num_prompt_tokens: int,
        tokens: list[int],
        processors: Sequence[LogitsProcessor] = (),
        vocab_size: int = sys.maxsize,
    ) -> None:
        self._processors, self._vocab_size = processors, vocab_size
        self._p, self._tokens, self._num_prompt_tokens = p, tokens, num_prompt_tokens
        self._breakers = frozenset(p.dry_breaker_ids or ())
        self._places: dict[int, list[int]] | None = None  # token -> where it stands, ascending
        self._matches: dict[int, int] | None = None  # `suffix_matches`; None: to be found anew

    def grown(self) -> None:
        """One more token stands at the end."""
        if self._places is None or not self._matching:
            return
        token, place = self._tokens[-1], len(self._tokens) - 1
        before, old = self._places.setdefault(token, []), self._matches
        if old is not None:
            self._matches = {i + 1: old.get(i, 0) + 1 for i in before}
        before.append(place)

    def shrunk(self, token: int) -> None:
        """The last token, this one, is gone."""
        if self._places is not None:
            self._places[token].pop()
        self._matches = None

    def next(self) -> Found:
        """`look_back` of the tokens as they stand."""
        self._find()
        banned = dict.fromkeys(self._ends_of_sequences())
        banned.update(dict.fromkeys(self._ends_of_ngrams()))
        return tuple(banned), self._with_processors(self._dry())

    def _with_processors(self, penalties: dict[int, float]) -> dict[int, float]:
        for process in self._processors:
            for token, added in process(self._tokens, self._num_prompt_tokens).items():
                if not 0 <= index(token) < self._vocab_size or not float(added) < math.inf:
                    remedy = "a processor adds finite numbers, or -inf, to ids of the vocabulary"
                    raise InvalidInput("logits_processors", {token: added}, remedy)
                penalties[token] = penalties.get(token, 0.0) - added
        return penalties

    @property
    def _matching(self) -> bool:
        return self._p.has_dry or self._p.no_repeat_ngram_size > 1

    def _find(self) -> None:
        if not self._matching or self._matches is not None:
            return
        self._matches = suffix_matches(self._tokens)
        if self._places is None:
            self._places = {}
            for place, token in enumerate(self._tokens):
                self._places.setdefault(token, []).append(place)

    def _ends_of_sequences(self) -> list[int]:
        start, tokens = self._num_prompt_tokens, self._tokens
        found = []
        for *head, last in self._p.banned_sequences:
            first = len(tokens) - len(head)
            if first >= start and tokens[first:] == head:
                found.append(last)
        return found

    def _ends_of_ngrams(self) -> list[int]:
        n, tokens = self._p.no_repeat_ngram_size, self._tokens
        if n == 1:
            return tokens
        return [tokens[i] for i, length in (self._matches or {}).items() if length >= n - 1] if n > 1 else []

    def _dry(self) -> dict[int, float]:
        """DRY: multiplier * base ** (longest match that the token would go on with - allowed_length)."""
        p, tokens, matches = self._p, self._tokens, self._matches
        if not p.has_dry or not matches:
            return {}
        start = 0 if p.dry_penalty_last_n < 0 else max(0, len(tokens) - p.dry_penalty_last_n)
        most = self._since_breaker(max(matches.values()))
        longest: dict[int, int] = {}
        for i, length in matches.items():
            length = min(length, most, i - start)
            if length >= p.dry_allowed_length and length > longest.get(tokens[i], 0):
                longest[tokens[i]] = length
        room = _LARGEST / math.log(p.dry_base) if p.dry_base > 1.0 else 0.0
        powers = {token: min(length - p.dry_allowed_length, room) for token, length in longest.items()}
        return {token: p.dry_multiplier * p.dry_base**power for token, power in powers.items()}

    def _since_breaker(self, most: int) -> int:
        """How many tokens stand after the last sequence breaker, at most so many."""
        for count in range(min(most, len(self._tokens))):
            if self._tokens[-1 - count] in self._breakers:
                return count
        return most
