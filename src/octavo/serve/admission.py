"""How many requests may be inside at once. One too many is refused early, with a time to come back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.serve.errors import ApiError

__all__ = ["Admission"]

_WEIGHT = 0.2  # of the newest gap between two departures in their moving average


class Admission:
    """Counts sequences inside. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._ids: set[str] = set()
        self._gap: float | None = None  # seconds between departures, averaged
        self._left: float | None = None

    @contextmanager
    def enter(self, request_id: str, sequences: int) -> Iterator[None]:
        """Hold places for `sequences` while the block runs. Raises ``ApiError`` 409 or 429."""
        if request_id in self._ids:
            message = "request_id: a request with this id is still running; wait for it, or send another id."
            raise ApiError(409, message, param="request_id", code="duplicate_request_id")
        # a request larger than the whole limit may run alone
        if self.inside and self.inside + sequences > self.limit:
            raise self._refusal(sequences)
        self._ids.add(request_id)
        self.inside += sequences
        try:
            yield
        finally:
            self.inside -= sequences
            self._ids.discard(request_id)
            self._depart()

    def _depart(self) -> None:
        now = time.monotonic()
        if self._left is not None:
            gap = now - self._left
            self._gap = gap if self._gap is None else (1 - _WEIGHT) * self._gap + _WEIGHT * gap
        self._left = now

    def _refusal(self, sequences: int) -> ApiError:
        excess = self.inside + sequences - self.limit
        seconds = max(1, min(60, math.ceil(excess * (self._gap or 1.0))))
        message = (
            f"The server is full: {self.inside} sequences run or wait, and {self.limit} may; try again in {seconds} s."
        )
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})
