"""Builders for engine tests: tiny models on `reference`, engines that audit after every step, and what streams held."""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lying_trees import lying_tree

from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.events import EventKind, TokenEvent
from octavo.core.kv_eviction import H2O, SnapKV, StreamingLLM
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.core.speculation import Guess
from octavo.engine.core import EngineCore
from octavo.engine.fixture import load_fixture
from octavo.engine.parts import ModelParts, build_core, parts_from_fixture

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = {"llama": "tiny_model.json", "gemma3": "tiny_two_groups.json"}  # the second has two KV groups
FORGETFUL = {
    "streaming": ("tiny_model.json", StreamingLLM(sinks=3, window=6)),
    "snapkv": ("tiny_model.json", SnapKV(capacity=4, window=2, kernel=3, block=4)),
    "h2o": ("tiny_model.json", H2O(heavy=3, recent=2, block=4)),
}
MAX_SEQ_LEN = 96


@functools.cache
def tiny_parts(model: str, backend: str = "reference", format: str = "auto") -> ModelParts:
    """A tiny model with its weights on a backend, in a format if it compiles (fp32: keys and values too); made once."""
    name, eviction = FORGETFUL.get(model) or (MODELS[model], None)
    kv_dtype = "fp32" if format == "fp32" else "auto"
    fixture = load_fixture(FIXTURES / name)
    return parts_from_fixture(fixture, backend=backend, eviction=eviction, format=format, kv_dtype=kv_dtype)


def pages_for(model: str, page_size: int, num_tokens: int) -> int:
    """Pages that one sequence of ``num_tokens`` takes."""
    groups, size = tiny_parts(model).model.kv_groups(), fitting(page_size, model)
    return sum(group.most_columns(num_tokens, size, None) for group in groups)


def fitting(page_size: int, model: str) -> int:
    """The page size, or the largest that goes with what a model forgets."""
    _, policy = FORGETFUL.get(model, ("", None))
    return page_size if policy is None or isinstance(policy, StreamingLLM) else min(page_size, policy.block)


def make_core(
    model: str = "llama",
    *,
    page_size: int = 4,
    num_pages: int = 128,
    prefix_cache: bool = True,
    backend: str = "reference",
    format: str = "auto",
    host_pages: int = 0,
    lookup: tuple[int, int] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **scheduling: Any,
) -> EngineCore:
    """An engine that audits its pages after every step; with ``lookup`` the residual verifier draws."""
    scheduling.setdefault("max_seq_len", MAX_SEQ_LEN)
    core = build_core(
        replace(tiny_parts(model, backend, format), lookup=lookup),
        num_pages=num_pages,
        page_size=fitting(page_size, model),
        scheduling=SchedulerConfig(**scheduling),
        prefix_cache=prefix_cache,
        host_pages=0 if model in FORGETFUL else host_pages,
        clock=clock,
        audit=True,
    )
    return without_hurry(core)


def without_hurry(core: EngineCore) -> EngineCore:
    """Which steps there are depends on no clock: each waits for its masks."""
    if core.forcing is not None:
        core.forcing.patience = 60.0
    return core


def make_request(
    request_id: str, prompt: Iterable[int], params: SamplingParams, model: str = "llama", **identity: Any
) -> Request:
    """A request in the model's own namespace, with the model's end-of-sequence ids."""
    parts = tiny_parts(model)
    return Request(
        request_id,
        tuple(prompt),
        params,
        namespace=parts.namespace(),
        eos_token_ids=parts.config.eos_token_ids,
        **identity,
    )


class Oracle:
    """Stands for a `Speculator`: knows what ``said(request, choice)`` will be, and lies ``lies`` times of eight.

    ``trees``: most guesses are trees, with what will be said among lies.
    """

    def __init__(self, said: Callable[[str, int], Sequence[int]], most: int, lies: int, *, trees: bool = False) -> None:
        self.said, self.most, self.lies, self.trees = said, most, lies, trees
        self.dice = random.Random(most * 8 + lies)
        self.accepted = 0

    def drafts(self, running: Sequence[Any]) -> dict[tuple[str, int], Guess]:
        """Some for each."""
        found: dict[tuple[str, int], Guess] = {}
        for branch in running:
            known, count = branch.num_output_tokens, self.dice.randint(0, self.most)
            right = [*self.said(*branch.key), *([3] * count)][known : known + count]
            if self.trees and self.dice.random() < 0.8:
                right, dice = self.said(*branch.key)[known:], self.dice.randrange
                found[branch.key] = lying_tree(right, self.most + 2, self.lies, dice, self.allowed(branch))
                continue
            found[branch.key] = [t if self.dice.random() * 8 >= self.lies else self.dice.randrange(50) for t in right]
        return found

    def allowed(self, branch: Any) -> Callable[[tuple[int, ...]], Sequence[int]]:
        """What a lie behind these drafts may be."""
        return lambda path: range(50)

    def rests(self) -> bool:
        """Every other step may be planned ahead."""
        return self.dice.random() < 0.5

    def committed(self, rows: Any, results: Any, seconds: float) -> None:
        """Count what was right."""
        self.accepted += sum(len(result.token_ids) - 1 for result in results if result.token_ids)

    def ended(self, key: Any) -> None:
        """Nothing is kept."""

    def take_fault(self) -> str:
        """Lies are no failure."""
        return ""

    def drafts_of(self, request_id: str) -> tuple[float, ...]:
        """Nothing was counted."""
        return ()


@dataclass
class Choice:
    """All that the stream of one choice held."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    hidden: bytes = b""


class Collector:
    """Sorts events by request and choice, and checks their grammar as they come."""

    def __init__(self) -> None:
        self.choices: dict[tuple[str, int], Choice] = {}
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}

    def take(self, events: Iterable[TokenEvent]) -> None:
        """Add one step's events."""
        for event in events:
            assert event.request_id not in self.ended, f"after the end: {event}"
            if event.kind == EventKind.REQUEST_END:
                self.ended.add(event.request_id)
                continue
            self._take_one(event, self.choices.setdefault((event.request_id, event.choice), Choice()))

    def _take_one(self, event: TokenEvent, choice: Choice) -> None:
        assert choice.finish_reason is None, f"after the choice's end: {event}"
        self.cached[event.request_id] = max(self.cached.get(event.request_id, 0), event.num_cached_tokens)
        if event.prompt_logprobs is not None:
            assert choice.prompt_logprobs is None, "prompt logprobs come once"
            choice.prompt_logprobs = event.prompt_logprobs
        if event.kind == EventKind.TOKEN:
            assert event.index == len(choice.tokens), f"gap before {event}"
            choice.tokens.append(event.token_id)
            choice.logprobs.append(event.logprobs)
        else:
            choice.finish_reason, choice.stop_reason, choice.error = event.finish_reason, event.stop_reason, event.error
            choice.hidden = base64.b64decode(event.hidden)


def run_to_end(core: EngineCore, collector: Collector, most: int = 5000) -> None:
    """Step until nothing is left; fails if the engine stops making progress."""
    while core.has_work:
        collector.take(core.step(0.0))
        most -= 1
        assert most > 0, "the engine makes no progress"


def assert_idle(core: EngineCore) -> None:
    """The audit holds and nobody references a page."""
    core.scheduler.audit()
    pages = core.kv.usage().pages
    assert (pages.referenced, pages.ticketed) == (0, 0), pages


def alone(model: str, prompt: tuple[int, ...], params: SamplingParams, **options: Any) -> list[Choice]:
    """What every choice of a request yields when it runs by itself, whole prompt at once, nothing cached."""
    core, collector = make_core(model, page_size=16, prefix_cache=False, **options), Collector()
    core.submit(make_request("alone", prompt, params, model), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    return [collector.choices["alone", choice] for choice in range(params.num_branches)]


def inject(core: EngineCore, failure: Callable[[ScheduleDecision], Exception | None], *, after: bool = False) -> None:
    """Make the executor raise what ``failure`` returns, before the model ran or after it has written its pages."""
    execute = core.executor

    def failing(decision: ScheduleDecision) -> StepResult:
        result = execute(decision) if after else None
        error = failure(decision)
        if error is not None:
            raise error
        return execute(decision) if result is None else result

    core.executor = failing
