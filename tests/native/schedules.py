"""Random schedules through the engine on `native`: a request's tokens and logprobs are bit for bit those of the request
alone on the fewest threads, whatever runs beside it, however its prompt is cut, whatever was cached or preempted.

A `Stage` is a model in one format, KV type and instruction set; `play` draws a schedule and counts what happened in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from engine_harness import Choice, Collector, Oracle, assert_idle, run_to_end
from numpy.typing import NDArray

from octavo.backends.native_backend import NativeBackend, NativeModel
from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.parts import ModelParts, build_core
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

# threads of one schedule after another: more than a machine has cost it ten times the time, so they are rarer
THREADS = (1, 2, 2, 1, 3, 2, 1, 2, 1, 4)
PAGE_SIZES = (16, 32, 64)
WHAT_HAPPENS = ("hits", "kicked", "chunks", "mixed", "copies", "silent", "trees")  # in any ten schedules


@dataclass(frozen=True)
class Script:
    """What schedules are drawn from: prompts that share beginnings, parameters, how many tokens a step takes."""

    prompts: Sequence[tuple[int, ...]]
    params: Sequence[SamplingParams]
    max_seq_len: int
    requests: tuple[int, int] = (3, 6)  # at least, at most
    chunks: Sequence[int] = (5, 17, 64, 256)
    budgets: Sequence[int] = (24, 70, 256)


class Checkpoint:
    """A configuration and its float32 weights, prepared once for all formats."""

    def __init__(self, name: str, config: Mapping[str, Any], read: Callable[[str], Any]) -> None:
        self.name, self.config = name, ModelConfig.from_dict(config)
        model = build_model(self.config)
        self.weights: dict[str, NDArray[np.float32]] = {
            weight: np.asarray(model.prepare(weight, read(weight)), np.float32) for weight in model.weight_shapes()
        }

    def load(self, kind: str, isa: str, threads: int) -> NativeModel:
        """Its weights packed in a format on an engine of its own."""
        model: NativeModel = NativeBackend(isa, threads).compile(build_model(self.config), format=kind, kv_dtype="fp32")
        model.load(self.weights.__getitem__)
        return model

    def parts(self, packed: NativeModel, kv_dtype: str) -> ModelParts:
        """The packed model with another KV type."""
        backend: NativeBackend = packed.backend
        model = backend.compile(packed.model, format=packed.formats.default, kv_dtype=kv_dtype)
        model._weights = packed._weights
        return ModelParts(
            self.name, self.config, model, backend, {}, None, f"{self.name} {backend.engine.isa}", model.weight_format
        )


@dataclass
class Stage:
    """One model, format, KV type and instruction set, by the number of threads; and what requests answer alone."""

    script: Script
    parts: Mapping[int, ModelParts]  # threads -> parts; requests are alone on the fewest
    seen: Counter[str]
    page_sizes: Sequence[int] = PAGE_SIZES
    expected: dict[tuple[int, int], list[Choice]] = field(default_factory=dict)
    quiet: EngineCore | None = None

    @property
    def first(self) -> ModelParts:
        """The model on the fewest threads."""
        return self.parts[min(self.parts)]

    def core(self, threads: int, page_size: int, num_pages: int, cache: bool, **scheduling: Any) -> EngineCore:
        """An engine that audits its pages after every step."""
        config = SchedulerConfig(max_seq_len=self.script.max_seq_len, **scheduling)
        options = {"num_pages": num_pages, "page_size": page_size, "prefix_cache": cache}
        return build_core(self.parts[threads], scheduling=config, clock=lambda: 0.0, audit=True, **options)

    def pages(self, page_size: int) -> int:
        """Pages that the longest sequence takes."""
        groups = self.first.model.kv_groups()
        return sum(replace(group, window=0).most_columns(self.script.max_seq_len, page_size, None) for group in groups)

    def request(self, name: str, prompt: int, params: int) -> Request:
        """Prompt and parameters by their numbers."""
        made, script = self.first, self.script
        tokens, wanted = script.prompts[prompt], script.params[params]
        return Request(name, tokens, wanted, namespace=made.namespace(), eos_token_ids=made.config.eos_token_ids)

    def alone(self, prompt: int, params: int) -> list[Choice]:
        """The request by itself: no prefix cache, the whole prompt at once, pages of 16."""
        key = (prompt, params)
        if key not in self.expected:
            if self.quiet is None:
                longest = self.script.max_seq_len
                bounds = {"max_batched_tokens": longest, "max_prefill_chunk": longest, "max_running_requests": 4}
                self.quiet = self.core(min(self.parts), 16, 4 * self.pages(16), False, **bounds)
            collector, name = Collector(), f"alone {prompt} {params}"
            self.quiet.submit(self.request(name, prompt, params), 0.0)
            run_to_end(self.quiet, collector)
            self.expected[key] = [collector.choices[name, choice] for choice in range(self.script.params[params].n)]
        return self.expected[key]

    def play(self, rng: random.Random, threads: int, few: int = 0) -> None:
        """One schedule: some requests arrive late, some lose their pages, the pool may be too small for all.

        With `few`, it draws from as many requests alone, the same ones each time: fewer answers have to be known.
        """
        page_size, wanted = rng.choice(self.page_sizes), self._draw(rng, few)
        alone = [self.alone(*pair) for pair in wanted]
        core = self.core(
            threads,
            page_size,
            self.pages(page_size) + rng.choice([1, self.pages(page_size) // 3 + 1, 100]),
            rng.random() < 0.8,
            max_batched_tokens=rng.choice(self.script.budgets),
            max_prefill_chunk=rng.choice(self.script.chunks),
            max_running_requests=rng.choice([2, 8]),
        )
        core.executor = _Counting(core.executor, self.seen)
        dice = random.Random(f"{page_size} {wanted}")
        if dice.random() < 0.8:
            said = partial(_said, alone)
            trees = not self.first.config.forgets
            core.speculator = Oracle(said, dice.choice((4, 9)), dice.choice((1, 3)), trees=trees)  # type: ignore[assignment]
        collector = self._run(core, rng, wanted)
        self.seen["hits"] += sum(count > 0 for count in collector.cached.values())
        self.seen["schedules"] += 1
        self.seen[f"{page_size}x{threads}"] += 1
        for index, (prompt, params) in enumerate(wanted):
            for choice, expected in enumerate(alone[index]):
                found = collector.choices[f"r{index}", choice]
                assert found == expected, (self.parts[threads].numerics_id, index, prompt, params, page_size, threads)

    def _draw(self, rng: random.Random, few: int) -> list[tuple[int, int]]:
        script = self.script
        pairs = [(prompt, params) for prompt in range(len(script.prompts)) for params in range(len(script.params))]
        if few:
            pairs = random.Random(self.first.numerics_id).sample(pairs, few)
        return [rng.choice(pairs) for _ in range(rng.randint(*script.requests))]

    def _run(self, core: EngineCore, rng: random.Random, wanted: Sequence[tuple[int, int]]) -> Collector:
        collector, waiting, kicks = Collector(), list(enumerate(wanted)), 3
        while waiting or core.has_work:
            while waiting and rng.random() < 0.7:
                index, (prompt, params) = waiting.pop(0)
                core.submit(self.request(f"r{index}", prompt, params), 0.0)
            running = core.scheduler._roster.running
            if kicks and running and rng.random() < 0.2:
                kicks -= 1
                core.scheduler._roster.preempt(rng.choice(list(running)), 0.0, "forced")
                self.seen["kicked"] += 1
            collector.take(core.step(0.0))
        assert_idle(core)
        return collector


def _said(alone: Sequence[Sequence[Choice]], name: str, choice: int) -> Sequence[int]:
    """What a choice of request r0, r1, ... will say."""
    return alone[int(name[1:])][choice].tokens


@dataclass
class _Counting:
    """What a step held, on its way to the runner."""

    run: Callable[[ScheduleDecision], StepResult]
    seen: Counter[str]

    def __call__(self, decision: ScheduleDecision) -> StepResult:
        prefills = sum(row.num_scheduled_tokens > 1 for row in decision.rows)
        self.seen["steps"] += 1
        self.seen["chunks"] += sum(row.start + row.num_scheduled_tokens < row.num_tokens for row in decision.rows)
        self.seen["mixed"] += 0 < prefills < len(decision.rows)
        self.seen["copies"] += len(decision.copies)
        self.seen["compactions"] += sum(row.compaction is not None for row in decision.rows)
        self.seen["trees"] += sum(bool(row.flags.parent_rows) for row in decision.rows)
        self.seen["silent"] += sum(row.flags.no_write for row in decision.rows)
        self.seen["squeezed"] += len(decision.preemptions)
        return self.run(decision)
