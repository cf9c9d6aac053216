"""The front end's process: HTTP, limits, templates, tokenizing and detokenizing, in front of an engine elsewhere."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.core.errors import OctavoError
from octavo.engine.loader import load_tokenizer, seed_source
from octavo.serve.app import create_app
from octavo.serve.http import HttpServer, run_loop, uvicorn_config
from octavo.serve.links.messages import (
    ApiHello,
    Beat,
    Drain,
    EngineFacts,
    FromEngine,
    FromText,
    Gone,
    Link,
    Ready,
    Route,
    Step,
    ToEngine,
    Up,
)
from octavo.serve.links.supervision import DETOKENIZER, ENGINE
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
        self.text_link: Link[ToEngine, FromText] = Link(FromText)
        self.engine: RemoteEngine | None = None
        self.server: HttpServer | None = None
        self._known: asyncio.Future[EngineFacts] | None = None
        self._beginning: asyncio.Task[Any] | None = None  # until clients are let in
        self._wires: dict[str, _Wire] = {}  # to who serves, by seat
        self._route: tuple[int, int] = (0, 0)  # epochs of a detokenizer and of the engine that it has joined
        self._met: tuple[int, int] = (0, 0)  # of the last ones that were asked to go on with what is open

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
            for seat in list(self._wires):
                self._hang_up(seat)
            control.detach()

    async def _serve(self, facts: EngineFacts, control: LoopSocket) -> bool:
        """Serve HTTP to the end; False if it could not be begun, which the log explains."""
        settings = self.child.settings
        draw_seed = seed_source(settings.engine.seed)
        tokenizer = load_tokenizer(facts.source)
        self.engine = RemoteEngine(
            facts,
            tokenizer,
            settings.seat,
            send=self._say,
            draw_seed=draw_seed,
            patience=settings.server.step_timeout,
            apart=settings.is_full,
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
            for seat in list(self._wires):
                self._say(Beat(), seat)
            await asyncio.sleep(self.child.settings.beat)

    # -- the supervisor speaks

    def _told(self, frames: Sequence[bytes]) -> None:
        found = self.child.link.unpack(frames, self.child.epoch)
        message = None if found is None else found[1]
        if isinstance(message, Up):
            self._up(message)
        elif isinstance(message, Gone):
            self._gone(message)
        elif isinstance(message, Drain) and self._beginning is not None:
            self._beginning.cancel()
        elif isinstance(message, Drain) and self.server is not None:
            self.server.stop()

    def _up(self, up: Up) -> None:
        """Somebody serves: connect."""
        if up.facts is not None and self.engine is not None and up.facts != self.engine.facts:
            raise OctavoError("the model has changed under a running server: nothing can go on with it")
        self._hang_up(up.seat)
        child = self.child
        socket = connected(child.context, child.folder, up.address, child.epoch)
        hear = self._hear if up.facts is not None else self._hear_text
        self._wires[up.seat] = _Wire(up.epoch, LoopSocket(socket, partial(_or_die, hear)))
        if up.facts is None:
            self._say(ApiHello(child.settings.seat), up.seat)
        elif self._known is not None and not self._known.done():
            self._known.set_result(up.facts)
        self._meet_engine()

    def _gone(self, gone: Gone) -> None:
        wire = self._wires.get(gone.seat)
        if wire is None or wire.epoch != gone.epoch:
            return
        self._hang_up(gone.seat)
        self._met = (0, 0)
        if self.engine is not None:
            self.engine.engine_down()

    def _meet_engine(self) -> None:
        """Have the engine that serves go on with what is open, once what it draws can come here."""
        wire, back = self._wires.get(ENGINE), self._wires.get(DETOKENIZER)
        if wire is None or self.engine is None:
            return
        if self.child.settings.is_full and (back is None or self._route != (back.epoch, wire.epoch)):
            return
        pair = (0 if back is None else back.epoch, wire.epoch)
        if pair == self._met:
            return
        self._met = pair
        self.engine.engine_up(wire.epoch)
        if self.engine.side.num_resumed and not self.engine.facts.exact:
            _log.warning("requests go on in another engine: with this backend their tokens may differ in near ties")

    # -- the engine speaks, and is spoken to

    def _hear(self, frames: Sequence[bytes]) -> None:
        found = self.link.unpack(frames, self.child.epoch)
        if found is not None and self.engine is not None:
            self.engine.hear(*found)

    def _hear_text(self, frames: Sequence[bytes]) -> None:
        """The detokenizer has joined an engine, or passes on a step with its text."""
        found = self.text_link.unpack(frames[:2], self.child.epoch)
        if found is not None and isinstance(found[1], Route):
            self._route = (found[0], found[1].engine)
            self._meet_engine()
        elif found is not None and isinstance(found[1], Step) and self.engine is not None and len(frames) == 3:
            self.engine.hear(found[0], found[1], frames[2])

    def _say(self, message: ToEngine, seat: str = ENGINE) -> None:
        wire = self._wires.get(seat)
        if wire is not None:
            wire.socket.send(self.link.pack(message, self.child.epoch, wire.epoch))

    def _hang_up(self, seat: str) -> None:
        wire = self._wires.pop(seat, None)
        if wire is not None:
            wire.socket.close()


@dataclass(frozen=True)
class _Wire:
    epoch: int  # of who is at its other end
    socket: LoopSocket


def _or_die(hear: Callable[[Sequence[bytes]], None], frames: Sequence[bytes]) -> None:
    """Take a message in. Who cannot, does not know any more what it has missed: another front end begins anew."""
    try:
        hear(frames)
    except Exception:
        _log.exception("a message could not be taken in: this front end ends")
        logging.shutdown()
        os._exit(1)
