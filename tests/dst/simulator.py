"""One thread, one heap of events, one seed: clients, links, clock, the engine process and its deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dst.client import Stream
from dst.draw import LINK_US, STEP_US
from dst.engine import EngineProcess
from dst.invariants import Broken, audit_flushed, audit_idle
from dst.scenario import Ask, Fault, Scenario, keyed
from octavo.core.events import TokenEvent

FULL_AUDIT_EVERY = 16
MOST_EVENTS = 40_000


class Simulator:
    """Plays one scenario to its end. Raises ``Broken``, or whatever the product raises."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0  # microseconds
        self.skew = 0  # seconds by which the engine's clock is wrong
        self.num_events = self.num_steps = self.num_kills = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._link_free: dict[tuple[int, str], int] = {}  # when the last message on a link arrives
        self._sent = 0
        self.streams: dict[str, Stream] = {}
        self.wants_snapshots = any(fault.kind == "kill" for fault in scenario.faults)
        self.watched: list[Ask] = []  # asks that are cancelled when they come to a state
        self.epoch = 1
        self.engine: EngineProcess = EngineProcess(self, 1)
        self.draining = False

    # -- time

    def seconds(self) -> float:
        """True time."""
        return self.now / 1e6

    def wall(self) -> float:
        """What the engine's clock shows."""
        return self.now / 1e6 + self.skew

    def step_time(self, engine: EngineProcess) -> int:
        """How long a step of the engine takes."""
        low, high = STEP_US
        return low + keyed(self.scenario.seed, 1, engine.epoch, engine.turns) % (high - low)

    def at(self, time: int, act: Callable[..., None], *values: Any) -> None:
        """Have something happen."""
        self._order += 1
        heappush(self._heap, (time, self._order, act, values))

    def pump(self, until: int) -> None:
        """All events up to a time."""
        while self._heap and self._heap[0][0] <= until and not self.engine.dead:
            self._next()
        self.now = max(self.now, until)

    # -- the run

    def play(self) -> Simulator:
        """Everything, and then the end of everything."""
        for item in self.scenario.script:
            self.at(item.time, self._begin, item)
        while self._heap:
            self._next()
            if not self.draining and self.num_events >= self.scenario.events:
                self._drain()
        self._check_end()
        return self

    def _next(self) -> None:
        time, _, act, values = heappop(self._heap)
        self.now = max(self.now, time)
        self.num_events += 1
        if self.num_events > MOST_EVENTS:
            raise Broken("I18", "no end of events")
        act(*values)
        self.engine.audit(full=self.num_events % FULL_AUDIT_EVERY == 0)

    def _drain(self) -> None:
        self.draining = True
        if self.scenario.cancel_at_end:
            for stream in self.streams.values():
                if not stream.done:
                    self._give_up(stream, "cancelled")

    def _begin(self, item: Ask | Fault) -> None:
        if self.draining:
            return
        if isinstance(item, Ask):
            self._ask(item)
        elif item.kind == "kill":
            self._kill(item.value)
        elif item.kind == "clock":
            self.skew += item.value
        else:
            self.engine.break_down(item)

    # -- clients

    def _ask(self, ask: Ask) -> None:
        stream = self.streams[ask.name] = Stream(ask, self.epoch)
        self._send_submit(stream)
        if ask.resend is not None:
            self.at(self.now + ask.resend, self._send_submit, stream)
        if ask.deadline is not None:
            self.at(self.now + ask.deadline, self._give_up, stream, "timeout")
        if ask.read_every:
            self.at(self.now + ask.read_every, self._read, stream)
        if ask.cancel is not None:
            self._plan_cancel(stream, *ask.cancel)

    def _plan_cancel(self, stream: Stream, when: str, value: int) -> None:
        if when == "after":
            self.at(self.now + value, self._give_up, stream, "cancelled")
        elif when == "unknown":
            self.engine.cancel(stream.ask.name)
        else:
            self.watched.append(stream.ask)

    def _read(self, stream: Stream) -> None:
        """A slow reader has read what there was."""
        stream.unread = 0
        if not (stream.done or stream.refused or stream.given_up):
            self.at(self.now + stream.ask.read_every, self._read, stream)

    def _give_up(self, stream: Stream, reason: str) -> None:
        if stream.done or stream.refused or stream.given_up:
            return
        stream.given_up = reason
        self._to_engine(stream, lambda engine: engine.cancel(stream.ask.name, reason))

    def _send_submit(self, stream: Stream) -> None:
        if not (stream.done or stream.refused):
            snapshot = stream.snapshot
            self._to_engine(stream, lambda engine: engine.submit(stream.ask, snapshot))

    # -- links: in order, each with delays of its own; a message dies with the engine it was sent to

    def _delay(self, client: int, way: str) -> int:
        self._sent += 1
        low, high = LINK_US
        slow = keyed(self.scenario.seed, 2, client) % 3 == 0
        time = self.now + (low + keyed(self.scenario.seed, 3, self._sent) % (high - low) if slow else 100)
        time = self._link_free[client, way] = max(time, self._link_free.get((client, way), 0))
        return time

    def _to_engine(self, stream: Stream, act: Callable[[EngineProcess], None]) -> None:
        epoch = stream.epoch

        def arrive() -> None:
            if epoch == self.engine.epoch and not self.engine.dead:
                act(self.engine)

        self.at(self._delay(stream.ask.client, "in"), arrive)

    def _to_client(self, engine: EngineProcess, stream: Stream, act: Callable[[], None]) -> None:
        def arrive() -> None:
            if stream.epoch == engine.epoch:  # else the dead speak
                act()

        self.at(self._delay(stream.ask.client, "out"), arrive)

    def send_refusal(self, engine: EngineProcess, ask: Ask) -> None:
        """The engine does not take a request."""
        stream = self.streams[ask.name]

        def refuse() -> None:
            stream.refused = True

        self._to_client(engine, stream, refuse)

    def send_snapshots(self, engine: EngineProcess, snapshots: list[dict[str, Any]]) -> None:
        """Snapshots travel behind the events that they contain."""
        for snapshot in snapshots:
            stream = self.streams[snapshot["request_id"]]

            def keep(stream: Stream = stream, snapshot: dict[str, Any] = snapshot) -> None:
                stream.snapshot = snapshot

            self._to_client(engine, stream, keep)

    def deliver(self, engine: EngineProcess, events: Sequence[TokenEvent]) -> None:
        """The events of a step, one message for each request."""
        by_request: dict[str, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for name, mine in by_request.items():
            stream = self.streams[name]
            self._to_client(engine, stream, lambda stream=stream, mine=mine: self._arrived(stream, mine))

    def _arrived(self, stream: Stream, events: list[TokenEvent]) -> None:
        for event in events:
            stream.take(event)
        for choice in stream.find_stops(5 if "read_every_5" in self.scenario.switches else 1):
            self._send_stop(stream, choice)
        if stream.ask.read_every and stream.unread > stream.ask.patience:
            self._give_up(stream, "cancelled")

    def _send_stop(self, stream: Stream, choice: int) -> None:
        left = (stream.ask.stop_after or 1) - 1  # the token that completes the stop string does not count
        self._to_engine(stream, lambda engine: engine.stop(stream.ask.name, choice, left))

    # -- kills

    def _kill(self, restart_after: int) -> None:
        if self.engine.dead:
            return
        self.engine.dead = True
        self.num_kills += 1
        self.num_steps += self.engine.turns
        self.at(self.now + restart_after, self._restart)

    def _restart(self) -> None:
        self.epoch += 1
        self.engine = EngineProcess(self, self.epoch)
        for stream in self.streams.values():
            if stream.done or stream.refused:
                continue
            if stream.given_up:
                stream.done = True
                continue
            stream.resume(self.epoch)
            self._send_submit(stream)

    # -- the end

    def _check_end(self) -> None:
        engine = self.engine
        self.num_steps += engine.turns
        if engine.dead:
            raise Broken("I18", "the engine is dead, and nobody restarts it")
        engine.audit(full=True)
        audit_idle(engine)
        audit_flushed(engine)
        for name, stream in self.streams.items():
            if not (stream.done or stream.refused):
                raise Broken("I8", f"{name} never ended: {stream.ends}")
