"""The detokenizer's process: steps of the engine in, the same steps with their text out. Nothing in here waits."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import zmq

from octavo.core.errors import OctavoError
from octavo.engine.vocabulary import EarlyTokenizer
from octavo.serve.links.messages import (
    ApiHello,
    Beat,
    Drain,
    EngineFacts,
    Gone,
    Join,
    Link,
    ProtocolError,
    ToEngine,
    Up,
)
from octavo.serve.links.supervision import DETOKENIZER
from octavo.serve.links.text_side import TextSide
from octavo.serve.roles.child import Child
from octavo.serve.roles.sockets import epoch_of, identity_of, receive, send

__all__ = ["run_detokenizer"]


def run_detokenizer(child: Child) -> int:
    """Serve until told to end."""
    process = _Detokenizer(child)
    try:
        process.run()
    finally:
        process.close()
    return 0


class _Detokenizer:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.side = TextSide(child.epoch)
        self.link: Link[ToEngine, ToEngine] = Link(ToEngine)
        self.router, self.address = child.place.bound(child.context, f"{DETOKENIZER}-{child.epoch}")
        self._poller = zmq.Poller()
        self._poller.register(child.control, zmq.POLLIN)
        self._poller.register(self.router, zmq.POLLIN)
        self._engine: zmq.Socket[bytes] | None = None
        self._facts: EngineFacts | None = None
        self._draining = False

    def run(self) -> None:
        """Until it is told to end."""
        self.child.tell(Beat())  # it can be told of an engine
        self._early = EarlyTokenizer(self.child.settings.engine)
        while not self._draining:
            self.child.progress = time.monotonic()
            self._poller.poll(round(1000 * self.child.settings.beat))
            while (frames := receive(self.child.control)) is not None:
                self._told(frames)
            while (frames := receive(self.router)) is not None:
                self._hear_front(epoch_of(frames[0]), frames[1:])
            while self._engine is not None and (frames := receive(self._engine)) is not None:
                self.side.hear(frames)
                self._send()
            self._send()

    def close(self) -> None:
        """Let go of all sockets."""
        self._hang_up()
        self.router.close()

    def _told(self, frames: Sequence[bytes]) -> None:
        found = self.child.link.unpack(frames, self.child.epoch)
        message = None if found is None else found[1]
        if isinstance(message, Up) and message.facts is not None:
            self._meet(message, message.facts)
        elif isinstance(message, Gone):
            self._hang_up()
        self._draining = self._draining or isinstance(message, Drain)

    def _meet(self, up: Up, facts: EngineFacts) -> None:
        """Ask an engine to send through here."""
        self._hang_up()
        begun, self._facts = self._facts is not None, self._facts or facts
        if facts != self._facts:
            raise OctavoError("the model has changed under a running server: nothing can go on with it")
        if not begun:
            self._begin(facts)
        self._engine = self.child.place.connected(self.child.context, up.address, self.child.epoch)
        self._poller.register(self._engine, zmq.POLLIN)
        self.side.engine_up(up.epoch)
        send(self._engine, self.link.pack(Join(), self.child.epoch, up.epoch))

    def _begin(self, facts: EngineFacts) -> None:
        self.side.tokenizer, self.side.eos_ids = self._early.take(facts.source), facts.eos_ids
        gc.collect()
        gc.freeze()
        self.child.ready(address=self.address)

    def _hang_up(self) -> None:
        self.side.engine_down()
        if self._engine is not None:
            self._poller.unregister(self._engine)
            self._engine.close(linger=0)
            self._engine = None

    def _hear_front(self, front: int, frames: Sequence[bytes]) -> None:
        try:
            found = self.link.unpack(frames, self.child.epoch)
        except ProtocolError as error:
            self.child.say(f"a front end was cut off: {error}")
            self.side.gone(front)
            return
        if found is not None and found[0] == front and isinstance(found[1], ApiHello):
            self.side.greeted(front)

    def _send(self) -> None:
        outbox, self.side.outbox = self.side.outbox, []
        for front, frames in outbox:
            try:
                send(self.router, [identity_of(front), *frames])
            except zmq.ZMQError:  # it has left
                self.side.gone(front)
