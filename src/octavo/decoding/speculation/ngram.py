"""Prompt lookup: what followed the last few tokens when they came before, in the prompt or the output.

Method: Saxena, Prompt Lookup Decoding, 2023; of the newest matches the longest, then the latest. Each branch keeps, for
every n-gram of its tokens, where the newest one ends, and for every place where the same n-gram ended before: a token
more costs one entry, and a look-up a few comparisons, whatever the context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.errors import InvalidInput
from octavo.decoding.speculation.proposer import BranchKey, Proposer

__all__ = ["Lookup", "NgramProposer"]

MOST_TOKENS = 1 << 16  # of a branch that are looked at: its memory is bounded by them
ENTRY_BYTES, KEY_BYTES = 144, 5  # of an n-gram that came once, and of each of its tokens
CANDIDATES = 8  # matches that are compared, from the newest on


class _Index:
    """The n-grams of one branch. A place is where one ends: the index of the token behind it; 0: nowhere."""

    def __init__(self, size: int, longest: int) -> None:
        self._size, self._longest = size, longest
        self._newest: dict[int, int] = {}  # n-gram -> place
        self._before = array("i", [0])  # [place]: the one before it with the same n-gram

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what has come since the last call."""
        for place in range(len(self._before), min(len(token_ids), MOST_TOKENS) + 1):
            if place < self._size:
                self._before.append(0)
                continue
            key = self._key(token_ids, place)
            self._before.append(self._newest.get(key, 0))
            self._newest[key] = place

    def shrink(self, token_ids: Sequence[int], length: int) -> None:
        """Forget what ends behind the first ``length`` of ``token_ids``, as if it had not come."""
        for place in range(len(self._before) - 1, length, -1):
            before = self._before.pop()
            if place >= self._size:
                key = self._key(token_ids, place)
                if before:
                    self._newest[key] = before
                else:
                    del self._newest[key]

    def find(self, token_ids: Sequence[int]) -> int:
        """Where the last tokens came before; the longest match of the newest few."""
        known, best, reach = len(token_ids), 0, 0
        place = self._newest.get(self._key(token_ids, known), 0) if known >= self._size else 0
        if place == known:
            place = self._before[known]
        for _ in range(CANDIDATES):
            if not place or reach == self._longest:
                break
            length = self._match(token_ids, place)
            if length > reach:
                best, reach = place, length
            place = self._before[place]
        return best

    def _key(self, token_ids: Sequence[int], place: int) -> int:
        key = 0
        for token in token_ids[place - self._size : place]:
            key = key << 32 | token
        return key

    def _match(self, token_ids: Sequence[int], place: int) -> int:
        """How many tokens before a place are those at the end."""
        length, known = self._size, len(token_ids)
        most = min(self._longest, place)
        while length < most and token_ids[place - length - 1] == token_ids[known - length - 1]:
            length += 1
        return length


class Lookup:
    """What prompt lookup says of the next token of one sequence: a function of its tokens, however they came.

    A request that asks for the residual verifier itself has the lengths that stand here, whatever the engine is told.
    """

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        self._index = _Index(shortest, longest)

    def next(self, token_ids: Sequence[int]) -> int:
        """The likely one after ``token_ids``; -1: no idea. It only grows between two calls, but for `shrink`."""
        self._index.extend(token_ids)
        place = self._index.find(token_ids)
        return token_ids[place] if place else -1

    def shrink(self, token_ids: Sequence[int], length: int) -> None:
        """Called before ``token_ids`` lose those behind the first ``length``."""
        self._index.shrink(token_ids, length)


class NgramProposer(Proposer):
    """A `Proposer` over the branch's own tokens. Matches of ``shortest`` tokens count, those of ``longest`` suffice."""

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        if not 1 <= shortest <= longest <= 64:
            raise InvalidInput("prompt_lookup_min", shortest, f"give 1 to prompt_lookup_max ({longest}), at most 64")
        self._shortest, self._longest = shortest, longest
        self._branches: dict[BranchKey, _Index] = {}

    def open(self, branch_key: BranchKey, namespace: str, num_prompt_tokens: int) -> None:
        """See `Proposer`."""
        self._branches[branch_key] = _Index(self._shortest, self._longest)

    def propose(self, branch_key: BranchKey, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that followed the match; where they reach the end, they go on as they began (a period)."""
        index = self._branches[branch_key]
        index.extend(token_ids)
        place = index.find(token_ids)
        if not place:
            return ()
        period = len(token_ids) - place
        return [token_ids[place + i % period] for i in range(most)]

    def observe(self, branch_key: BranchKey, token_ids: Sequence[int]) -> None:
        """See `Proposer`. Nothing is learnt before it is asked for."""

    def most_bytes(self, branches: int, tokens: int) -> int:
        """See `Proposer`."""
        return branches * min(tokens, MOST_TOKENS) * (ENTRY_BYTES + KEY_BYTES * self._shortest)

    def drop(self, branch_key: BranchKey) -> None:
        """See `Proposer`."""
        self._branches.pop(branch_key, None)
