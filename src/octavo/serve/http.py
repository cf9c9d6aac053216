"""The HTTP server: its limits, and how it is told to stop."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.serve.config import ServeConfig
from octavo.serve.connection import BoundedConnection
from octavo.serve.tcp import raise_file_limit

__all__ = ["HttpServer", "run_loop", "uvicorn_config"]

BACKLOG = 1024  # connections that wait to be accepted
_CLOSE = (b"connection", b"close")
_OTHER_FILES = 256  # than connections
_LAST_WORDS = 1.0  # seconds in which what is cut may say so


def run_loop(main: Any) -> Any:
    """Run a coroutine, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class HttpServer(uvicorn.Server):
    """uvicorn's server, told to stop by whoever hears the signals: a clean end is no death by signal."""

    _leaving: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """Answer who is inside, refuse who comes, then stop; asked again, stop at once."""
        front = getattr(getattr(self.config.app, "state", None), "front", None)
        if front is not None and self.started and self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave(front))
            return
        self.force_exit = self._leaving is not None
        self.should_exit = True

    async def _leave(self, front: Any) -> None:
        front.leave()
        self.config.encoded_headers.append(_CLOSE)  # of every answer from now on
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        await self._quiet(front.config.shutdown_timeout)
        front.cut()
        await self._quiet(_LAST_WORDS)
        self.should_exit = True

    async def _quiet(self, seconds: float) -> None:
        """Wait until nothing is open and all is sent, so long at most."""
        state, loop = self.server_state, asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and (
            state.tasks or any(each.transport.get_write_buffer_size() for each in state.connections)
        ):
            await asyncio.sleep(0.02)

    def capture_signals(self) -> Any:
        """Signals are heard elsewhere."""
        return nullcontext()


def uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    """Limits of connections."""
    raise_file_limit(config.max_connections + _OTHER_FILES)
    return uvicorn.Config(
        app,
        http=BoundedConnection.with_limits(config),
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks for a client's address
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,  # `HttpServer.stop` has waited
    )
