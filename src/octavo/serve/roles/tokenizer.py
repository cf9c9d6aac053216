"""A tokenizer's process: templates and token ids for the front ends, one task after the other, each by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from octavo.core.errors import OctavoError
from octavo.engine.vocabulary import EarlyTokenizer
from octavo.serve.errors import ApiError
from octavo.serve.front import internal_error
from octavo.serve.links.asker import Answered, Ask, answered
from octavo.serve.links.messages import Beat, Drain, EngineFacts, Link, ProtocolError, Up
from octavo.serve.roles.child import Child
from octavo.serve.roles.sockets import epoch_of, identity_of, receive, send
from octavo.serve.text_work import Work, do
from octavo.tokenizers.base import Tokenizer

__all__ = ["run_tokenizer"]

_WORK: msgspec.msgpack.Decoder[Work] = msgspec.msgpack.Decoder(Work)


def run_tokenizer(child: Child) -> int:
    """Serve until told to end."""
    _Tokenizer(child).run()
    return 0


@dataclass(frozen=True)
class _Model:
    tokenizer: Tokenizer
    max_seq_len: int
    vocab_size: int


class _Tokenizer:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.link: Link[Answered, Ask | Beat] = Link(Ask | Beat)
        self._facts: EngineFacts | None = None
        self._model: _Model | None = None
        self._draining = False

    def run(self) -> None:
        """Until it is told to end."""
        child = self.child
        child.tell(Beat())  # it can be told of an engine
        self._early = EarlyTokenizer(child.settings.engine)
        self.router, self.address = child.place.bound(child.context, f"{child.settings.seat}-{child.epoch}")
        poller = zmq.Poller()
        poller.register(child.control, zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        try:
            while not self._draining:
                child.progress = time.monotonic()
                poller.poll(round(1000 * child.settings.beat))
                while (frames := receive(child.control)) is not None:
                    self._told(frames)
                if (frames := receive(self.router)) is not None:
                    self._hear(epoch_of(frames[0]), frames[1:])
        finally:
            self.router.close()

    def _told(self, frames: Sequence[bytes]) -> None:
        found = self.child.link.unpack(frames, self.child.epoch)
        message = None if found is None else found[1]
        if isinstance(message, Up) and message.facts is not None:
            self._meet(message.facts)
        self._draining = self._draining or isinstance(message, Drain)

    def _meet(self, facts: EngineFacts) -> None:
        if self._facts is not None and facts != self._facts:
            raise OctavoError("the model has changed under a running server: nothing can go on with it")
        if self._facts is None:
            self._facts = facts
            self._begin(facts)

    def _begin(self, facts: EngineFacts) -> None:
        self._model = _Model(self._early.take(facts.source), facts.max_seq_len, facts.vocab_size)
        gc.collect()
        gc.freeze()
        self.child.ready(address=self.address)

    def _hear(self, front: int, frames: Sequence[bytes]) -> None:
        try:
            found = self.link.unpack(frames, self.child.epoch)
        except ProtocolError as error:
            self.child.say(f"a front end's task was not understood: {error}")
            return
        if found is None or found[0] != front or not isinstance(found[1], Ask):
            return
        answer = answered(found[1].number, self._done(found[1]))
        frames = [identity_of(front), *self.link.pack(answer, self.child.epoch, front)]
        with suppress(zmq.ZMQError):  # it has left
            send(self.router, frames)

    def _done(self, ask: Ask) -> Any:
        assert self._model is not None  # nobody knows of this process before
        try:
            return do(_WORK.decode(ask.work), self._model, self.child.settings.server)
        except ApiError as error:
            return error
        except Exception as error:
            self.child.say(f"a task failed: {type(error).__name__}")
            return internal_error()
