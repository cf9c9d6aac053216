"""Which requests run here, and how the last ones ended: what `GET /v1/requests/{id}` answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.serve.errors import ApiError

__all__ = ["Entry", "Ledger"]

_REMEMBERED = 4096  # requests that have ended


@dataclass
class Entry:
    """A request that is being served; ``outcome``: how it ends, once the engine has been asked for something."""

    outcome: str = ""


class Ledger:
    """Requests by the id that their clients know. Used from the event loop only.

    An id names one live request of its owner: a second one with the id of a live one is refused, so a retry never runs
    beside what it repeats. Another owner's request with the same id is another request, of which nothing is told.
    A request that was refused before it ran is not remembered.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Entry] = {}  # by owner and id
        self._ended: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._running)

    @contextmanager
    def running(self, owner: str, request_id: str) -> Iterator[Entry]:
        """Keep an id for one request while the block runs. Raises ``ApiError`` 409."""
        name = owner, request_id
        if name in self._running:
            message = "request_id: a request with this id is still running; wait for it, or send another id."
            raise ApiError(409, message, param="request_id", code="duplicate_request_id")
        entry = self._running[name] = Entry()
        try:
            yield entry
        finally:
            del self._running[name]
            if entry.outcome:
                self._remember(name, entry.outcome)

    def orphaned(self, owner: str, request_id: str) -> None:
        """A request was cancelled when the front end that served it died."""
        if (owner, request_id) not in self._running:
            self._remember((owner, request_id), "cancelled")

    def _remember(self, name: tuple[str, str], outcome: str) -> None:
        self._ended.pop(name, None)
        self._ended[name] = outcome
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def describe(self, owner: str, request_id: str) -> dict[str, Any]:
        """Its status: running, finished, cancelled, or unknown (never seen, refused, or forgotten since).

        What the engine failed on, or what took too long, is finished with `finish_reason` "error".
        """
        told: dict[str, Any] = {"id": request_id, "object": "request"}
        if (owner, request_id) in self._running:
            return {**told, "status": "running"}
        ended = self._ended.get((owner, request_id), "unknown")
        if ended == "error":
            return {**told, "status": "finished", "finish_reason": ended}
        return {**told, "status": ended}
