"""Who is inside, under which id, of whose quota: one register, however many front ends there are.

    front end:  Arrive -> (tokenize) -> Enter -> ... FirstToken ... -> Leave        a stay, under a number of its own

It is where the front end is, or, with several, with their supervisor, which outlives them: what a dead one let in
leaves with it. No I/O; the clock comes in as an argument, but for the quotas'.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.core.admission import Ask, Door, Guest, Limits, Refusal
from octavo.core.forecast import Pace
from octavo.serve.errors import refused
from octavo.serve.keys import Key
from octavo.serve.ledger import Entry, Ledger
from octavo.serve.quotas import Quotas
from octavo.serve.sums import Values, added

__all__ = ["Arrive", "Asked", "Describe", "Enter", "FirstToken", "Full", "Leave", "Register", "Scrape"]

_Number = Annotated[int, Meta(ge=0, lt=2**62)]
_Text = Annotated[str, Meta(max_length=256)]


class _Question(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a front end has to say."""


class Arrive(_Question, tag=70):
    """A request has come. Raises ``ApiError``: 409 for the id of one that runs, 429 for what would not get in."""

    stay: _Number
    owner: _Text
    request_id: _Text  # empty: it is not to be found by an id
    key: Key | None
    ask: Ask | None  # None: it asks nothing of the engine, or is in nobody's way
    pace: Pace
    counts: bool = True  # among the requests of its key


class Enter(_Question, tag=71):
    """It has been read, and asks for this. The answer: seconds to its first token as foretold. Raises ``ApiError``."""

    stay: _Number
    prompt_tokens: int
    ask: Ask
    pace: Pace


class FirstToken(_Question, tag=72):
    """It waits no more, after so many steps of the engine."""

    stay: _Number
    steps: int


class Leave(_Question, tag=73):
    """It has ended like this, and has used so many tokens."""

    stay: _Number
    steps: int
    tokens: int = 0
    outcome: _Text = "cancelled"


class Describe(_Question, tag=74):
    """What has become of a request?"""

    owner: _Text
    request_id: _Text


class Full(_Question, tag=75):
    """Why would a small request not be let in now? None if it would."""

    pace: Pace


class Scrape(_Question, tag=76):
    """These are the front end's counters and gauges; what are those of all others, the dead included, together?"""

    values: Values


Asked = Arrive | Enter | FirstToken | Leave | Describe | Full | Scrape


@dataclass(eq=False)
class _Stay:
    places: ExitStack
    entry: Entry | None
    key: Key | None
    guest: Guest | None = None


class Register:
    """The stays of all front ends."""

    def __init__(self, limits: Limits) -> None:
        self.ledger, self.quotas, self.door = Ledger(), Quotas(), Door(limits)
        self._stays: dict[tuple[int, int], _Stay] = {}  # by front end and number
        self._values: dict[int, Values] = {}  # by front end; 0: of the dead

    def answer(self, front: int, asked: Asked, now: float) -> Any:
        """Take in what a front end says. Raises ``ApiError``."""
        if isinstance(asked, Arrive):
            return self._arrive(front, asked)
        if isinstance(asked, Describe):
            return self.ledger.describe(asked.owner, asked.request_id)
        if isinstance(asked, Full):
            refusal = self.door.refusal(Ask("", 1), asked.pace)
            return None if refusal is None else refusal.message
        if isinstance(asked, Scrape):
            self._values[front] = asked.values
            return added(values for other, values in self._values.items() if other != front)
        stay = self._stays.get((front, asked.stay))
        if stay is None:
            return None  # it was refused
        if isinstance(asked, Enter):
            return self._enter(stay, asked, now) if stay.guest is None else None
        if isinstance(asked, Leave):
            self._leave(stay, asked)
            del self._stays[front, asked.stay]
        elif stay.guest is not None:
            self.door.first_token(stay.guest, asked.steps, now)
        return None

    def gone(self, front: int) -> None:
        """A front end has died, and all that it had let in leaves; its counters stay."""
        for key in [key for key in self._stays if key[0] == front]:
            stay = self._stays.pop(key)
            self._leave(stay, Leave(key[1], 0 if stay.guest is None else stay.guest.first_step or stay.guest.step))
        values = self._values.pop(front, None)
        if values is not None:
            kept = Values(values.counters)
            self._values[0] = added(each for each in (self._values.get(0), kept) if each is not None)

    def _arrive(self, front: int, asked: Arrive) -> None:
        with ExitStack() as places:
            places.enter_context(self.quotas.inside(asked.key if asked.counts else None))
            named = bool(asked.request_id)
            entry = places.enter_context(self.ledger.running(asked.owner, asked.request_id)) if named else None
            refusal = None if asked.ask is None else self.door.refusal(asked.ask, asked.pace)
            if refusal is not None:
                raise refused(refusal)
            self._stays[front, asked.stay] = _Stay(places.pop_all(), entry, asked.key)

    def _enter(self, stay: _Stay, asked: Enter, now: float) -> float:
        self.quotas.check_tokens(stay.key, asked.prompt_tokens)
        guest = self.door.enter(asked.ask, asked.pace, now)
        if isinstance(guest, Refusal):
            raise refused(guest)
        stay.guest = guest
        if stay.entry is not None:
            stay.entry.outcome = "cancelled"  # unless it comes to an end
        return 0.0 if guest.forecast is None else guest.forecast.seconds

    def _leave(self, stay: _Stay, asked: Leave) -> None:
        if stay.guest is not None:
            self.door.leave(stay.guest, asked.steps)
            self.quotas.charge_tokens(stay.key, asked.tokens)
            if stay.entry is not None:
                stay.entry.outcome = asked.outcome
        stay.places.close()
