"""One HTTP connection with bounded headers (in bytes, in number and in time) and a bounded patience with its reader.

Bodies are bounded in `body.py`.

A client that has closed its end may be gone or may still read: both look alike until something is sent to it. So it is
sent what means nothing (an interim answer, a comment in a stream), and whoever is gone refuses that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.serve.config import ServeConfig
from octavo.serve.dialects import NOTHING
from octavo.serve.errors import ApiError
from octavo.serve.interrupt import LINE, Line
from octavo.serve.tcp import files_left, has_left, watch_peer

__all__ = ["BoundedConnection"]

_HEADER_BYTES = 32 << 10
_HEADER_COUNT = 64
_SPARE = 32  # connections, and files, beyond the limit: those who are told so
_LOOK_EVERY = 0.05  # seconds between looks at who has closed its end
_log = logging.getLogger(__name__)
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection; refuses a head that is too large or too slow before it is whole.

    It is cut when nothing of an answer has been read for `stall_timeout` seconds: closing alone would wait for the
    reader for ever.
    """

    limits = ServeConfig()

    @classmethod
    def with_limits(cls, limits: ServeConfig) -> type[BoundedConnection]:
        """This class with the limits of a server."""
        return type(cls.__name__, (cls,), {"limits": limits})

    def connection_made(self, transport: Any) -> None:
        """The client has connected: its first request's head is due."""
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        watch_peer(self._socket, self.limits.peer_timeout)
        self._half_closed: asyncio.TimerHandle | None = None
        self._line = Line(self._write_piece)
        self._head_bytes = 0
        self._in_head = True
        self._clock: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._arm()
        self._find_room()

    def _find_room(self) -> None:
        """One too many is told so when it asks, and cut where there is no room even for that."""
        left = min(self.limits.max_connections - len(self.server_state.connections), files_left(self._socket) - _SPARE)
        if left < -_SPARE:
            self.transport.abort()
        elif left < 0:
            self.app = _full

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._disarm()
        self._unwatch()
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(exc)
        self._line.lost()

    def eof_received(self) -> Any:
        """The client sends no more: if it has a whole request open, it may still read. True: keep our end open."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._in_head:
            return False
        if cycle.scope["http_version"] != "1.1" or has_left(self._socket) is None:
            return False  # it can be told nothing, or the system does not say who left
        cycle.keep_alive = False
        self._ask_whether_there()
        self._look_whether_there()
        return True

    def _ask_whether_there(self) -> None:
        """Send what means nothing."""
        scope: Any = self.cycle.scope
        nothing = scope.get(NOTHING, b"")
        if self.pipeline:
            return  # the answer to an earlier request is on its way, and tells as much
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif nothing and self.cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(nothing), nothing))

    def _look_whether_there(self) -> None:
        if has_left(self._socket):
            self.transport.abort()
        else:
            self._half_closed = self.loop.call_later(_LOOK_EVERY, self._look_whether_there)

    def _write_piece(self, piece: bytes) -> bool:
        """Go on with the body of the last request's answer, if it has begun, is in chunks and is being read."""
        cycle = self.cycle
        if cycle is None or self.flow.write_paused or self.transport.is_closing():
            return False
        if cycle.response_complete or not cycle.response_started or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def pause_writing(self) -> None:
        """The reader is slow: look later whether it reads at all."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The reader reads."""
        self._unwatch()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer is written, if not read."""
        super().on_response_complete()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Count what arrives while a head is incomplete."""
        if self._in_head:
            self._arm()
            self._head_bytes += len(data)
        super().data_received(data)
        # what a body brings along in the same packet is no header: only an unfinished head is judged
        if self._in_head and self._head_bytes > _HEADER_BYTES:
            self._refuse(431, f"The header is larger than {_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[LINE] = self._line  # type: ignore[literal-required]
        self._unwatch()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._disarm()
        self._in_head, self._head_bytes = False, 0
        size = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > _HEADER_COUNT or size > _HEADER_BYTES:
            self._refuse(431, f"The header has more than {_HEADER_COUNT} lines or {_HEADER_BYTES} bytes.")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body; nobody waits for that of a refused request."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        if not self.transport.is_closing():
            super().on_message_complete()
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP."""
        self._refuse(400, "These bytes are no HTTP request.")

    def _arm(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.limits.header_timeout, self._late)

    def _disarm(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _watch(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._unread is None and unread:
            self._unread = self.loop.call_later(self.limits.stall_timeout, self._look_again, unread)

    def _unwatch(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look_again(self, before: int) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() >= before:
            _log.warning("a client left its answer unread for %g s: cut", self.limits.stall_timeout)
            self.transport.abort()
        else:
            self._watch()

    def _late(self) -> None:
        self._refuse(408, f"The header was not complete after {self.limits.header_timeout:g} s.")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = ApiError(status, message).response().body
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + bytes(body))
        self.transport.close()


async def _full(scope: Any, receive: Any, send: Any) -> None:
    """The application of a connection for which there is no place."""
    headers = {"Connection": "close", "Retry-After": "1"}
    message = "The server has as many connections as it can; try again later."
    refusal = ApiError(503, message, code="too_many_connections", headers=headers)
    await refusal.response()(scope, receive, send)
