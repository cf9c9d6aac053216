"""AsyncEngine: one thread runs the step loop, any number of coroutines read their requests' text.

coroutine -> inbox (thread-safe) -> engine thread: drain, step, route -> delivery thread -> event loop -> mailbox

Waking an event loop gives it the interpreter: from the engine's thread, the next step would wait for what all readers
do with their tokens. The delivery thread wakes them while the model computes.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.core.errors import OctavoError
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.decoding.words import with_token_ids
from octavo.engine.adapters import ServedAdapter
from octavo.engine.config import EngineConfig
from octavo.engine.explained import explained
from octavo.engine.live import snapshot
from octavo.engine.loader import LoadedEngine, load_engine
from octavo.engine.loops import put_all, run_all, set_done, set_error, tell
from octavo.engine.mailbox import Mailbox
from octavo.engine.output import OutputDelta, OutputRouter
from octavo.engine.stats import engine_stats
from octavo.models.pooling import Pooling

__all__ = ["AsyncEngine", "EngineStopped"]

_IDLE_NAP = 0.001  # seconds between steps that found nothing to run (a prefix is waited for)
_STUCK_AFTER = 120.0  # seconds with work and without progress after which the engine counts as unhealthy


class EngineStopped(OctavoError):
    """The engine was shut down, or its loop failed: no request is served any more."""


class AsyncEngine:
    """Serves many clients at once. Use as ``async with AsyncEngine.load(config) as engine``, or call `shutdown`.

    ``generate`` may be called from any event loop. An exception in the engine loop ends every request with an error
    instead of leaving its client waiting, and later calls raise ``EngineStopped``.
    """

    def __init__(self, loaded: LoadedEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.loaded = loaded
        self.clock = clock
        self._router = OutputRouter(loaded.core, loaded.parts.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: the last one
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        self._progress: float | None = None  # when work came, or a step last ran something; None: there is no work
        self._stats: Mapping[str, float] = engine_stats(loaded.core)
        self._next_id = 0
        self._lock = threading.Lock()
        self._deliverer = threading.Thread(target=run_all, args=(self._outbox,), name="octavo-delivery", daemon=True)
        self._deliverer.start()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, config: EngineConfig, *, say: Callable[[str], None] = print) -> AsyncEngine:
        """Load the model (this blocks) and start. What is there by then is collected no more: looking through a
        vocabulary for garbage would hold up a step for longer than most steps take."""
        loaded = load_engine(config, say=say)
        gc.collect()
        gc.freeze()
        return cls(loaded)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def model_name(self) -> str:
        """Name that the model was asked for by."""
        return self.loaded.parts.name

    @property
    def max_seq_len(self) -> int:
        """Prompt and output together."""
        return self.loaded.max_seq_len

    @property
    def model_bytes(self) -> int:
        """Bytes of the files that it was loaded from."""
        return self.loaded.source_bytes

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return self.loaded.parts.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Values of a pooled state."""
        return self.loaded.parts.config.hidden_size

    @property
    def pooling(self) -> Pooling:
        """How texts become vectors, unless a request says otherwise."""
        return self.loaded.parts.pooling

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.parts.tokenizer

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        bulk: bool = False,
        adapter: str = "",
        express: Callable[[OutputDelta], bool] | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Deltas of all choices until each has finished. Closing the iterator cancels the request.

        Raises ``InvalidInput`` at the first step of the iteration for what the scheduler refuses, and
        ``EngineStopped`` if the engine is down or goes down.
        """
        token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        params = params or SamplingParams()
        begun, core = self.clock(), self.loaded.core
        is_new = params.grammar is not None and await asyncio.to_thread(core.compile, params)
        request = self._request(token_ids, params, request_id, priority, tenant, cache_salt, bulk, adapter)
        if is_new:
            told = {"request": request.request_id, "seconds": request.arrival - begun}
            self._post(partial(core.scheduler.timeline.record, "compiled", request.arrival, **told))
            request.arrival = begun
        mailbox = Mailbox(asyncio.get_running_loop(), express)
        submitted = False
        try:
            await self._submit(request, mailbox)
            submitted = True
            while True:
                for delta in await mailbox.get():
                    yield delta
                    if delta.last:
                        submitted = False
                        self._post(partial(self._note_read, request.request_id, self.clock()))
                        return
        finally:
            if submitted:
                self._post(lambda: self._cancel(request.request_id, mailbox))

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters as of the last step; cheap, callable from any thread."""
        stats = dict(self._stats)
        ended = stats.pop("last_step_ended")
        stats |= self.loaded.core.metrics.totals()
        return {**stats, "last_step_age": self.clock() - ended if ended else 0.0}

    def flush_cache(self) -> None:
        """Forget what is cached and nobody uses (`EngineCore.flush_cache`). Callable from any thread."""
        self._post(self.loaded.core.flush_cache)

    def adapters(self) -> Sequence[ServedAdapter]:
        """The adapters that requests may name, by their digests."""
        table = self.loaded.core.adapters
        return () if table is None else table.served

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in a folder under a name; it is read in a thread. Raises ``InvalidInput``."""
        core = self.loaded.core
        read = await asyncio.to_thread(core.served_adapters.read, path)
        await self._between_steps(lambda: core.load_adapter(name, path, read))

    async def unload_adapter(self, name: str) -> None:
        """The name stands for nothing from now on; who has it goes on. Raises ``InvalidInput``."""
        await self._between_steps(lambda: self.loaded.core.unload_adapter(name))

    async def _between_steps(self, command: Callable[[], object]) -> None:
        """Run a command in the engine's thread; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                command()
            except Exception as error:
                tell(loop, set_error, done, error)
            else:
                tell(loop, set_done, done)

        if not self._post(run):
            raise EngineStopped(self.health_problem() or "the engine is shutting down") from self._failure
        await done

    def note_refusal(self, request_id: str, reason: str, status: int, retry_after: float) -> None:
        """A request was turned away before it got here: an event of the timeline. Callable from any thread."""
        told = {"request": request_id, "reason": reason, "status": status, "retry_after": retry_after}
        self._post(partial(self.loaded.core.scheduler.timeline.record, "refuse", self.clock(), **told))

    async def explain(self, request_id: str, tenant: str) -> list[dict[str, Any]]:
        """As `explained` has it, of the events in memory."""
        return await asyncio.to_thread(explained, self.loaded.core.scheduler.timeline, request_id, tenant)

    async def look(self) -> dict[str, Any] | None:
        """What the engine does right now (`octavo.engine.live`), taken between two steps; None: it does not run."""
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[dict[str, Any]] = loop.create_future()

        def take() -> None:
            tell(loop, set_done, seen, snapshot(self.loaded.core, self.clock()))

        return await seen if self._post(take) else None

    def health_problem(self) -> str | None:
        """None while the engine makes progress; otherwise what is wrong."""
        if self._failure is not None:
            return f"the engine loop failed: {type(self._failure).__name__}: {self._failure}"
        if not self._thread.is_alive():
            return "the engine has been shut down"
        since = self._progress
        if since is not None and self.clock() - since > _STUCK_AFTER:
            oldest = next(iter(self._mailboxes), "none")
            return f"no step has ended for {_STUCK_AFTER:.0f} s: the oldest request is {oldest}"
        return None

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the thread and wait for it; whoever still reads gets `EngineStopped`. Idempotent."""
        with self._lock:
            self._stopping = True
            self._inbox.put(lambda: None)  # wakes the thread
        for thread in (self._thread, self._deliverer):  # the second ends with what the first has sent
            if threading.current_thread() is not thread:
                thread.join(timeout)

    # -- in the caller's thread

    def _request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        tenant: str,
        salt: str,
        bulk: bool,
        adapter: str,
    ) -> Request:
        parts = self.loaded.parts
        return Request(
            self._free_id() if request_id is None else request_id,
            token_ids,
            with_token_ids(params, parts.tokenizer),
            tenant=tenant,
            priority=priority,
            bulk=bulk,
            arrival=self.clock(),
            model=parts.name,
            adapter=adapter,
            namespace=parts.namespace(salt, adapter),
            eos_token_ids=parts.config.eos_token_ids,
        )

    def _free_id(self) -> str:
        with self._lock:
            self._next_id += 1
            return f"async-{self._next_id}"

    async def _submit(self, request: Request, mailbox: Mailbox) -> None:
        """Hand the request to the engine thread and wait for its verdict."""
        accepted: asyncio.Future[None] = mailbox.loop.create_future()

        def run() -> None:
            try:
                self.loaded.core.submit(request, self.clock())
            except Exception as error:
                tell(mailbox.loop, set_error, accepted, error)
                return
            self._router.open(request)
            self._mailboxes[request.request_id] = mailbox
            tell(mailbox.loop, set_done, accepted)

        if not self._post(run):
            raise EngineStopped(self.health_problem() or "the engine is shutting down") from self._failure
        try:
            await accepted
        except asyncio.CancelledError:
            self._post(lambda: self._cancel(request.request_id, mailbox))
            raise

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the engine thread; False where nobody would run it any more."""
        with self._lock:
            if not self._stopping:
                self._inbox.put(command)
            return not self._stopping

    # -- in the engine thread

    def _cancel(self, request_id: str, mailbox: Mailbox) -> None:
        if self._mailboxes.get(request_id) is not mailbox:
            return
        self._forget(request_id)
        self.loaded.core.cancel(request_id, FinishReason.CANCELLED)

    def _note_read(self, request_id: str, now: float) -> None:
        """The reader has come back for more after the last delta: nothing of it is left unread."""
        self.loaded.core.scheduler.timeline.record("read", now, request=request_id)

    def _forget(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        self._router.close(request_id)

    def _run(self) -> None:
        reason: Exception = EngineStopped("the engine has been shut down")
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # a panic of a library does not descend from Exception, and readers wait
            self._failure = error
            reason = EngineStopped(f"the engine loop failed: {type(error).__name__}: {error}")
        finally:
            self._end_all(reason)

    def _turn(self) -> None:
        """Run what the inbox holds (waiting for it when there is nothing else to do), then one step."""
        core = self.loaded.core
        if not core.has_work:
            self._progress = None
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        if self._stopping or not core.has_work:
            return
        now = self.clock()
        if self._progress is None:
            self._progress = now
        events = core.step(now)
        if not core.idle:
            self._progress = self.clock()
        begun = core.clock()
        self._stats = engine_stats(core)
        self._deliver(self._router.take(events))
        core.delivered(begun)
        if core.idle and not events:
            time.sleep(_IDLE_NAP)

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Have each event loop woken once for all that a step has for its coroutines."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, OutputDelta]]] = {}
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                posts.setdefault(mailbox.loop, []).append((mailbox, delta))
                if delta.last:
                    self._forget(delta.request_id)
        if posts:
            self._outbox.put(partial(self._tell_readers, posts))

    def _tell_readers(self, posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, OutputDelta]]]) -> None:
        """In the delivery thread."""
        for loop, post in posts.items():
            if not tell(loop, put_all, post):  # it is gone, and so are its readers
                for mailbox, delta in post:
                    self._post(partial(self._cancel, delta.request_id, mailbox))

    def _end_all(self, reason: Exception) -> None:
        """Nobody will run a command any more: answer those that are queued and everyone who waits."""
        with self._lock:
            self._stopping = True
        while not self._inbox.empty():
            try:
                self._inbox.get()()
            except Exception:  # the reader learns below what happened
                continue
        left, core = dict(self._mailboxes), self.loaded.core
        for request_id, mailbox in left.items():
            self._outbox.put(partial(tell, mailbox.loop, mailbox.fail, reason))  # after what it was sent
            self._forget(request_id)
        self._outbox.put(None)
        if self._failure is None:  # after a failure nothing is known of the core
            for request_id in left:
                core.cancel(request_id)
            core.step(self.clock())  # cancels, and runs nothing
        core.close()
