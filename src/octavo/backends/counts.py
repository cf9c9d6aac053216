"""How often each token occurs, in a form that native code reads where it lies: a token more changes one number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["TokenCounts"]


class TokenCounts(Mapping[int, int]):
    """Token id -> how often (at least once), changed one token at a time.

    `pairs` holds id and count of each distinct token, in turn, as 32-bit integers, in an order without meaning.
    """

    __slots__ = ("_places", "pairs")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.pairs = array("i")
        self._places: dict[int, int] = {}  # token id -> where its count stands in `pairs`
        for token in token_ids:
            self.add(token)

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> TokenCounts:
        """The same counts; tokens that do not occur are left out."""
        made = cls()
        for token, count in counts.items():
            if count > 0:
                made._places[token] = len(made.pairs) + 1
                made.pairs.extend((token, count))
        return made

    def add(self, token: int) -> None:
        """One more occurrence."""
        place = self._places.get(token)
        if place is None:
            self._places[token] = len(self.pairs) + 1
            self.pairs.extend((token, 1))
        else:
            self.pairs[place] += 1

    def remove(self, token: int) -> None:
        """One occurrence less. Raises KeyError for a token that does not occur."""
        place = self._places[token]
        self.pairs[place] -= 1
        if self.pairs[place]:
            return
        count, last = self.pairs.pop(), self.pairs.pop()
        del self._places[token]
        if last != token:
            self.pairs[place - 1], self.pairs[place] = last, count
            self._places[last] = place

    def __getitem__(self, token: int) -> int:
        return self.pairs[self._places[token]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
