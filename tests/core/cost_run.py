"""A scheduler in virtual time: the tokens mean nothing, a step takes what a cost function says, every gap is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from builders import make_kv

from octavo.core.batch import RowResult, ScheduleDecision, StepResult
from octavo.core.events import EventKind, TokenEvent
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig
from octavo.core.step_model import StepWork, work_of

Cost = Callable[[StepWork], float]
Noise = Callable[[random.Random], float]


def linear(
    constant: float, decode: float, context: float, prefill: float, attention: float, chunk: float = 0.0
) -> Cost:
    """Milliseconds for each, in; seconds of a step, out."""

    def cost(work: StepWork) -> float:
        chunks = chunk * work.chunks + prefill * work.prefill + attention * work.attention
        return (constant + decode * work.decodes + context * work.context + chunks) / 1000.0

    return cost


def memory_bound(weights: float, row: float, context: float, attention: float) -> Cost:
    """As machines do it: the weights are read once, or the rows take longer than that. Milliseconds in."""

    def cost(work: StepWork) -> float:
        rows = work.decodes + work.prefill
        return (max(weights, row * rows) + context * work.context + attention * work.attention) / 1000.0

    return cost


MODEL_COST = linear(8, 0.4, 0.0004, 0.35, 0.00005, 1.0)


def quiet(dice: random.Random) -> float:
    """2% either way."""
    return dice.gauss(1.0, 0.02)


def loud(dice: random.Random) -> float:
    """8%, and now and then a third more."""
    return dice.lognormvariate(0.0, 0.08) * (1.33 if dice.random() < 0.002 else 1.0)


@dataclass
class Arrival:
    """A request and when it comes, in seconds."""

    at: float
    prompt: int
    output: int


@dataclass
class CostRun:
    """Runs arrivals to their end, or until ``seconds`` have passed."""

    cost: Cost
    noise: Noise
    bound_ms: int = 0
    seed: int = 0
    config: dict = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    cycles: list[tuple[StepWork, float]] = field(default_factory=list)
    first_tokens: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    clock: float = 0.0

    def __post_init__(self) -> None:
        config = {"max_batched_tokens": 512, "max_prefill_chunk": 512, "max_seq_len": 8192, **self.config}
        self.scheduler = ContinuousBatchScheduler(
            make_kv(4096, 64, enable_prefix_cache=False),
            SchedulerConfig(max_token_gap_ms=self.bound_ms, **config),
        )
        self._dice = random.Random(self.seed)
        self._last: dict[str, float] = {}

    def play(self, arrivals: Iterable[Arrival], seconds: float = 1e9) -> CostRun:
        waiting = sorted(arrivals, key=lambda arrival: arrival.at)
        self._left = list(waiting)
        while self.clock < seconds and (self._left or self.scheduler.has_work):
            if not self.scheduler.has_work:
                self.clock = max(self.clock, self._left[0].at)
            while self._left and self._left[0].at <= self.clock:
                arrival = self._left.pop(0)
                self.submit(f"r{len(self._left)}", arrival.prompt, arrival.output)
            self.step()
        return self

    def step(self) -> Sequence[TokenEvent]:
        """One step; its events."""
        decision = self.scheduler.plan(self.clock)
        work = work_of(decision.rows)
        seconds = self.cost(work) * max(self.noise(self._dice), 0.1)
        self.clock += seconds
        self.cycles.append((work, seconds))
        events = self.scheduler.commit(answer(decision), self.clock)
        self.scheduler.observe(seconds)
        for event in events:
            if event.kind is EventKind.TOKEN:
                self._saw(event.request_id)
        return events

    def submit(self, name: str, prompt: int, output: int) -> None:
        """A request of so many tokens."""
        self.scheduler.submit(Request(name, [1] * prompt, SamplingParams(max_tokens=output, seed=1)))

    def _saw(self, name: str) -> None:
        self.tokens += 1
        if name in self._last:
            self.gaps.append(self.clock - self._last[name])
        else:
            self.first_tokens[name] = self.clock
        self._last[name] = self.clock

    def gap_quantile(self, share: float) -> float:
        """The gap that ``share`` of all are not above."""
        gaps = sorted(self.gaps)
        return gaps[min(int(share * len(gaps)), len(gaps) - 1)]


def answer(decision: ScheduleDecision) -> StepResult:
    """A token for each row that samples one."""
    return StepResult(decision.step, [RowResult((5,) if row.flags.sample else ()) for row in decision.rows])


def long_prompts(seed: int, count: int, every: float, prompt: int = 2048, output: int = 16) -> list[Arrival]:
    """Prompts that come at random, ``every`` seconds on average."""
    dice, at, arrivals = random.Random(seed), 0.5, []
    for _ in range(count):
        at += dice.expovariate(1.0 / every)
        arrivals.append(Arrival(at, prompt, output))
    return arrivals
