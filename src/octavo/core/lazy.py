"""Sequences that hold columns and make their elements when somebody looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

_Row = TypeVar("_Row")


class LazyRows(Sequence[_Row]):
    """A sequence whose elements are made when they are looked at. Equal to any sequence of equal elements."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def _row(self, index: int) -> _Row:
        """Element 0 <= index < len(self)."""
        raise IndexError(index)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | Sequence[_Row]:
        places = range(len(self))[index]
        return self._row(places) if isinstance(places, int) else tuple(map(self._row, places))

    def __iter__(self) -> Iterator[_Row]:
        return map(self._row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)
