"""Where the key and value of a token lie when no tensor library is around: one pair of flat vectors per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.errors import UseAfterRelease

__all__ = ["KVHandle", "KVStore", "ListKVStore"]


@dataclass(frozen=True)
class KVHandle:
    """A request's K/V, as `KVCacheManager.allocate` gives it: valid until `release`.

    `token_count` slots were reserved at once; appending beyond them takes more pages.
    """

    request_id: str
    serial: int  # tells two handles of the same request apart
    token_count: int


class KVStore(Protocol):
    """Holds token K/V by (page, offset). `key` and `value` are one token's layers x heads, flattened."""

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Store one token's key and value."""

    def read(self, page: int, offset: int) -> tuple[Sequence[float], Sequence[float]]:
        """The key and value written last. Raises `UseAfterRelease` if there are none."""

    def copy_page(self, src: int, dst: int) -> None:
        """Make page `dst` hold what page `src` holds."""

    def forget(self, page: int) -> None:
        """The page is free: what it held must never be read again."""


class ListKVStore:
    """A `KVStore` of plain tuples: slow, exact, and it notices reads of what was never written or was forgotten."""

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, tuple[tuple[float, ...], tuple[float, ...]]]] = {}

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Store one token's key and value (copied)."""
        self._pages.setdefault(page, {})[offset] = (tuple(key), tuple(value))

    def read(self, page: int, offset: int) -> tuple[Sequence[float], Sequence[float]]:
        """The key and value written last. Raises `UseAfterRelease` if there are none."""
        try:
            return self._pages[page][offset]
        except KeyError:
            raise UseAfterRelease(f"page {page}, slot {offset} holds no key and value") from None

    def copy_page(self, src: int, dst: int) -> None:
        """Make page `dst` hold what page `src` holds."""
        self._pages[dst] = dict(self._pages.get(src, {}))

    def forget(self, page: int) -> None:
        """Drop what the page holds."""
        self._pages.pop(page, None)
