"""What a row of the table is: a fault, done so many times to a server under load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ROWS: list[Row] = []


@dataclass(frozen=True)
class Row:
    """``do`` raises ``AssertionError`` unless the outcome was right; what it returns is worth knowing.

    ``alone``: each time has a server of its own, which ``do`` brings to its end. ``bare``: ``do`` starts what it needs.
    """

    number: str
    what: str
    outcome: str
    do: Callable[[Any], str | None]  # of a `World`, or a `Bare` one
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    bare: bool = False
    has_timers: bool = False


def row(
    number: str,
    what: str,
    outcome: str,
    *flags: str,
    alone: bool = False,
    bare: bool = False,
    timers: bool = False,
    **settings: Any,
) -> Any:
    """Make a function a row."""

    def add(do: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        ROWS.append(Row(number, what, outcome, do, flags, settings, alone, bare, timers))
        return do

    return add
