"""Everything in one process: first the engine, then HTTP; and down again in the opposite order."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.serve.app import create_app
from octavo.serve.config import ServeConfig
from octavo.serve.http import HttpServer, run_loop, uvicorn_config
from octavo.serve.notify import READY, STOPPING, notify
from octavo.serve.signals import ending_signals

__all__ = ["serve_single"]


def serve_single(
    engine_config: EngineConfig, config: ServeConfig, listener: socket.socket, url: str, say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``InvalidInput`` for a model that cannot run."""
    run_loop(_serve(engine_config, config, listener, url, say))


async def _serve(
    engine_config: EngineConfig, config: ServeConfig, listener: socket.socket, url: str, say: Callable[[str], None]
) -> None:
    stop = _Stop()
    engine = await _loaded(engine_config, say, stop)
    if engine is None:
        return
    try:
        server = HttpServer(uvicorn_config(create_app(engine, config, policy=engine_config.policy), config))
        stop.then(server.stop)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started and not server.should_exit:
            say(f"Octavo serves {config.served_model_name or engine.model_name} at {url} (Ctrl-C stops it)")
            notify(READY)
        await task
    finally:
        await _cut_what_is_open()
        await asyncio.to_thread(engine.shutdown)
    say("stopped")


async def _cut_what_is_open() -> None:
    """After a second signal there are requests that nobody has ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    """The signals that end a server, heard from the beginning, whatever is going on."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._action: Callable[[], None] | None = None
        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._hear)

    def then(self, action: Callable[[], None]) -> None:
        """What a signal does from now on."""
        self._action = action
        if self.asked.is_set():
            action()

    def _hear(self) -> None:
        self.asked.set()
        notify(STOPPING)
        if self._action is not None:
            self._action()
