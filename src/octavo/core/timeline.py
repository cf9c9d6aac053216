"""What happened, in order: plain events in bounded memory, written as JSON lines."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from octavo.core.errors import InvalidInput

VERSION = 1


class Timeline:
    """The last ``capacity`` events. Each is a dict: ``v, n`` (a number that rises by one), ``t`` (seconds), ``kind``,
    and the fields given. ``kind`` is one of submit, decision, tokens, preempt, cancel, stop, finish, rollback. The rows
    of a decision are its plain ``decodes`` (request, choice), then ``rows`` (request, choice, tokens, reason); `tokens`
    has the token of each row, in this order, or None.
    """

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 0:
            raise InvalidInput("capacity", capacity, "give 0 (record nothing) or more")
        self._events: deque[dict[str, Any]] = deque(maxlen=capacity)
        self.num_recorded = 0

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._events)

    @property
    def num_dropped(self) -> int:
        """Events that the bound pushed out."""
        return self.num_recorded - len(self._events)

    def record(self, kind: str, now: float, **values: Any) -> None:
        """Add one event. ``values`` are JSON values."""
        self._events.append({"v": VERSION, "n": self.num_recorded, "t": now, "kind": kind, **values})
        self.num_recorded += 1

    def to_jsonl(self) -> str:
        """All events kept, one JSON object a line, in order."""
        return "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in self._events)
