"""The error tree. Every error that a caller may catch descends from `OctavoError`.

OctavoError
├── InvalidInput (also a ValueError)   something the caller gave: names field, value and remedy
├── OutOfPages                         the page pool cannot serve a reservation right now
├── UseAfterRelease (also a KeyError)  a KV handle or page was used after it was released
├── InvariantBroken                    an audit failed: a bug in Octavo
├── CorruptPages                       pages of the host tier are not what was written there
└── RowError                           a forward pass failed for the named rows only
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

__all__ = [
    "CorruptPages", "InvalidInput", "InvariantBroken", "OctavoError", "OutOfPages", "RowError", "UseAfterRelease",
    "shorten",
]  # fmt: skip

_MAX_SHOWN = 120
_MAX_SHOWN_BITS = 256


def shorten(value: object) -> str:
    """A bounded `repr` of any value: an error message never grows with its input."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"<integer of {value.bit_length()} bits>"
    shower = reprlib.Repr()
    shower.maxstring = shower.maxother = _MAX_SHOWN
    try:
        return shower.repr(value)
    except Exception:  # a repr written by a caller may fail; the message must not
        return f"<{type(value).__name__}>"


class OctavoError(Exception):
    """The root of every error raised on purpose by Octavo."""


class InvalidInput(OctavoError, ValueError):
    """Something the caller gave cannot be honoured.

    `field` says which input, `value` is what was given, `remedy` says what would be accepted.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field = field
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field} = {shorten(self.value)}: {self.remedy}"


class OutOfPages(OctavoError):
    """The page pool cannot serve a reservation right now."""


class UseAfterRelease(OctavoError, KeyError):
    """A KV handle or page was used after it was released."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "used after release"


class InvariantBroken(OctavoError):
    """An audit found a state that must not exist: a bug in Octavo."""


class CorruptPages(OctavoError):
    """Pages of the host tier do not hold what was written there. The step fails before anything reads them."""

    def __init__(self, pages: Sequence[int], message: str) -> None:
        self.pages = tuple(pages)  # of the host tier
        super().__init__(message)


class RowError(OctavoError):
    """A forward pass failed, and only the named rows of the decision are to blame."""

    def __init__(self, rows: Sequence[int], message: str) -> None:
        self.rows = tuple(rows)
        super().__init__(message)
