"""InferenceEngine: submit, stream, cancel. Imports and runs on a bare interpreter with a fixture's model."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.backends.quantization import QuantConfig
from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind, TokenEvent
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import SchedulerConfig
from octavo.decoding.words import with_token_ids
from octavo.engine.core import EngineCore
from octavo.engine.fixture import Fixture, load_fixture
from octavo.engine.parts import ModelParts, build_core, parts_from_fixture

__all__ = ["InferenceEngine"]

_KEPT_ENDED = 4096  # ended requests whose undelivered events are kept


class InferenceEngine:
    """One model, driven by whoever reads a stream: each step serves every live request.

    ``model`` is a `ModelParts`, a `Fixture`, or the path of a fixture file. Not thread-safe; `AsyncEngine` is the
    engine for many clients. Events are delivered once: a second ``stream`` of a request goes on where the first ended.
    """

    def __init__(
        self,
        model: ModelParts | Fixture | str | Path,
        *,
        backend: str = "reference",
        quantization: QuantConfig | None = None,
        num_pages: int = 256,
        page_size: int = 16,
        scheduling: SchedulerConfig | None = None,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        audit: bool = False,
    ) -> None:
        if isinstance(model, (str, Path)):
            model = load_fixture(model)
        if isinstance(model, Fixture):
            model = parts_from_fixture(model, backend=backend, quantization=quantization)
        self.parts = model
        self.clock = clock
        limit = model.config.max_position_embeddings
        self.core: EngineCore = build_core(
            model,
            num_pages=num_pages,
            page_size=page_size,
            scheduling=scheduling or SchedulerConfig(max_seq_len=min(limit, SchedulerConfig().max_seq_len)),
            prefix_cache=prefix_cache,
            clock=clock,
            audit=audit,
        )
        self._undelivered: OrderedDict[str, deque[TokenEvent]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._next_id = 0

    @classmethod
    def from_fixture(cls, fixture: Fixture | str | Path, **settings: Any) -> InferenceEngine:
        """An engine with the page size, pages and budgets of the fixture's own scenario.

        ``settings`` replace them: page_size, num_pages, max_seq_len, max_batched_tokens, max_running_requests,
        max_prefill_chunk, and the arguments of the constructor.
        """
        loaded = fixture if isinstance(fixture, Fixture) else load_fixture(fixture)
        plan = loaded.scenario
        budgets = {"max_seq_len": plan["max_seq_len"], **plan["budgets"]}
        for name in budgets:
            budgets[name] = settings.pop(name, budgets[name])
        settings.setdefault("scheduling", SchedulerConfig(**budgets))
        settings.setdefault("page_size", plan["page_size"])
        settings.setdefault("num_pages", plan["num_pages"])
        return cls(loaded, **settings)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.parts.tokenizer

    def submit(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        params: SamplingParams | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id. Greedy unless ``params`` say otherwise; ``max_tokens`` replaces theirs.

        ``max_tokens=0`` yields no token and finish reason ``length``. Raises ``InvalidInput`` (a ``ValueError``)
        naming field, value and remedy: an empty prompt, an id in use, a token outside the vocabulary, a prompt that
        leaves no room in the context, a request that can never fit in the page pool.
        """
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens) if params is None else params
        if params.max_tokens != max_tokens:
            params = replace(params, max_tokens=max_tokens)
        now = self.clock()
        request = Request(
            self._free_id() if request_id is None else request_id,
            prompt_tokens,
            with_token_ids(params, self.parts.tokenizer),
            tenant=tenant,
            priority=priority,
            arrival=now,
            model=self.parts.name,
            namespace=self.parts.namespace(cache_salt),
            eos_token_ids=self.parts.config.eos_token_ids,
        )
        if request.request_id in self._undelivered:
            raise InvalidInput("request_id", request.request_id, "in use; give another one, or leave it out")
        self.core.submit(request, now)
        self._watch(request.request_id)
        return request.request_id

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """The request's events that were not delivered yet, running steps as needed, until its ``request_end``.

        Raises ``InvalidInput`` for an id that was never submitted or has been forgotten.
        """
        if request_id not in self._undelivered:
            raise InvalidInput("request_id", request_id, "submit a request under this id first")
        return self._events(request_id)

    def _events(self, request_id: str) -> Iterator[TokenEvent]:
        queue = self._undelivered[request_id]
        while True:
            while queue:
                yield queue.popleft()
            if request_id in self._ended or request_id not in self._undelivered:
                return
            self.step()

    def cancel(self, request_id: str) -> None:
        """End a request: no token is delivered after this, not even one already computed. Idempotent.

        Raises ``InvalidInput`` for an unknown id.
        """
        queue = self._undelivered.get(request_id)
        if queue is None:
            raise InvalidInput("request_id", request_id, "submit a request under this id first")
        if request_id in self._ended:
            return
        self.core.cancel(request_id, FinishReason.CANCELLED)
        kept = [event for event in queue if event.kind != EventKind.TOKEN]
        queue.clear()
        queue.extend(kept)

    def step(self) -> list[TokenEvent]:
        """Run one step of the engine; its events are also kept for their streams."""
        events = list(self.core.step(self.clock()))
        for event in events:
            queue = self._undelivered.get(event.request_id)
            if queue is not None:
                queue.append(event)
            if event.kind == EventKind.REQUEST_END:
                self._end(event.request_id)
        return events

    def run(self) -> None:
        """Step until no request is live."""
        while self.core.has_work:
            self.step()

    def snapshot(self, request_id: str) -> dict[str, Any]:
        """A live request as plain JSON values. Raises ``InvalidInput`` for one that is not live."""
        return self.core.snapshot(request_id)

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Go on with a snapshot: tokens that its events told of are not told again. Returns the request id."""
        request = self.core.restore(saved, self.clock())
        self._watch(request.request_id)
        return request.request_id

    def audit(self) -> None:
        """Recount all pages: free + cached + referenced + ticketed = total. Raises ``InvariantBroken``."""
        self.core.scheduler.audit()

    def usage(self) -> dict[str, int]:
        """Pages by class: free, cached, referenced, ticketed, total."""
        pages = self.core.kv.usage().pages
        return {name: getattr(pages, name) for name in ("free", "cached", "referenced", "ticketed", "total")}

    def metrics(self) -> dict[str, Any]:
        """Times, throughput, batch utilization, KV peak, fragmentation, and the cache's counters."""
        kv = self.core.kv
        prefix = kv.usage().prefix
        cache = {
            "queries": prefix.queries,
            "hits": prefix.hits,
            "query_tokens": prefix.query_units,
            "hit_tokens": prefix.hit_units,
            "pages_taken": kv.allocator.num_taken,
            "pages_freed": kv.allocator.num_freed,
            "pages_evicted": prefix.evicted_pages,
        }
        return {**self.core.metrics.summary(), "pages": self.usage(), "cache": cache}

    def timeline(self) -> list[Mapping[str, Any]]:
        """One record for each step: when, which requests, how many tokens and pages."""
        return self.core.metrics.timeline()

    def _free_id(self) -> str:
        while True:
            self._next_id += 1
            request_id = f"req-{self._next_id}"
            if request_id not in self._undelivered:
                return request_id

    def _watch(self, request_id: str) -> None:
        self._undelivered[request_id] = deque()

    def _end(self, request_id: str) -> None:
        if request_id not in self._undelivered:
            return
        self._ended[request_id] = None
        while len(self._ended) > _KEPT_ENDED:
            forgotten, _ = self._ended.popitem(last=False)
            self._undelivered.pop(forgotten, None)
