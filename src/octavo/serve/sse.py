"""Streams, whose work is cancelled as soon as their client has left or stops reading."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from octavo.serve.dialects import NOTHING, Dialect
from octavo.serve.errors import ApiError
from octavo.serve.interrupt import Interrupt, while_there

__all__ = ["EventStream"]

_CHECK_EVERY = 1.0  # seconds between looks at a client that does not read
_log = logging.getLogger(__name__)


class _Unread(Exception):
    """The client does not read."""


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
        self._clock: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client leaves."""
        scope[NOTHING] = self._dialect.nothing
        interrupt = Interrupt()
        self._look(interrupt)
        try:
            await while_there(scope, receive, partial(self._send_all, send), interrupt)
        except (ClientDisconnect, _Unread):
            return
        except Exception:
            _log.exception("a stream ended with an error")
        finally:
            if self._clock is not None:
                self._clock.cancel()
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
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    def _look(self, interrupt: Interrupt) -> None:
        """Look from time to time whether the client has left its stream unread for too long."""
        since = self._sending_since
        if since is not None and time.monotonic() - since > self._stall_timeout:
            _log.warning("a client left its stream unread for %g s: cancelled", self._stall_timeout)
            interrupt(_Unread())
            return
        loop = asyncio.get_running_loop()
        self._clock = loop.call_later(min(_CHECK_EVERY, self._stall_timeout), self._look, interrupt)
