"""Builders with tiny numbers for the tests of core/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from null_model import NullModel

from octavo.core.events import EventKind, TokenEvent
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig

VOCAB = 97
_REQUEST_FIELDS = ("tenant", "priority", "deadline", "arrival", "namespace", "eos_token_ids", "gang", "bulk")


def make_request(request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), **values: Any) -> Request:
    """A request; parameters and request fields by name. Three tokens, seed 7, unless told otherwise."""
    fields = {name: values.pop(name) for name in _REQUEST_FIELDS if name in values}
    return Request(request_id, prompt, SamplingParams(**{"max_tokens": 3, "seed": 7, **values}), **fields)


def make_kv(num_pages: int = 64, page_size: int = 4, windows: Sequence[int] = (0,), **values: Any) -> KVCacheManager:
    """A pool of 64 pages of 4 tokens, one group a window."""
    groups = tuple(KVGroup((layer,), window=window) for layer, window in enumerate(windows))
    return KVCacheManager(num_pages, page_size, groups, **values)


class Bench:
    """A scheduler, the null model, and what came out: events by choice, in order."""

    def __init__(self, kv: KVCacheManager | None = None, seed_source: Any = None, **config: Any) -> None:
        self.kv = make_kv() if kv is None else kv
        self.model = NullModel(self.kv, VOCAB)
        self.model.width_of = self._width
        self.scheduler = ContinuousBatchScheduler(
            self.kv, SchedulerConfig(**config), vocab_size=VOCAB, executor=self.model, seed_source=seed_source
        )
        self.events: list[TokenEvent] = []
        self.steps_left = 3000

    def _width(self, request_id: str) -> int:
        request = self.scheduler.get(request_id)
        return request.params.n if request is not None and request.gang else 0

    def submit(self, *requests: Request) -> Bench:
        """Submit requests."""
        for request in requests:
            self.scheduler.submit(request)
        return self

    def step(self, budget: int = 512) -> Any:
        """One step, audited; the decision. Fails after 3000 steps."""
        self.steps_left -= 1
        assert self.steps_left > 0, "no end in sight"
        decision = self.scheduler.step(budget)
        self.scheduler.audit()
        self.events += self.scheduler.drain_events()
        return decision

    def run(self, budget: int = 512) -> Bench:
        """Step until there is no work."""
        while self.scheduler.has_work:
            self.step(budget)
        return self

    def tokens(self, request_id: str = "r", choice: int = 0) -> list[int | None]:
        """Tokens told of, in order."""
        return [event.token_id for event in self._of(request_id, EventKind.TOKEN) if event.choice == choice]

    def end(self, request_id: str = "r", choice: int = 0) -> TokenEvent:
        """The one CHOICE_END event of a choice."""
        [event] = [event for event in self._of(request_id, EventKind.CHOICE_END) if event.choice == choice]
        return event

    def reason(self, request_id: str = "r", choice: int = 0) -> str | None:
        """Why a choice ended."""
        return self.end(request_id, choice).finish_reason

    def _of(self, request_id: str, kind: EventKind) -> list[TokenEvent]:
        return [event for event in self.events if event.request_id == request_id and event.kind is kind]
