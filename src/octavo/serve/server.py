"""The server process: port first, then the engine, then HTTP; and down again in the opposite order."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.core.errors import InvalidInput
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.serve.app import create_app
from octavo.serve.config import ServeConfig
from octavo.serve.connection import BoundedConnection

__all__ = ["serve"]

_BACKLOG = 1024


def serve(engine_config: EngineConfig, config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``InvalidInput`` for a port in use or a model that cannot run."""
    listener = _listen(config)
    try:
        _run(_serve(engine_config, config, listener, say))
    finally:
        listener.close()


def _run(main: Any) -> None:
    """Run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(
    engine_config: EngineConfig, config: ServeConfig, listener: socket.socket, say: Callable[[str], None]
) -> None:
    stop = _Stop()
    engine = await _loaded(engine_config, say, stop)
    if engine is None:
        return
    url = _url(listener)
    try:
        server = _Server(_uvicorn_config(create_app(engine, config, policy=engine_config.policy), config))
        stop.then(server.stop)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started and not server.should_exit:
            say(f"Octavo serves {config.served_model_name or engine.model_name} at {url} (Ctrl-C stops it)")
        await task
    finally:
        await asyncio.to_thread(engine.shutdown)
    say("stopped")


async def _loaded(config: EngineConfig, say: Callable[[str], None], stop: _Stop) -> AsyncEngine | None:
    """The engine; None if a signal came while it was loading."""
    result: asyncio.Future[AsyncEngine] = asyncio.get_running_loop().create_future()
    # a daemon, not a pool's thread: a signal must not wait for a download
    threading.Thread(target=_load, args=(config, say, result), name="octavo-load", daemon=True).start()
    stopping = asyncio.ensure_future(stop.asked.wait())
    either: list[asyncio.Future[Any]] = [result, stopping]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return await result if result.done() else None


def _load(config: EngineConfig, say: Callable[[str], None], result: asyncio.Future[AsyncEngine]) -> None:
    """In a thread: load, and hand over what came of it."""
    hand_over: Callable[[], None]
    try:
        engine = AsyncEngine.load(config, say=say)
    except BaseException as error:
        hand_over = partial(result.set_exception, error)
    else:
        hand_over = partial(result.set_result, engine)
    with suppress(RuntimeError):  # the loop is closed: a signal came first, and nobody waits
        result.get_loop().call_soon_threadsafe(hand_over)


class _Stop:
    """SIGINT and SIGTERM, heard from the beginning, whatever is going on."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._action: Callable[[], None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._hear)

    def then(self, action: Callable[[], None]) -> None:
        """What a signal does from now on."""
        self._action = action
        if self.asked.is_set():
            action()

    def _hear(self) -> None:
        self.asked.set()
        if self._action is not None:
            self._action()


class _Server(uvicorn.Server):
    """uvicorn's server, told to stop by `_Stop`: a clean end is no death by signal."""

    def stop(self) -> None:
        """Stop; asked again, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def capture_signals(self) -> Any:
        """Signals are `_Stop`'s."""
        return nullcontext()


def _uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedConnection.with_stall_timeout(config.stall_timeout),
        lifespan="on",
        log_level=config.log_level,
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
    )


def _listen(config: ServeConfig) -> socket.socket:
    """The listening socket, bound before anything is loaded, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"is no address of this machine ({error.strerror}); 127.0.0.1 is this machine alone, 0.0.0.0 all"
            raise InvalidInput("host", config.host, remedy) from error
        remedy = f"cannot be listened on at {config.host} ({error.strerror}); choose another, or stop what uses it"
        raise InvalidInput("port", config.port, remedy) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
