"""What happened, in order: the last events in bounded memory, and every one to those who listen."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.event_table import VERSION, kind_of

__all__ = ["VERSION", "Columns", "Listener", "Timeline", "plain"]

Columns = tuple[list[str], list[int]]  # requests and choices, one of each for a row
Listener = Callable[[str, float, Mapping[str, Any]], None]


class Timeline:
    """The last ``capacity`` events; `octavo.core.event_table` says which kinds there are and what each means.

    Read, an event is a dict of JSON values: ``v, process, epoch, n`` (a number that rises by one), ``t`` (seconds on
    the caller's clock), ``kind``, and the fields of its kind. A process that takes another's place has a higher epoch.

    What is recorded is kept as it is given, and never copied: lists that are handed in must not change afterwards.
    """

    def __init__(self, capacity: int = 4096, *, process: str = "engine", epoch: int = 0) -> None:
        if capacity < 0:
            raise InvalidInput("capacity", capacity, "give 0 (keep nothing) or more")
        self._events: deque[tuple[int, str, float, Mapping[str, Any]]] = deque(maxlen=capacity)
        self._listeners: list[Listener] = []
        self.process, self.epoch = process, epoch
        self.num_recorded = 0
        self.now = 0.0  # of the last event

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        head = {"v": VERSION, "process": self.process, "epoch": self.epoch}
        for number, kind, now, values in list(self._events):
            yield {**head, "n": number, "t": now, "kind": kind, **plain(kind, values)}

    @property
    def num_dropped(self) -> int:
        """Events that the bound pushed out."""
        return self.num_recorded - len(self._events)

    @property
    def has_listeners(self) -> bool:
        """True if somebody wants every event, and inputs in full."""
        return bool(self._listeners)

    def record(self, kind: str, now: float, **values: Any) -> None:
        """Add one event. Raises ``InvalidInput`` for an unknown kind, if somebody listens."""
        self._events.append((self.num_recorded, kind, now, values))
        self.num_recorded += 1
        self.now = now
        for listener in self._listeners:
            listener(kind, now, values)

    def tell(self, kind: str, now: float, **values: Any) -> None:
        """An event for listeners alone: too large to be kept."""
        for listener in self._listeners:
            listener(kind, now, values)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(kind, t, values)`` for every event from now on, until the function returned is called."""
        self._listeners = [*self._listeners, listener]
        return lambda: self._listeners.remove(listener)

    def to_jsonl(self) -> str:
        """All events kept, one JSON object a line, in order."""
        return "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in self)


def plain(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event as JSON values, in the order of the table; optional ones that are missing as None.

    Raises ``InvalidInput`` for a kind that is not in the table, a field that its kind does not have, or one missing.
    """
    fields = kind_of(kind).fields
    extra = [name for name in values if name not in {field.name for field in fields}]
    if extra:
        raise InvalidInput(kind, extra, "these fields are not in the table of events")
    found = {}
    for field in fields:
        if field.name not in values and not field.optional:
            raise InvalidInput(kind, field.name, "give this field")
        value = values.get(field.name)
        if field.type == "branches" and isinstance(value, tuple):
            value = list(zip(*value, strict=True))
        found[field.name] = _lists(value)
    return found


def _lists(value: Any) -> Any:
    """The value with lists for tuples."""
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {key: _lists(item) for key, item in value.items()} if isinstance(value, dict) else value
