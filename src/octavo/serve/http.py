"""The HTTP server: its limits, and how it is told to stop."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.serve.config import ServeConfig
from octavo.serve.connection import BoundedConnection

__all__ = ["HttpServer", "run_loop", "uvicorn_config"]

BACKLOG = 1024  # connections that wait to be accepted


def run_loop(main: Any) -> Any:
    """Run a coroutine, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class HttpServer(uvicorn.Server):
    """uvicorn's server, told to stop by whoever hears the signals: a clean end is no death by signal."""

    def stop(self) -> None:
        """Stop; asked again, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        front = getattr(getattr(self.config.app, "state", None), "front", None)
        if front is not None:
            front.end_watching()

    def capture_signals(self) -> Any:
        """Signals are heard elsewhere."""
        return nullcontext()


def uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    """Limits of connections."""
    return uvicorn.Config(
        app,
        http=BoundedConnection.with_stall_timeout(config.stall_timeout),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
    )
