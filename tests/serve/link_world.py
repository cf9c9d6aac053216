"""A server in one thread: supervisor, engine and front ends with their real protocol, over links that a seed delays.

Every message is packed and unpacked as on a socket. A process may be killed at any event; what it had sent may arrive
long after its death. The engine is the real scheduler over the null model, so a lost, repeated or foreign token shows.
"""

from __future__ import annotations

import argparse
import base64
import random
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from null_model import NullModel, null_state, null_stream, prefix_hashes

from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.params import POOLINGS, SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig
from octavo.decoding.output import OutputProcessor
from octavo.engine.output import OutputDelta, OutputRouter
from octavo.serve.config import ServeConfig
from octavo.serve.links.api_side import MAX_DEATHS, ApiSide
from octavo.serve.links.asker import Answered, Ask, Asker, answered
from octavo.serve.links.engine_side import EngineSide, request_of
from octavo.serve.links.messages import (
    ApiHello,
    Beat,
    Drain,
    EngineFacts,
    FromEngine,
    FromText,
    Gone,
    Join,
    Link,
    Ready,
    Route,
    ToChild,
    ToEngine,
    ToSupervisor,
    Up,
)
from octavo.serve.links.supervision import DETOKENIZER, ENGINE, End, Kill, Rules, Start, Supervision, Tell
from octavo.serve.links.supervision import TOKENIZER as TOKENIZER_SEAT
from octavo.serve.links.text_side import TextSide
from octavo.serve.links.told import ToldText, feed
from octavo.serve.text_work import EncodeText, Work, do
from octavo.tokenizers.simple import SimpleTokenizer

VOCAB, EOS, CONTEXT = 97, 5, 64
FACTS = EngineFacts("null", "", CONTEXT, VOCAB, (EOS,), "null", True)
RULES = Rules(
    silence=40.0,
    first_word=40.0,
    first_pause=1.0,
    longest_pause=8.0,
    settled=50.0,
    most_false_starts=10**6,
    drain=400.0,
)
# tokens are bytes: letters and digits, and parts of characters of two, three and four bytes
BYTES = [*range(0x41, 0x5B), *range(0x61, 0x7B), *range(0x30, 0x3A), 0xC3, 0xE2, 0xF0, *range(0x80, 0xA0)]
TOKENIZER = SimpleTokenizer([f"<0x{byte:02X}>" for byte in BYTES], kind="bytes")
TO_ENGINE: Link[Any, Any] = Link(ToEngine)
FROM_ENGINE: Link[Any, Any] = Link(FromEngine)
TO_TOKENIZER: Link[Any, Any] = Link(Ask)
FROM_TOKENIZER: Link[Any, Any] = Link(Answered)
FROM_TEXT: Link[Any, Any] = Link(FromText)
TO_CHILD: Link[Any, Any] = Link(ToChild)
TO_SUPERVISOR: Link[Any, Any] = Link(ToSupervisor)


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Stream:
    """What one client was told, and what it should have been told."""

    name: str
    params: SamplingParams
    expected: list[list[int]]
    reasons: list[str]
    stop_after: int | None  # tokens after which the text layer finds a stop string
    texts: list[str]  # of the choices, where they are made in a process of their own
    tokens: list[list[int]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    done: bool = False
    left: bool = False  # its client, or its front end, is gone
    deaths: int = 0  # of engines, while it was open
    state: bytes = b""  # what it asks for, if that is one
    poison: bool = False  # whatever engine runs it, dies
    only_poison_fails: bool = False

    def take(self, event: TokenEvent) -> None:
        """One event, in its place."""
        if self.done or self.left:
            raise Broken(f"{self.name}: {event.kind} after its end")
        told = self.tokens[event.choice]
        if event.kind is EventKind.TOKEN:
            if self.ends[event.choice] is not None or event.index != len(told):
                raise Broken(f"{self.name}/{event.choice}: token {event.index} after {len(told)}")
            if event.token_id != self.expected[event.choice][len(told)]:
                raise Broken(f"{self.name}/{event.choice}: token {event.index} is another one")
            told.append(event.token_id)
        elif event.kind is EventKind.CHOICE_END:
            self._end_choice(event, told)
        else:
            self.done = True
            if None in self.ends:
                raise Broken(f"{self.name} ended before its choices")

    def take_delta(self, delta: OutputDelta) -> None:
        """What one step added to a choice, with its text: never more than is decided, and never half of it."""
        if self.done or self.left:
            raise Broken(f"{self.name}: {delta} after its end")
        told, index = self.tokens[delta.choice], delta.choice
        told += delta.token_ids
        self.shown[index] += delta.text
        if told != self.expected[index][: len(told)] or (self.ends[index] is not None and delta.token_ids):
            raise Broken(f"{self.name}/{index}: {told} instead of {self.expected[index]}")
        if not self.texts[index].startswith(self.shown[index]):
            raise Broken(f"{self.name}/{index}: {self.shown[index]!r} instead of {self.texts[index]!r}")
        if delta.finish_reason is not None:
            event = TokenEvent("", EventKind.CHOICE_END, index, finish_reason=delta.finish_reason, error=delta.error)
            event.hidden = base64.b64encode(delta.hidden).decode()
            self._end_choice(event, told)
            if delta.error is None and self.shown[index] != self.texts[index]:
                raise Broken(f"{self.name}/{index}: {self.shown[index]!r} instead of {self.texts[index]!r}")
        if delta.last:
            self.done = True
            if None in self.ends:
                raise Broken(f"{self.name} ended before its choices")

    def _end_choice(self, event: TokenEvent, told: list[int]) -> None:
        if self.ends[event.choice] is not None:
            raise Broken(f"{self.name}/{event.choice} ended twice")
        self.ends[event.choice] = event.finish_reason
        if event.error is not None:
            if self.deaths < MAX_DEATHS or (self.only_poison_fails and not self.poison):
                raise Broken(f"{self.name} failed: {event.error}")
        elif (event.finish_reason, told) != (self.reasons[event.choice], self.expected[event.choice]):
            raise Broken(f"{self.name}/{event.choice}: {event.finish_reason} after {told}")
        elif base64.b64decode(event.hidden) != self.state:
            raise Broken(f"{self.name} has another state")


class Process:
    """One life of one process. ``inbox``: (link, frames) that have arrived."""

    def __init__(self, world: World, seat: str, epoch: int) -> None:
        self.world, self.seat, self.epoch = world, seat, epoch
        self.beat = 0.0
        self.ready_at = world.now + world.random.uniform(0, 6)
        self.is_ready = self.stopped = False
        self.tell(Beat())

    def tell(self, message: Any) -> None:
        """To the supervisor."""
        self.world.send(self.epoch, 0, "child", TO_SUPERVISOR.pack(message, self.epoch))

    def turn(self) -> None:
        """Do a little."""
        if self.stopped:
            return
        if self.world.now - self.beat > 5.0:
            self.beat = self.world.now
            self.tell(Beat())
        if not self.is_ready and self.world.now >= self.ready_at:
            self.is_ready = True
            self.tell(Ready(FACTS if self.seat == "engine" else None, f"{self.seat}-{self.epoch}"))
        self.work()

    def work(self) -> None:
        """What its role does."""

    def hear(self, way: str, frames: list[bytes]) -> None:
        """A message has arrived."""


class Engine(Process):
    """The scheduler over the null model."""

    def __init__(self, world: World, seat: str, epoch: int) -> None:
        super().__init__(world, seat, epoch)
        self.kv = KVCacheManager(40, 4, (KVGroup((0,)),))
        config = SchedulerConfig(
            max_seq_len=CONTEXT, max_running_requests=4, max_batched_tokens=12, max_prefill_chunk=8
        )
        self.scheduler = ContinuousBatchScheduler(self.kv, config, vocab_size=VOCAB)
        self.model = NullModel(self.kv, VOCAB)
        self.side = EngineSide(
            self, lambda m, now: request_of(m, now, model="", namespace="", eos_token_ids=(EOS,)), apart=world.is_full
        )

    def submit(self, request: Request, now: float) -> None:
        if any(name.split("~")[0] == request.request_id.split("~")[0] for name in self.side._runs):
            raise Broken(f"{request.request_id} runs beside itself")
        self.scheduler.submit(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.scheduler.cancel(request_id, reason)

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: int | str | None) -> None:
        self.scheduler.stop(request_id, choice, num_output_tokens, stop_reason)

    def hear(self, way: str, frames: list[bytes]) -> None:
        if way == "supervisor":
            found = TO_CHILD.unpack(frames, self.epoch)
            if found is not None and isinstance(found[1], Gone):
                self.side.gone(found[1].epoch)
            if found is not None and isinstance(found[1], Drain):
                self.world.die(self, 0)
            return
        found = TO_ENGINE.unpack(frames, self.epoch)
        if found is not None and self.side.hear(found[0], found[1], self.world.now):
            self.side.pass_on(frames)

    def work(self) -> None:
        if not self.is_ready:
            return
        self.side.end_silent(self.world.now, RULES.silence)
        if self.scheduler.has_work and self.world.random.random() < 0.8:
            decision = self.scheduler.plan(self.world.now)
            if any(row.request_id in self.world.poison for row in decision.rows):
                self.world.die(self, -11)
                return
            if decision.rows:
                events = self.scheduler.commit(self.model(decision), self.world.now)
            else:
                events = self.scheduler.drain_events()
            self.scheduler.audit()
            self.side.take(events)
        for epoch, frames in self.side.parcels(self.epoch):
            for _ in range(2 if self.world.random.random() < self.world.twice else 1):
                self.world.send(self.epoch, epoch, "engine", frames)


class Detokenizer(Process):
    """Text between engine and front ends."""

    def __init__(self, world: World, seat: str, epoch: int) -> None:
        super().__init__(world, seat, epoch)
        self.side = TextSide(epoch, TOKENIZER, (EOS,))
        self.engine = 0

    def hear(self, way: str, frames: list[bytes]) -> None:
        if way == "engine":
            self.side.hear(frames)
            return
        if way == "api":
            found = TO_ENGINE.unpack(frames, self.epoch)
            if found is not None and isinstance(found[1], ApiHello):
                self.side.greeted(found[0])
            return
        found = TO_CHILD.unpack(frames, self.epoch)
        message = None if found is None else found[1]
        if isinstance(message, Up):
            self.side.engine_up(message.epoch)
            self.engine = message.epoch
            self.world.send(self.epoch, self.engine, "detokenizer", TO_ENGINE.pack(Join(), self.epoch, self.engine))
        elif isinstance(message, Gone):
            self.side.engine_down()
        elif isinstance(message, Drain):
            self.world.die(self, 0)

    def work(self) -> None:
        outbox, self.side.outbox = self.side.outbox, []
        for front, frames in outbox:
            for _ in range(2 if self.world.random.random() < self.world.twice else 1):
                self.world.send(self.epoch, front, "text", frames)


class Tokenizer(Process):
    """Ids for front ends."""

    tokenizer, max_seq_len, vocab_size = TOKENIZER, CONTEXT, VOCAB

    def __init__(self, world: World, seat: str, epoch: int) -> None:
        super().__init__(world, seat, epoch)
        self.asked: list[tuple[int, Ask]] = []

    def hear(self, way: str, frames: list[bytes]) -> None:
        if way == "api":
            found = TO_TOKENIZER.unpack(frames, self.epoch)
            self.asked += [] if found is None else [found]
            return
        found = TO_CHILD.unpack(frames, self.epoch)
        if found is not None and isinstance(found[1], Drain):
            self.world.die(self, 0)

    def work(self) -> None:
        if self.asked and self.is_ready and self.world.random.random() < 0.5:
            front, ask = self.asked.pop(0)
            done = do(msgspec.msgpack.decode(ask.work, type=Work), self, ServeConfig())
            frames = FROM_TOKENIZER.pack(answered(ask.number, done), self.epoch, front)
            for _ in range(2 if self.world.random.random() < self.world.twice else 1):
                self.world.send(self.epoch, front, "tokenizer", frames)


class Api(Process):
    """A front end with clients of its own."""

    def __init__(self, world: World, seat: str, epoch: int) -> None:
        super().__init__(world, seat, epoch)
        self.side = ApiSide(seat)
        self.router = OutputRouter(self.side, TOKENIZER, ToldText)
        self.up: dict[str, int] = {}  # epochs of who serves, by seat
        self.asker = Asker()
        self.reading: dict[int, Stream] = {}  # whose prompts tokenizers have, by task
        self.route = self.met = (0, 0)
        self.streams: dict[str, Stream] = {}
        self.draining = False

    def ask(self, stream: Stream, prompt: tuple[int, ...]) -> None:
        self.streams[stream.name] = stream
        if self.world.is_full:
            self.reading[self.asker.ask(EncodeText(list(prompt)))] = stream
        else:
            self.submit(stream, prompt)

    def submit(self, stream: Stream, prompt: tuple[int, ...]) -> None:
        request = Request(stream.name, prompt, stream.params, arrival=self.world.now, eos_token_ids=(EOS,))
        self.side.submit(request, "", self.world.now)
        if self.world.is_full:
            self.router.open(request)

    def leave(self, stream: Stream) -> None:
        stream.left = True
        self.router.close(stream.name)
        self.side.cancel(stream.name)
        for number in [number for number, reading in self.reading.items() if reading is stream]:
            self.asker.drop(number)

    def hear(self, way: str, frames: list[bytes]) -> None:
        if way == "supervisor":
            found = TO_CHILD.unpack(frames, self.epoch)
            self._told(None if found is None else found[1])
            return
        if way == "tokenizer":
            found = FROM_TOKENIZER.unpack(frames, self.epoch)
            self._read(() if found is None else self.asker.hear(*found))
            return
        found = (FROM_TEXT if way == "text" else FROM_ENGINE).unpack(frames[:2], self.epoch)
        if found is not None and isinstance(found[1], Route):
            self.route = (found[0], found[1].engine)
            self._meet()
        elif found is not None:
            if len(frames) == 3 and found[0] == self.side.engine:
                feed(self.side, self.router, found[1], frames[2])
            self._deliver(self.side.hear(found[0], found[1], self.world.now))
        if self.side.refusals:
            raise Broken(f"{self.side.refusals} though all can be served")

    def _told(self, message: Any) -> None:
        if isinstance(message, Up):
            self.up[message.seat] = message.epoch
            if message.seat == DETOKENIZER:
                hello = TO_ENGINE.pack(ApiHello(self.seat), self.epoch, message.epoch)
                self.world.send(self.epoch, message.epoch, "api", hello)
            elif message.seat != ENGINE:
                self.asker.up(message.epoch)
            self._meet()
        elif isinstance(message, Gone) and message.seat.startswith(TOKENIZER_SEAT):
            self._read(self.asker.gone(message.epoch))
        elif isinstance(message, Gone) and self.up.get(message.seat) == message.epoch:
            del self.up[message.seat]
            self.met = (0, 0)
            for stream in self.streams.values():
                stream.deaths += not stream.done
            self._deliver(self.side.engine_down())
        elif isinstance(message, Drain):
            self.draining = True

    def _read(self, answers: Any) -> None:
        """Prompts have been read."""
        for number, result in answers:
            stream = self.reading.pop(number)
            if isinstance(result, Exception):
                stream.left = True
                if self.world.num_kills < 3:
                    raise Broken(f"{stream.name}: {result}")
            elif not stream.left:
                self.submit(stream, result[0].token_ids)

    def _meet(self) -> None:
        pair = (self.up.get(DETOKENIZER, 0), self.up.get(ENGINE, 0))
        if pair[1] and pair != self.met and (self.route == pair or not self.world.is_full):
            self.met = pair
            self._deliver(self.side.engine_up(pair[1], self.world.now))

    def _deliver(self, events: Any) -> None:
        while events and self.world.is_full:
            for delta in self.router.take(events):
                self.streams[delta.request_id].take_delta(delta)
            events = self.side.take()
        while events:
            columns = list(events) if isinstance(events, StepEvents) else events
            for event in columns:
                stream = self.streams[event.request_id]
                late = stream.stop_after is not None and len(stream.tokens[event.choice]) >= stream.stop_after
                if late and event.kind is EventKind.TOKEN:
                    continue  # came with the message in which the stop string was found
                stream.take(event)
                if event.kind is EventKind.TOKEN and len(stream.tokens[event.choice]) == stream.stop_after:
                    self.side.stop(stream.name, event.choice, stream.stop_after, "END")
            events = self.side.take()

    def work(self) -> None:
        if self.world.now == self.beat and ENGINE in self.up:
            target = self.up[ENGINE]
            self.world.send(self.epoch, target, "api", TO_ENGINE.pack(Beat(), self.epoch, target))
        tasks, self.asker.outbox = self.asker.outbox, []
        for epoch, task in tasks:
            self.world.send(self.epoch, epoch, "api", TO_TOKENIZER.pack(task, self.epoch, epoch))
        outbox, self.side.outbox = self.side.outbox, []
        for message in outbox:
            target = self.side.engine
            self.world.send(self.epoch, target, "api", TO_ENGINE.pack(message, self.epoch, target))
        if self.draining and not (self.side.num_open or self.asker.num_open):
            self.world.die(self, 0)


class World:
    """Links, clock and deaths. ``play`` runs everything and raises ``Broken``."""

    def __init__(
        self,
        seed: int,
        *,
        kills: int = 6,
        requests: int = 14,
        apis: int = 2,
        twice: float = 0.1,
        poison: float = 0.0,
        full: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.twice = twice  # how often a message of the engine comes twice
        self.is_full = full
        self.plan = Supervision(apis=apis, rules=RULES, detokenizers=int(full), tokenizers=2 * full)
        self.processes: dict[int, Process] = {}  # by epoch
        self.streams: list[Stream] = []
        self.ended: End | None = None
        self.num_resumed = self.num_kills = 0
        self._links: dict[tuple[int, int, str], list[tuple[float, list[bytes]]]] = {}
        self._exits: list[tuple[float, int, int]] = []
        self.poison: set[str] = set()  # requests that kill whatever engine runs them
        self._kills, self._requests, self._poison = kills, requests, poison

    # -- processes and links

    def send(self, sender: int, target: int, way: str, frames: list[bytes]) -> None:
        """Put a message on its way, from one life to another (0: the supervisor); those of one link stay in order."""
        delay = self.random.choice((0.0, 0.0, 0.5, 3.0))
        self._links.setdefault((sender, target, way), []).append((self.now + delay, frames))

    def die(self, process: Process, code: int) -> None:
        """A process ends; its supervisor is told soon."""
        if self.processes.pop(process.epoch, None) is not None:
            self._exits.append((self.now + self.random.uniform(0, 2), process.epoch, code))
            self.num_resumed += process.side.num_resumed if isinstance(process, Api) else 0

    def _act(self) -> None:
        while self.plan.actions:
            action = self.plan.actions.pop(0)
            if isinstance(action, Start):
                kind = {ENGINE: Engine, DETOKENIZER: Detokenizer, TOKENIZER_SEAT: Tokenizer}.get(
                    action.seat.split("-")[0], Api
                )
                self.processes[action.epoch] = kind(self, action.seat, action.epoch)
            elif isinstance(action, Kill) and action.epoch in self.processes:
                self._kill(self.processes[action.epoch])
            elif isinstance(action, Tell):
                self.send(0, action.epoch, "supervisor", TO_CHILD.pack(action.message, 0, action.epoch))
            elif isinstance(action, End):
                self.ended = action

    def _kill(self, process: Process) -> None:
        """kill -9: what it has sent stays on its way."""
        self.num_kills += 1
        if isinstance(process, Api):
            for stream in process.streams.values():
                stream.left = True
        self.die(process, -9)

    def _arrive(self) -> None:
        for (sender, target, way), queue in list(self._links.items()):
            while queue and queue[0][0] <= self.now:
                receiver = self.processes.get(target)
                if receiver is not None and receiver.stopped:
                    break
                _, frames = queue.pop(0)
                if target == 0:
                    found = TO_SUPERVISOR.unpack(frames, 0)
                    if found is not None:
                        self.plan.heard(sender, found[1], self.now)
                        self._act()
                elif receiver is not None:
                    receiver.hear(way, frames)

    # -- what happens

    def _arrival(self, api: Api) -> None:
        name, n = f"r{len(self.streams)}", self.random.choice((1, 1, 2))
        seed, limit = self.random.getrandbits(64), self.random.randrange(0, 40)
        prompt = tuple(self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 20)))
        stop = ("a", "À", "99") if self.is_full and self.random.random() < 0.4 else ()
        params = SamplingParams(max_tokens=limit, n=n, seed=seed, stop=stop)
        pooled = n == 1 and limit % 8 == 0
        if pooled:
            params = SamplingParams(max_tokens=0, seed=seed, pooling=POOLINGS[limit // 8 % len(POOLINGS)])
        stop_after = None if self.is_full else self.random.choice((None, None, 7))
        expected, reasons, texts = [], [], []
        for choice in range(n):
            tokens, reason = _whole(prompt, params, choice)
            if stop_after is not None and len(tokens) > stop_after:
                tokens, reason = tokens[:stop_after], "stop"
            text, kept = _text(prompt, params, tokens)
            expected.append(tokens[:kept])
            reasons.append(reason if kept is None and not pooled else "stop")
            texts.append(text)
        stream = Stream(name, params, expected, reasons, stop_after, texts)
        stream.tokens, stream.shown, stream.ends = [[] for _ in range(n)], [""] * n, [None] * n
        stream.state = null_state(prefix_hashes(prompt)[-1]) if pooled else b""
        stream.poison, stream.only_poison_fails = self.random.random() < self._poison, bool(self._poison)
        self.poison |= {name} if stream.poison else set()
        self.streams.append(stream)
        api.ask(stream, prompt)

    def _misfortune(self) -> None:
        """Something that may happen to a process, or to a client."""
        victims = sorted(self.processes.values(), key=lambda process: isinstance(process, Api))
        if self._kills and victims and self.random.random() < 0.04:
            self._kills -= 1
            victim = self.random.choice(victims[: 1 + 3 * self.is_full] if self.random.random() < 0.5 else victims)
            if self.random.random() < 0.3:
                victim.stopped = True  # and perhaps it goes on, before or after it is given up
            else:
                self._kill(victim)
        for process in victims:
            if process.stopped and self.random.random() < 0.03:
                process.stopped = False
        open_streams = [stream for stream in self.streams if not (stream.done or stream.left)]
        if open_streams and self._kills and self.random.random() < 0.005:
            stream = self.random.choice(open_streams)
            for process in self.processes.values():
                if isinstance(process, Api) and not process.stopped and stream.name in process.streams:
                    process.leave(stream)

    def _tick(self) -> None:
        self.now += 0.25
        self.plan.tick(self.now)
        self._act()
        self._arrive()
        for due in [item for item in self._exits if item[0] <= self.now]:
            self._exits.remove(due)
            self.plan.exited(due[1], due[2], self.now)
            self._act()
        for process in list(self.processes.values()):
            process.turn()

    def play(self) -> World:
        """Requests and misfortunes; then peace, until all is done; then a drain, which ends it."""
        while len(self.streams) < self._requests or self._kills or not self._is_done():
            self._tick()
            serving = [p for p in self.processes.values() if isinstance(p, Api) and p.is_ready and p.side.engine]
            if serving and len(self.streams) < self._requests and self.random.random() < 0.1:
                self._arrival(self.random.choice(serving))
            self._misfortune()
            self._check_time(4000.0)
        self._check_idle()
        self.plan.drain(self.now)
        while self.ended is None:
            self._tick()
            self._check_time(5000.0)
        if self.ended.code or self.processes:
            raise Broken(f"it ended with {self.ended.code}, and {len(self.processes)} processes are left")
        return self

    def _is_done(self) -> bool:
        engines = [p for p in self.processes.values() if isinstance(p, Engine) and p.is_ready and not p.stopped]
        quiet = bool(engines) and not engines[0].scheduler.has_work and not engines[0].side.num_runs
        quiet = quiet and not any(p.side.num_choices for p in self.processes.values() if isinstance(p, Detokenizer))
        return quiet and all(stream.done or stream.left for stream in self.streams)

    def _check_time(self, limit: float) -> None:
        if self.now > limit:
            raise Broken("no end of it: " + str([s.name for s in self.streams if not (s.done or s.left)]))

    def _check_idle(self) -> None:
        for process in self.processes.values():
            if isinstance(process, Engine):
                process.scheduler.audit()
                if process.kv.usage().pages.referenced:
                    raise Broken("pages are held at idle")
            elif isinstance(process, Api) and (process.side.num_open or process.asker.num_open):
                raise Broken("a front end holds what has ended")


def _whole(prompt: tuple[int, ...], params: SamplingParams, choice: int) -> tuple[list[int], str]:
    """All tokens of a choice, and why it ends."""
    limit = min(params.max_tokens or 0, CONTEXT - len(prompt))
    tokens: list[int] = []
    for token, _ in islice(null_stream(prompt, params.seed or 0, choice, VOCAB), limit):
        tokens.append(token)
        if token == EOS:
            return tokens, "stop"
    return tokens, "length"


def _fold(prompt: tuple[int, ...], params: SamplingParams) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, params, prompt_tail_ids=prompt[-8:], eos_ids=(EOS,))


def _text(prompt: tuple[int, ...], params: SamplingParams, tokens: list[int]) -> tuple[str, int | None]:
    """The text of a choice, and after how many of its tokens a stop string ends it, if one does."""
    fold, text = _fold(prompt, params), ""
    for token in tokens:
        delta = fold.push(token)
        text += delta.text
        if delta.truncate_at is not None:
            return text, delta.truncate_at
    rest = fold.finish()
    return text + rest.text, rest.truncate_at


def main() -> None:
    """Play worlds: python -m link_world --seeds 500 --from 1 (make dst-links)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--from", type=int, default=1, dest="first")
    given = parser.parse_args()
    deaths = resumed = 0
    for seed in range(given.first, given.first + given.seeds):
        try:
            world = World(seed).play()
            World(seed, kills=0, requests=10, apis=1, poison=0.3).play()
            whole = World(seed, kills=12, full=True).play()
        except Exception as error:
            raise SystemExit(f"seed {seed}: {error!r}") from error
        deaths += world.num_kills + whole.num_kills
        resumed += world.num_resumed + whole.num_resumed
    print(f"{given.seeds} seeds: {deaths} processes killed, {resumed} requests resumed, every stream as undisturbed")


if __name__ == "__main__":
    main()
