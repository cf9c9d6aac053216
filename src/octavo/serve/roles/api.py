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
from octavo.engine.vocabulary import EarlyTokenizer, seed_source
from octavo.serve.app import create_app
from octavo.serve.errors import ApiError
from octavo.serve.front import Front
from octavo.serve.http import HttpServer, run_loop, uvicorn_config
from octavo.serve.links.asker import Answered, Ask, Asker
from octavo.serve.links.messages import (
    Answer,
    ApiHello,
    Beat,
    Drain,
    EngineFacts,
    FromEngine,
    FromText,
    Gone,
    Left,
    Link,
    Orders,
    Ready,
    Replace,
    Route,
    Step,
    ToEngine,
    Up,
)
from octavo.serve.links.supervision import DETOKENIZER, ENGINE, TOKENIZER
from octavo.serve.links.told_words import ToldTokenizer
from octavo.serve.logs import level_name, set_level
from octavo.serve.register import Scrape
from octavo.serve.roles.child import Child
from octavo.serve.roles.gate import RemoteGate
from octavo.serve.roles.remote import RemoteEngine
from octavo.serve.roles.sockets import LoopSocket
from octavo.serve.sums import Values
from octavo.serve.text_work import Work

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
        self.task_link: Link[Ask, Answered] = Link(Answered)
        self.asker = Asker()
        self.gate: RemoteGate | None = None
        self.counted: Callable[[], Values] | None = None  # what others may have to tell of us
        self._tasks: dict[int, asyncio.Future[Any]] = {}  # that tokenizers have, by number
        self.engine: RemoteEngine | None = None
        self.server: HttpServer | None = None
        self._front: Front | None = None
        self._orders = Orders()
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
        settings = self.child.settings
        early = None if settings.is_full else EarlyTokenizer(settings.engine)
        try:
            return 0 if await self._serve(await self._known, early, control) else 1
        except asyncio.CancelledError:
            return 0  # told to end before anybody was let in
        finally:
            beats.cancel()
            for seat in list(self._wires):
                self._hang_up(seat)
            control.detach()

    async def _serve(self, facts: EngineFacts, early: EarlyTokenizer | None, control: LoopSocket) -> bool:
        """Serve HTTP to the end; False if it could not be begun, which the log explains."""
        settings = self.child.settings
        draw_seed = seed_source(settings.engine.seed)
        tokenizer = early.take(facts.source) if early else ToldTokenizer(facts.traits, facts.num_words)
        self.engine = RemoteEngine(
            facts,
            tokenizer,
            settings.seat,
            send=self._say,
            draw_seed=draw_seed,
            patience=settings.server.step_timeout,
            apart=settings.is_full,
        )
        self.gate = RemoteGate(lambda question: control.send(self.child.link.pack(question, self.child.epoch)))
        more: dict[str, Any] = {"elsewhere": self._work, "gate": self.gate} if settings.is_full else {}
        app = create_app(self.engine, settings.server, policy=settings.engine.policy, **more)
        self.engine.on_orphans = app.state.front.orphaned
        self._front = app.state.front
        self._front.on_orders = lambda: control.send(self.child.link.pack(self._given(), self.child.epoch))
        self._front.replace = lambda model: control.send(self.child.link.pack(Replace(model), self.child.epoch))
        self._obey()
        self.counted = app.state.front.metrics.values if settings.is_full else None
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
            if self.engine is not None:
                self.engine.awake()
            for seat in list(self._wires):
                self._say(Beat(), seat)
            if self.counted is not None and self.gate is not None:
                self.gate.tell(Scrape(self.counted()))  # so that little is lost with us
            await asyncio.sleep(self.child.settings.beat)

    # -- the supervisor speaks

    def _told(self, frames: Sequence[bytes]) -> None:
        found = self.child.link.unpack(frames, self.child.epoch)
        message = None if found is None else found[1]
        if isinstance(message, Up):
            self._up(message)
        elif isinstance(message, Orders):
            self._orders = message
            self._obey()
        elif isinstance(message, Gone):
            self._gone(message)
        elif isinstance(message, Answer) and self.gate is not None:
            self.gate.hear(message)
        elif isinstance(message, Drain) and self._beginning is not None:
            self._beginning.cancel()
        elif isinstance(message, Drain) and self.server is not None:
            self.server.stop()

    def _given(self) -> Orders:
        """What the operator has set here."""
        return Orders(self._front is not None and self._front.draining, level_name())

    def _obey(self) -> None:
        """Set what the operator had set before."""
        if self._orders.log_level:
            set_level(self._orders.log_level)
        if self._front is not None:
            self._front.draining, self._front.problem = self._orders.draining, self._orders.problem
            self._front.replacing = ""

    def _up(self, up: Up) -> None:
        """Somebody serves: connect."""
        if up.facts is not None and self.engine is not None and up.facts != self.engine.facts:
            raise OctavoError("the model has changed under a running server: nothing can go on with it")
        self._hang_up(up.seat)
        child = self.child
        socket = child.place.connected(child.context, up.address, child.epoch)
        by_role = {ENGINE: self._hear, DETOKENIZER: self._hear_text}
        hear = by_role.get(up.seat) or partial(self._hear_tokenizer, up.epoch)
        self._wires[up.seat] = _Wire(up.epoch, LoopSocket(socket, partial(_or_die, hear)))
        if up.seat == DETOKENIZER:
            self._say(ApiHello(child.settings.seat), up.seat)
        elif up.seat != ENGINE:
            self.asker.up(up.epoch)
            self._send_tasks()
        elif self._known is not None and not self._known.done() and up.facts is not None:
            self._known.set_result(up.facts)
        self._meet_engine()

    def _gone(self, gone: Gone) -> None:
        wire = self._wires.get(gone.seat)
        if wire is None or wire.epoch != gone.epoch:
            return
        self._hang_up(gone.seat)
        if gone.seat.startswith(TOKENIZER):
            self._answered(self.asker.gone(gone.epoch))
            return
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
        if found is not None and isinstance(found[1], Left):
            raise OctavoError("the engine hears us no more")
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

    # -- the tokenizers

    async def _work(self, work: Work) -> Any:
        """Have a tokenizer do it. Raises ``ApiError``."""
        number = self.asker.ask(work)
        self._tasks[number] = answer = asyncio.get_running_loop().create_future()
        self._send_tasks()
        try:
            return await answer
        finally:
            self._tasks.pop(number, None)
            self.asker.drop(number)

    def _hear_tokenizer(self, epoch: int, frames: Sequence[bytes]) -> None:
        found = self.task_link.unpack(frames, self.child.epoch)
        if found is not None:
            self._answered(self.asker.hear(epoch, found[1]))

    def _answered(self, answers: Sequence[tuple[int, Any]]) -> None:
        for number, result in answers:
            answer = self._tasks.get(number)
            if answer is None or answer.done():
                continue
            if isinstance(result, ApiError):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._send_tasks()

    def _send_tasks(self) -> None:
        wires = {wire.epoch: wire for wire in self._wires.values()}
        outbox, self.asker.outbox = self.asker.outbox, []
        for epoch, message in outbox:
            if epoch in wires:
                wires[epoch].socket.send(self.task_link.pack(message, self.child.epoch, epoch))

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
