"""The engine's process: messages in, a step, messages out. Nothing in here waits for anybody.

Cyclic garbage is collected between steps only, and what was there when the model was loaded never again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import msgspec
import zmq

from octavo.core.request import Request
from octavo.engine.live import snapshot
from octavo.engine.loader import LoadedEngine, load_engine
from octavo.engine.stats import engine_stats
from octavo.serve.links.engine_side import EngineSide, request_of
from octavo.serve.links.messages import (
    ApiHello,
    Drain,
    EngineFacts,
    Explain,
    Flush,
    FromEngine,
    Gone,
    Left,
    Link,
    LoadAdapter,
    Look,
    ProtocolError,
    Read,
    Seen,
    Shed,
    Stats,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from octavo.serve.roles.adapters import AdapterLoader
from octavo.serve.roles.child import Child
from octavo.serve.roles.explainer import Explainer
from octavo.serve.roles.held import HeldSubmits
from octavo.serve.roles.sockets import epoch_of, identity_of, receive, send

__all__ = ["run_engine"]

_NAP_MS = 1  # between steps that found nothing to run (a prefix is waited for)
_STATS_EVERY = 0.25  # seconds
_COLLECT_AFTER = 256  # requests that have ended since
_COLLECT_AT_REST = 16
_REST_FOR_GRAMMARS = 1.0  # seconds without a step, after which what the first grammar needs is read
_EXACT = ("native", "reference", "null")  # backends whose tokens are the same wherever they are drawn


def run_engine(child: Child) -> int:
    """Load the model, say so, and run until told to end. Raises ``InvalidInput`` for what cannot be loaded."""
    loaded = load_engine(child.settings.engine, say=child.say)
    gc.collect()
    gc.freeze()
    gc.disable()
    process = _EngineProcess(child, loaded)
    child.patience = child.settings.server.step_timeout
    child.ready(_facts(loaded), process.address)
    process.run()
    return 0


def _facts(loaded: LoadedEngine) -> EngineFacts:
    parts = loaded.parts
    return EngineFacts(
        name=parts.name,
        source=loaded.source,
        max_seq_len=loaded.max_seq_len,
        vocab_size=parts.config.vocab_size,
        eos_ids=tuple(parts.config.eos_token_ids),
        numerics_id=parts.numerics_id,
        exact=parts.backend.name in _EXACT,
        traits=parts.tokenizer.traits,
        num_words=parts.tokenizer.vocab_size,
        model_bytes=loaded.source_bytes,
        hidden_size=parts.config.hidden_size,
        pooling=parts.pooling.kind,
        normalize=parts.pooling.normalize,
    )


class _EngineProcess:
    def __init__(self, child: Child, loaded: LoadedEngine) -> None:
        self.child, self.loaded, self.core = child, loaded, loaded.core
        self.side = EngineSide(loaded.core, self._make, self._note, apart=child.settings.is_full)
        self.link: Link[FromEngine, ToEngine] = Link(ToEngine)
        self._loader = AdapterLoader(loaded.core)
        self._explainer = Explainer(loaded.core.scheduler.timeline)
        self.router, self.address = child.place.bound(child.context, f"engine-{child.epoch}")
        self._poller = zmq.Poller()
        self._poller.register(self.router, zmq.POLLIN)
        self._poller.register(child.control, zmq.POLLIN)
        self._draining = False
        self._held = HeldSubmits(loaded.core)
        self._watchers: dict[int, None] = {}  # front ends that have asked what goes on
        self._worked = time.monotonic()  # when there was a step last
        self._told = 0.0  # when statistics were last sent
        self._fresh = True  # and nothing has happened since
        self._looked = time.monotonic()  # when the silent were last looked for
        self._objects = 0  # that were alive when garbage was last collected
        self._collected = 0  # requests that had ended when garbage was last collected

    def run(self) -> None:
        """Until it is told to end."""
        try:
            while not self._draining:
                self._turn()
        finally:
            self.core.close()
            self.router.close()

    def _turn(self) -> None:
        self.child.progress = time.monotonic()
        if not self.core.has_work:
            self._rest()
        self._listen()
        now = time.monotonic()
        if self.core.has_work:
            self._step(now)
        self._look_around(now)
        self._send()
        if self._watchers:
            self._show()

    def _rest(self) -> None:
        """Nothing to do: say so, tidy up, then wait for a message."""
        if not self._fresh:
            self._tell_stats(time.monotonic())
            self._send()
        self._collect(after=_COLLECT_AT_REST)
        if time.monotonic() - self._worked > _REST_FOR_GRAMMARS:
            self._held.get_ready()
        soon = self._explainer.pending or self._loader.pending or self._held
        self._poller.poll(_NAP_MS if soon else round(1000 * self.child.settings.beat))

    def _step(self, now: float) -> None:
        core = self.core
        events = core.step(now)
        begun = core.clock()
        self.side.take(events)
        self._fresh, self._worked = False, now
        if now - self._told > _STATS_EVERY:
            self._tell_stats(now)
        self._send()
        core.delivered(begun)
        self._collect(after=_COLLECT_AFTER)
        if core.idle and not events:
            self._poller.poll(_NAP_MS)

    def _collect(self, after: int) -> None:
        """Collect cyclic garbage (a request and its choices are such), if so many requests have ended."""
        if self.side.num_ended - self._collected >= after:
            self._collected = self.side.num_ended
            gc.collect()
            self._objects = len(gc.get_objects())

    def _listen(self) -> None:
        """Take in all messages that are there."""
        now = time.monotonic()
        for held in self._held.ready():
            self._hear(held, now)
        while (frames := receive(self.router)) is not None:
            self._hear(frames, now)
        while (frames := receive(self.child.control)) is not None:
            found = self.child.link.unpack(frames, self.child.epoch)
            message = None if found is None else found[1]
            if isinstance(message, Gone):
                self._held.gone(message.epoch)
                self.side.gone(message.epoch)
            self._draining = self._draining or isinstance(message, Drain)

    def _hear(self, frames: Sequence[bytes], now: float) -> None:
        sender = epoch_of(frames[0])
        try:
            found = self.link.unpack(frames[1:], self.child.epoch)
        except ProtocolError as error:
            self.child.say(f"a front end was cut off: {error}")
            self.side.gone(sender)
            self.side.outbox.append((sender, Left(sender)))
            return
        if found is not None and found[0] == sender and isinstance(found[1], Explain):
            self._explainer.ask(sender, found[1])
        elif found is not None and found[0] == sender and isinstance(found[1], Look):
            self._watchers[sender] = None
        elif found is not None and found[0] == sender and self._held.takes(sender, found[1], frames, now):
            return  # it comes back, or never
        elif found is not None and found[0] == sender and isinstance(found[1], Flush):
            self.core.flush_cache()
        elif found is not None and found[0] == sender and isinstance(found[1], (LoadAdapter, UnloadAdapter)):
            self._loader.ask(sender, found[1])
        elif found is not None and found[0] == sender:
            if isinstance(found[1], ApiHello):
                self.side.outbox.append((sender, self._loader.told()))
            self._fresh = self._fresh and not isinstance(found[1], ApiHello)
            if self.side.hear(sender, found[1], now):
                self.side.pass_on(list(frames[1:]))

    def _look_around(self, now: float) -> None:
        away = now - self._looked
        if away > self.child.settings.beat:
            self._looked = now
            if away > self.child.settings.silence / 3:
                self.side.overslept(now)
            self.side.end_silent(now, self.child.settings.silence)

    def _tell_stats(self, now: float) -> None:
        self._told, self._fresh = now, True
        values = {**engine_stats(self.core), **self.core.metrics.totals(), "live_objects/engine": self._objects}
        stats = Stats({name: float(value) for name, value in values.items()})
        self.side.outbox += [(epoch, stats) for epoch in self.side.peers]

    def _show(self) -> None:
        """Answer those who watch, when a step's tokens are out."""
        seen = Seen(msgspec.json.encode(snapshot(self.core, self.core.clock())))
        self.side.outbox += [(epoch, seen) for epoch in self._watchers if epoch in self.side.peers]
        self._watchers.clear()
        self._send()

    def _send(self) -> None:
        self.side.outbox += self._explainer.answers()
        self.side.outbox += self._loader.answers(self.side.peers)
        for epoch, frames in self.side.parcels(self.child.epoch):
            try:
                send(self.router, [identity_of(epoch), *frames])
            except zmq.ZMQError:  # it has left
                self.side.gone(epoch)

    def _make(self, message: Submit, now: float) -> Request:
        parts = self.loaded.parts
        namespace = parts.namespace(message.salt, message.adapter)
        self.core.compile(message.params)  # it is compiled by now; raises what is wrong with it
        came = self._held.since.pop(message.request_id, now)
        if came < now:
            self.core.scheduler.timeline.record("compiled", now, request=message.request_id, seconds=now - came)
        return request_of(
            message, came, model=parts.name, namespace=namespace, eos_token_ids=parts.config.eos_token_ids
        )

    def _note(self, message: Read | Shed, now: float) -> None:
        timeline = self.core.scheduler.timeline
        if isinstance(message, Read):
            timeline.record("read", now, request=message.request_id)
            return
        told = {"request": message.request_id, "reason": message.reason, "status": message.status}
        timeline.record("refuse", now, **told, retry_after=message.retry_after)
