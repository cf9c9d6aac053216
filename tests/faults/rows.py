"""What a row of the table is: a fault, done so many times to a server under load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.world import World

ROWS: list[Row] = []


@dataclass(frozen=True)
class Row:
    """``do`` raises ``AssertionError`` unless the outcome was right; what it returns is worth knowing.

    ``alone``: each time has a server of its own, which ``do`` brings to its end.
    """

    number: str
    what: str
    outcome: str
    do: Callable[[World], str | None]
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    has_timers: bool = False


def row(
    number: str, what: str, outcome: str, *flags: str, alone: bool = False, timers: bool = False, **settings: Any
) -> Any:
    """Make a function a row."""

    def add(do: Callable[[World], str | None]) -> Callable[[World], str | None]:
        ROWS.append(Row(number, what, outcome, do, flags, settings, alone, timers))
        return do

    return add
