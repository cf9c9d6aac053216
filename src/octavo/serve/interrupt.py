"""Ending what a task waits for with an error of ours: a deadline, a client that has left, a cancel by another request.

No task is made for it: the one that waits is cancelled, and what comes out of the wait is the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

__all__ = ["LINE", "Interrupt", "Line", "while_there", "within"]

LINE = "octavo.line"  # where the scope of a request has its `Line`
_Result = TypeVar("_Result")


class Line:
    """What a connection tells of itself to the request that it is answered on."""

    def __init__(self, write: Callable[[bytes], bool] = lambda piece: False) -> None:
        self.write = write  # a piece of a streamed body, as far as it has come; False: not now, or not so
        self.is_lost = False
        self.on_lost: Callable[[], object] | None = None

    def lost(self) -> None:
        """The client has left."""
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()


class Interrupt:
    """Call it with an error: whoever waits through `wait` gets it, now or at the next wait. The first error counts.

    It is one task that waits, again and again.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._waits = False

    def __call__(self, error: Exception) -> None:
        """End the wait."""
        if self.error is None:
            self.error = error
            if self._waits and self._task is not None:
                self._task.cancel()

    async def wait(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """The result of the work, which is begun here. Raises the error."""
        if self.error is not None:
            raise self.error
        if self._task is None:
            self._task = asyncio.current_task()
        self._waits = True
        try:
            return await work()
        except asyncio.CancelledError:
            if self.error is None:
                raise
            if self._task is not None and hasattr(self._task, "uncancel"):
                self._task.uncancel()
            raise self.error from None
        finally:
            self._waits = False


async def within(seconds: float, work: Callable[[], Awaitable[_Result]], late: Exception) -> _Result:
    """The result of the work. Raises `late` if it takes longer."""
    interrupt = Interrupt()
    timer = asyncio.get_running_loop().call_later(seconds, interrupt, late)
    try:
        return await interrupt.wait(work)
    finally:
        timer.cancel()


async def while_there(
    scope: Scope, receive: Receive, work: Callable[[], Awaitable[_Result]], interrupt: Interrupt | None = None
) -> _Result:
    """The result of the work, which ends as soon as the client has left. Raises ``ClientDisconnect`` then.

    Our own connections say so themselves; under another server somebody listens for it.
    """
    interrupt = interrupt or Interrupt()
    line: Line | None = scope.get(LINE)
    if line is None:
        return await _listening(receive, work, interrupt)
    if line.is_lost:
        raise ClientDisconnect
    line.on_lost = on_lost = partial(interrupt, ClientDisconnect())
    try:
        return await interrupt.wait(work)
    finally:
        if line.on_lost is on_lost:  # the next request's may be there already
            line.on_lost = None


async def _listening(receive: Receive, work: Callable[[], Awaitable[_Result]], interrupt: Interrupt) -> _Result:
    listener = asyncio.ensure_future(_disconnected(receive))
    listener.add_done_callback(lambda heard: None if heard.cancelled() else interrupt(ClientDisconnect()))
    try:
        return await interrupt.wait(work)
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
