"""The engine as its front end sees it: `octavo.serve.port.EnginePort` over a link, and over the deaths of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidInput
from octavo.core.events import TokenEvent
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.decoding.output import OutputProcessor
from octavo.engine.adapters import ServedAdapter, check_name, check_path
from octavo.engine.mailbox import Mailbox
from octavo.engine.output import OutputDelta, OutputRouter
from octavo.models.pooling import Pooling
from octavo.serve.links.api_side import ApiSide
from octavo.serve.links.messages import (
    AdapterDone,
    EngineFacts,
    Explain,
    Explained,
    Flush,
    FromEngine,
    LoadAdapter,
    Look,
    Orphaned,
    Seen,
    Shed,
    Step,
    ToEngine,
    UnloadAdapter,
)
from octavo.serve.links.told import ToldText, feed

__all__ = ["RemoteEngine"]

_EXPLAIN_WITHIN = 30.0  # seconds


class RemoteEngine:
    """An engine in another process. All of it is used in one event loop, but `stats` and `health_problem`.

    ``send`` takes a message to the engine that `engine_up` named last. ``draw_seed`` gives the seed of a request
    without one: it is drawn here, so that whichever engine goes on with the request has it. An engine that has work
    and says nothing for ``patience`` seconds is stuck. ``apart``: the text is made in another process, and comes with
    the tokens.
    """

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Any,
        seat: str,
        *,
        send: Callable[[ToEngine], None],
        draw_seed: Callable[[], int],
        patience: float,
        apart: bool = False,
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.side = ApiSide(seat)
        self.clock = time.monotonic
        self._send, self._draw_seed, self._patience = send, draw_seed, patience
        self._router = OutputRouter(self.side, tokenizer, ToldText if apart else OutputProcessor)
        self._mailboxes: dict[str, Mailbox] = {}
        self._heard = self._awake = self.clock()
        self._asked: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}  # explanations, by number
        self._number = 0
        self._changes: dict[int, asyncio.Future[None]] = {}  # of adapters, by number
        self._named_of = self.side.adapters
        self._named: tuple[ServedAdapter, ...] = ()
        self._engines = 0  # that have served
        self.on_orphans: Callable[[Sequence[tuple[str, str]]], None] = lambda names: None  # (tenant, id) of each
        self._told: Mapping[str, float] | None = None  # what `_stats` was made of
        self._stats: dict[str, float] = {}
        self._looks: list[asyncio.Future[dict[str, Any] | None]] = []  # that wait for what the engine does

    @property
    def model_name(self) -> str:
        """Name that the model was asked for by."""
        return self.facts.name

    @property
    def model_bytes(self) -> int:
        """Bytes of the files that it was loaded from."""
        return self.facts.model_bytes

    @property
    def max_seq_len(self) -> int:
        """Prompt and output together."""
        return self.facts.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return self.facts.vocab_size

    @property
    def hidden_size(self) -> int:
        """Values of a pooled state."""
        return self.facts.hidden_size

    @property
    def pooling(self) -> Pooling:
        """How texts become vectors, unless a request says otherwise."""
        return Pooling(self.facts.pooling, self.facts.normalize)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        /,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        bulk: bool = False,
        adapter: str = "",
        express: Callable[[OutputDelta], bool] | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Deltas of all choices until each has finished. Closing the iterator cancels the request.

        Raises ``InvalidInput`` for what the engine refuses.
        """
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            tenant=tenant,
            priority=priority,
            bulk=bulk,
            adapter=adapter,
            arrival=self.clock(),
            eos_token_ids=self.facts.eos_ids,
        )
        if request.seed is None:
            request.seed = self._draw_seed()
        idle = not self.side.num_open
        self.side.submit(request, cache_salt, self.clock())
        if idle:
            self._heard = self.clock()  # an engine without work says nothing
        mailbox = self._mailboxes[request_id] = Mailbox(asyncio.get_running_loop(), express)
        self._router.open(request)
        self._flush()
        try:
            while True:
                for delta in await mailbox.get():
                    yield delta
                    if delta.last:
                        self.side.was_read(request_id)
                        return
        finally:
            self._forget(request_id)
            self.side.cancel(request_id)
            self._flush()

    # -- the engine, as the supervisor and the link tell of it

    def engine_up(self, epoch: int) -> None:
        """An engine serves: it goes on with what is open."""
        self._engines += 1
        self._show(None)
        self._deliver(self.side.engine_up(epoch, self.clock()))
        self._heard = self.clock()
        self._flush()

    def awake(self) -> None:
        """This loop goes round. If it has slept, what the engine said meanwhile is still to be heard."""
        now = self.clock()
        if now - self._awake > self._patience / 3:
            self._heard = now
        self._awake = now

    def engine_down(self) -> None:
        """The engine has died."""
        self._show(None)
        self._deliver(self.side.engine_down())
        for number in list(self._asked):
            self._explained(Explained(number, b"[]"))  # what it remembered is lost
        for number in list(self._changes):
            self._changed(AdapterDone(number, "engine", None, "it has died; look at what is served, and ask again"))

    def hear(self, sender: int, message: FromEngine, texts: bytes | None = None) -> None:
        """A message of an engine; a step, where the text is made apart, with its ``texts``."""
        self._heard = self.clock()
        if isinstance(message, Explained):
            self._explained(message)
            return
        if isinstance(message, AdapterDone):
            self._changed(message)
            return
        if isinstance(message, Orphaned):
            self.on_orphans(message.names)
            return
        if isinstance(message, Seen) and sender == self.side.engine:
            self._show(msgspec.json.decode(message.content))
        if texts is not None and isinstance(message, Step) and sender == self.side.engine:
            feed(self.side, self._router, message, texts)
        self._deliver(self.side.hear(sender, message, self._heard))
        for request_id, error in self.side.refusals:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.fail(error)
        self.side.refusals.clear()
        self._flush()

    # -- for HTTP

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters as the engine last told them; cheap, callable from any thread."""
        told = self.side.stats
        ended = told.get("last_step_ended", 0.0)
        if self._told is not told:  # they come four times a second, and every request asks several times
            self._told, self._stats = told, {name: told[name] for name in told if name != "last_step_ended"}
        self._stats["requests_resumed"] = self.side.num_resumed
        self._stats["engine_restarts"] = max(0, self._engines - 1)
        self._stats["last_step_age"] = self.clock() - ended if ended else 0.0
        return self._stats

    def flush_cache(self) -> None:
        """Forget what is cached and nobody uses."""
        if self.side.engine:
            self._send(Flush())

    def adapters(self) -> Sequence[ServedAdapter]:
        """The adapters that requests may name, by their digests."""
        if self._named_of is not self.side.adapters:
            self._named_of, self._named = self.side.adapters, tuple(ServedAdapter(*a) for a in self.side.adapters)
        return self._named

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in a folder of the engine's machine under a name. Raises ``InvalidInput``."""
        check_name(name)
        check_path(path)
        await self._change(lambda number: LoadAdapter(number, name, path))

    async def unload_adapter(self, name: str) -> None:
        """The name stands for nothing from now on; who has it goes on. Raises ``InvalidInput``."""
        check_name(name)
        await self._change(lambda number: UnloadAdapter(number, name))

    async def _change(self, message: Callable[[int], ToEngine]) -> None:
        self._number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes[self._number] = done
        self._send(message(self._number))
        await done

    def _changed(self, message: AdapterDone) -> None:
        done = self._changes.pop(message.number, None)
        if done is not None and not done.done() and message.field:
            done.set_exception(InvalidInput(message.field, message.value, message.remedy))
        elif done is not None and not done.done():
            done.set_result(None)

    def note_refusal(self, request_id: str, reason: str, status: int, retry_after: float) -> None:
        """A request was turned away at the door: for the timeline."""
        if self.side.engine:
            self._send(Shed(request_id, reason[:4000], status, retry_after))

    async def explain(self, request_id: str, tenant: str) -> list[dict[str, Any]]:
        """As `octavo.engine.explained` has it, of the events that the engine has in memory."""
        if not self.side.engine:
            return []
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(Explain(number, request_id, tenant))
            return list(await asyncio.wait_for(answer, _EXPLAIN_WITHIN))
        except asyncio.TimeoutError:
            return []
        finally:
            self._asked.pop(number, None)

    def _explained(self, message: Explained) -> None:
        answer = self._asked.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(msgspec.json.decode(message.content))

    async def look(self) -> dict[str, Any] | None:
        """What the engine does right now (`octavo.engine.live`), taken between two steps; None: there is none."""
        if not self.side.engine:
            return None
        seen: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._looks.append(seen)
        self._send(Look())
        return await seen

    def _show(self, seen: dict[str, Any] | None) -> None:
        looks, self._looks = self._looks, []
        for look in looks:
            if not look.done():
                look.set_result(seen)

    def health_problem(self) -> str | None:
        """None while there is an engine that makes progress; otherwise what is wrong."""
        if not self.side.engine:
            return "the engine has died, or what is between it and here, and is being started again"
        if self.side.num_open and self._awake - self._heard > self._patience:
            return f"the engine has said nothing for {self._patience:g} s"
        return None

    # -- inside

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Events to text to readers. A stop string found in it is an end of its own, which follows."""
        while events:
            for delta in self._router.take(events):
                mailbox = self._mailboxes.get(delta.request_id)
                if mailbox is not None:
                    mailbox.put(delta)
            events = self.side.take()

    def _flush(self) -> None:
        outbox, self.side.outbox = self.side.outbox, []
        for message in outbox:
            self._send(message)

    def _forget(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        self._router.close(request_id)
