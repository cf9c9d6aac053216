"""Where the deltas of one request wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from octavo.engine.output import OutputDelta, merge_deltas

__all__ = ["Mailbox"]


class Mailbox:
    """Deltas on their way to one coroutine. What a slow reader left unread is merged, so it stays bounded.

    While the reader has read everything and waits, each delta is shown to ``express`` first: what it takes (True) the
    reader does not get, and need not be woken for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, express: Callable[[OutputDelta], bool] | None = None) -> None:
        self.loop = loop
        self._express = express
        self._reader: asyncio.Future[None] | None = None  # of `get` while it waits
        self._unread: dict[int, list[OutputDelta]] = {}  # by choice, in order of arrival
        self._error: Exception | None = None

    def put(self, delta: OutputDelta) -> None:
        """In the event loop: add one more."""
        if self._express is not None and self._is_awaited and self._express(delta):
            return
        self._unread.setdefault(delta.choice, []).append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """In the event loop: the reader gets ``error`` after what it has not read."""
        self._error = error
        self._wake()

    async def get(self) -> list[OutputDelta]:
        """Wait for deltas: one for each choice that has news, the request's last one at the end."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._reader = self.loop.create_future()
            await self._reader
        unread, self._unread = self._unread, {}
        merged = [merge_deltas(held) if len(held) > 1 else held[0] for held in unread.values()]
        return sorted(merged, key=lambda delta: delta.last) if len(merged) > 1 else merged

    @property
    def _is_awaited(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
