"""Answers that watch their client: streams, and whole answers that stop when nobody waits for them.

Whatever happens, the work behind an answer is cancelled as soon as its client has left or stops reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from octavo.serve.dialects import NOTHING, Dialect
from octavo.serve.errors import ApiError

__all__ = ["EventStream", "until_disconnect"]

_Result = TypeVar("_Result")
_CHECK_EVERY = 1.0  # seconds between looks at a client that does not read
_log = logging.getLogger(__name__)


class EventStream:
    """An ASGI answer of frames, such as server-sent events, each a `bytes`.

    An error inside the stream is a frame in the dialect's shape. The dialect's end follows whatever ended it.
    """

    status_code = 200

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        stall_timeout: float,
        on_close: Callable[[], object],
        dialect: Dialect,
        on_sent: Callable[[], object] = lambda: None,
    ) -> None:
        self._events = events
        self._headers = headers
        self._stall_timeout = stall_timeout
        self._on_close = on_close
        self._dialect = dialect
        self._on_sent = on_sent
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client leaves."""
        scope[NOTHING] = self._dialect.nothing
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(self._client_gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sender)
            await _end(watcher)
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        lines = {"content-type": self._dialect.media_type, "cache-control": "no-cache", **self._headers}
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
        async with aclosing(self._events) as events:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for piece in events:
                    await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
                    self._on_sent()
            except ApiError as error:
                body = self._dialect.error_frame(error)
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
            except OSError:  # the connection broke under the write
                return
            await self._send(send, {"type": "http.response.body", "body": self._dialect.end, "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send(message)
        self._sending_since = None

    async def _client_gone(self, receive: Receive) -> None:
        """Return once the client has left, or has left its stream unread for too long."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not gone.done():
                await asyncio.wait({gone}, timeout=min(_CHECK_EVERY, self._stall_timeout))
                since = self._sending_since
                if since is not None and asyncio.get_running_loop().time() - since > self._stall_timeout:
                    _log.warning("a client left its stream unread for %g s: cancelled", self._stall_timeout)
                    return
        finally:
            await _end(gone)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, cancelled if the client leaves first. Raises ``ClientDisconnect`` then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _end(gone)
        await _end(task)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has cleaned up; log what it raised instead of losing it."""
    task.cancel()
    try:
        await asyncio.shield(asyncio.gather(task, return_exceptions=True))
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ApiError):
        _log.error("a stream ended with an error", exc_info=error)
