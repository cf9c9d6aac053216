"""The front end's process: HTTP, limits, templates, tokenizing and detokenizing, in front of an engine elsewhere."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.core.errors import OctavoError
from octavo.engine.loader import load_tokenizer, seed_source
from octavo.serve.app import create_app
from octavo.serve.http import HttpServer, run_loop, uvicorn_config
from octavo.serve.links.messages import (
    Beat,
    Drain,
    EngineFacts,
    EngineGone,
    EngineUp,
    FromEngine,
    Link,
    Ready,
    ToEngine,
)
from octavo.serve.roles.child import Child
from octavo.serve.roles.remote import RemoteEngine
from octavo.serve.roles.sockets import LoopSocket, connected

__all__ = ["run_api"]

_log = logging.getLogger(__name__)


def run_api(child: Child) -> int:
    """Serve until told to end."""
    return int(run_loop(_FrontEnd(child).run()))


class _FrontEnd:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.link: Link[ToEngine, FromEngine] = Link(FromEngine)
        self.engine: RemoteEngine | None = None
        self.server: HttpServer | None = None
        self._known: asyncio.Future[EngineFacts] | None = None
        self._beginning: asyncio.Task[Any] | None = None  # until clients are let in
        self._up: EngineUp | None = None  # the engine that serves
        self._wire: LoopSocket | None = None  # to it

    async def run(self) -> int:
        """Wait for an engine, then serve until told to end."""
        self._known = asyncio.get_running_loop().create_future()
        self._beginning = asyncio.current_task()
        control = LoopSocket(self.child.control, partial(_or_die, self._told))
        control.send(self.child.link.pack(Beat(), self.child.epoch))
        beats = asyncio.ensure_future(self._beat())
        try:
            return 0 if await self._serve(await self._known, control) else 1
        except asyncio.CancelledError:
            return 0  # told to end before anybody was let in
        finally:
            beats.cancel()
            self._hang_up()
            control.detach()

    async def _serve(self, facts: EngineFacts, control: LoopSocket) -> bool:
        """Serve HTTP to the end; False if it could not be begun, which the log explains."""
        settings = self.child.settings
        draw_seed = seed_source(settings.engine.seed)
        tokenizer = load_tokenizer(facts.source)
        patience = settings.server.step_timeout
        self.engine = RemoteEngine(
            facts, tokenizer, settings.seat, send=self._say, draw_seed=draw_seed, patience=patience
        )
        app = create_app(self.engine, settings.server, policy=settings.engine.policy)
        self.server = HttpServer(uvicorn_config(app, settings.server))
        gc.collect()
        gc.freeze()
        self._meet_engine()
        while not self.engine.side.stats:  # limits and metrics rest on them
            await asyncio.sleep(0.005)
        self._beginning = None
        task = asyncio.ensure_future(self.server.serve(sockets=[socket.socket(fileno=settings.listener)]))
        while not self.server.started and not task.done():
            await asyncio.sleep(0.005)
        started = self.server.started
        if started:
            control.send(self.child.link.pack(Ready(), self.child.epoch))
        await task
        return started

    async def _beat(self) -> None:
        """Signs of life of this event loop: to the engine, and to the thread that passes them on."""
        while True:
            self.child.progress = time.monotonic()
            self._say(Beat())
            await asyncio.sleep(self.child.settings.beat)

    # -- the supervisor speaks

    def _told(self, frames: Sequence[bytes]) -> None:
        found = self.child.link.unpack(frames, self.child.epoch)
        message = None if found is None else found[1]
        if isinstance(message, EngineUp):
            self._engine_up(message)
        elif isinstance(message, EngineGone):
            self._engine_gone()
        elif isinstance(message, Drain) and self._beginning is not None:
            self._beginning.cancel()
        elif isinstance(message, Drain) and self.server is not None:
            self.server.stop()

    def _engine_up(self, up: EngineUp) -> None:
        if self.engine is not None and up.facts != self.engine.facts:
            raise OctavoError("the model has changed under a running server: nothing can go on with it")
        self._hang_up()
        self._up = up
        if self._known is not None and not self._known.done():
            self._known.set_result(up.facts)
        self._meet_engine()

    def _meet_engine(self) -> None:
        """Connect to the engine that serves, and have it go on with what is open."""
        if self._up is None or self.engine is None:
            return
        child = self.child
        wire = connected(child.context, child.folder, self._up.address, child.epoch)
        self._wire = LoopSocket(wire, partial(_or_die, self._hear))
        self.engine.engine_up(self._up.epoch)
        if self.engine.side.num_resumed and not self._up.facts.exact:
            _log.warning("requests go on in another engine: with this backend their tokens may differ in near ties")

    def _engine_gone(self) -> None:
        self._up = None
        self._hang_up()
        if self.engine is not None:
            self.engine.engine_down()

    # -- the engine speaks, and is spoken to

    def _hear(self, frames: Sequence[bytes]) -> None:
        found = self.link.unpack(frames, self.child.epoch)
        if found is not None and self.engine is not None:
            self.engine.hear(*found)

    def _say(self, message: ToEngine) -> None:
        if self._wire is not None and self._up is not None:
            self._wire.send(self.link.pack(message, self.child.epoch, self._up.epoch))

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _or_die(hear: Callable[[Sequence[bytes]], None], frames: Sequence[bytes]) -> None:
    """Take a message in. Who cannot, does not know any more what it has missed: another front end begins anew."""
    try:
        hear(frames)
    except Exception:
        _log.exception("a message could not be taken in: this front end ends")
        logging.shutdown()
        os._exit(1)
