"""`octavo bench offline`: tokens a second of the whole engine, without HTTP and tokenizer, in interleaved rounds.

Random prompts (a fixed seed, new ones in every round), greedy, end-of-sequence ignored. Every sample carries the state
of the machine just before it: shared machines swing, and shares of the bandwidth bound are taken sample by sample.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from octavo.core.errors import InvalidInput, OctavoError
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.bench_machine import machine_state, native_engine
from octavo.engine.loader import LoadedEngine

__all__ = ["OfflineBench", "Workload", "standard_workloads"]


@dataclass(frozen=True)
class Workload:
    """`decode`: one stream, from the first token on. `batch`: all output tokens over the whole time. `prefill`: prompt
    tokens over the time to the first token. `fixed` prompts are the same in every round (a warm prefix); `shared` is
    how many first tokens the prompts of one round have in common."""

    name: str
    kind: str
    streams: int
    prompt: int
    output: int
    fixed: bool = False
    shared: int = 0

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.output

    def prompts(self, vocab_size: int, count: int) -> list[list[int]]:
        """Random token ids of each stream, others for each `count` unless they are fixed."""
        rng = random.Random(f"{self.name}/{0 if self.fixed else count}")
        start = [rng.randrange(vocab_size) for _ in range(self.shared)]
        own = self.prompt - self.shared
        return [[*start, *(rng.randrange(vocab_size) for _ in range(own))] for _ in range(self.streams)]

    def rate(self, first: float, last: float, tokens: int) -> float:
        """Tokens a second, from the seconds at which the first and the last of all `tokens` came."""
        if self.kind == "decode":
            return (tokens - 1) / (last - first)
        return (self.prompt * self.streams if self.kind == "prefill" else tokens) / last


@dataclass
class _Samples:
    values: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    python: list[tuple[float, float]] = field(default_factory=list)  # share of the steps, seconds a step
    states: list[dict[str, Any] | None] = field(default_factory=list)


@dataclass(frozen=True)
class _Timing:
    begin: float
    first: float
    last: float
    tokens: int
    steps: int
    phases: dict[str, float]  # seconds of all steps, by the names of `metrics.PHASES`

    @property
    def python(self) -> tuple[float, float]:
        """What was not the model's: as a share of the steps' time, and in seconds a step."""
        total = sum(self.phases.values())
        own = total - self.phases["model"]
        return own / total, own / self.steps


def standard_workloads(
    prompt: int, output: int, streams: Sequence[int], prefill: Sequence[int], context: int
) -> list[Workload]:
    """One stream and batches of prompt / output tokens, prefills, and one stream behind a long context (0: none)."""
    for name, values in (("prompt", [prompt]), ("streams", streams), ("prefill", prefill)):
        if any(value < 1 for value in values):
            raise InvalidInput(name, list(values), "give whole numbers of at least 1")
    if output < 2 or context < 0:
        raise InvalidInput("output", output, "give at least 2 output tokens, and a context of at least 0")
    found = [_streams(count, prompt, output) for count in streams]
    found += [Workload(f"prefill {size}", "prefill", 1, size, 1) for size in prefill]
    if context:
        found.append(Workload(f"1 stream behind {context}", "decode", 1, context, output, fixed=True))
    return found


def _streams(count: int, prompt: int, output: int) -> Workload:
    plural = "s" * (count > 1)
    return Workload(
        f"{count} stream{plural} {prompt}/{output}", "decode" if count == 1 else "batch", count, prompt, output
    )


class OfflineBench:
    """Workloads over one loaded engine. `round` runs each once; rounds of several benches may alternate."""

    def __init__(
        self, loaded: LoadedEngine, workloads: Sequence[Workload], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.loaded, self.core, self.clock = loaded, loaded.core, clock
        self.workloads: list[Workload] = []
        self.left_out: dict[str, str] = {}
        self._samples: dict[str, _Samples] = {}
        self._count = 0
        for workload in workloads:
            self.add(workload)

    def add(self, workload: Workload) -> None:
        """One more, unless it is too long for the engine: then `left_out` has the reason under its name."""
        reason = self._misfit(workload)
        if reason:
            self.left_out[workload.name] = reason
        elif workload not in self.workloads:
            self.workloads.append(workload)
            self._samples[workload.name] = _Samples()

    def _misfit(self, workload: Workload) -> str:
        if workload.length > self.loaded.max_seq_len:
            return f"{workload.length} tokens do not fit into {self.loaded.max_seq_len}; see --max-seq-len"
        return ""

    def round(self, keep: bool = True) -> None:
        """Run every workload once; `keep` False: a warm-up."""
        for workload in self.workloads:
            self.measure(workload, keep)

    def measure(self, workload: Workload, keep: bool = True) -> tuple[float, dict[str, Any] | None]:
        """Run one workload once, with prompts of its own: tokens a second, and the state of the machine just before."""
        self._count += 1
        state = machine_state(self.loaded.parts.backend)
        timing = self._run(workload)
        value = workload.rate(timing.first - timing.begin, timing.last - timing.begin, timing.tokens)
        if keep:
            self._note(workload, timing, state, value)
        return value, state

    def _note(self, workload: Workload, timing: _Timing, state: dict[str, Any] | None, value: float) -> None:
        samples = self._samples[workload.name]
        samples.values.append(value)
        samples.first_ms.append(1e3 * (timing.first - timing.begin))
        samples.total_s.append(timing.last - timing.begin)
        samples.python.append(timing.python)
        samples.states.append(state)

    def _run(self, workload: Workload) -> _Timing:
        for request in self._requests(workload):
            self.core.submit(request, self.clock())
        metrics = self.core.metrics
        before, steps = dict(metrics.phase_seconds), metrics.num_steps
        begin, first, last, tokens = self.clock(), 0.0, 0.0, 0
        while self.core.has_work:
            events = self.core.step(self.clock())
            now = self.clock()
            for event in events:
                if event.error is not None:
                    raise OctavoError(f"{workload.name}: {event.error}")
                if event.kind == EventKind.TOKEN:
                    first, last, tokens = first or now, now, tokens + 1
        if tokens != workload.streams * workload.output:
            raise OctavoError(f"{workload.name}: {tokens} tokens came of {workload.streams * workload.output}")
        phases = {name: seconds - before[name] for name, seconds in metrics.phase_seconds.items()}
        return _Timing(begin, first, last, tokens, metrics.num_steps - steps, phases)

    def _requests(self, workload: Workload) -> Iterator[Request]:
        parts = self.loaded.parts
        params = SamplingParams(temperature=0.0, max_tokens=workload.output, ignore_eos=True)
        for stream, prompt in enumerate(workload.prompts(parts.config.vocab_size, self._count)):
            yield Request(
                f"{workload.name}/{self._count}/{stream}",
                prompt,
                params,
                arrival=self.clock(),
                model=parts.name,
                namespace=parts.namespace(""),
            )

    # ---- what came out

    def results(self) -> list[dict[str, Any]]:
        """One record a workload: medians, every sample, and for one stream the share of the bandwidth bound."""
        return [self._result(workload) for workload in self.workloads if self._samples[workload.name].values]

    def _result(self, workload: Workload) -> dict[str, Any]:
        samples = self._samples[workload.name]
        record: dict[str, Any] = {
            "name": workload.name,
            "kind": workload.kind,
            "streams": workload.streams,
            "prompt_tokens": workload.prompt,
            "output_tokens": workload.output,
            "tokens_per_s": median(samples.values),
            "tokens_per_s_range": [min(samples.values), max(samples.values)],
            "first_token_ms": median(samples.first_ms),
            "total_s": median(samples.total_s),
            "python_share": median(share for share, _ in samples.python),
            "python_ms_per_step": 1e3 * median(seconds for _, seconds in samples.python),
            "bytes_per_step": None,
            "share_of_bound": None,
            "share_by_state": {},
            "samples": [
                {"tokens_per_s": value, "state": state}
                for value, state in zip(samples.values, samples.states, strict=True)
            ],
        }
        if workload.kind == "decode" and native_engine(self.loaded.parts.backend) is not None:
            self._add_shares(workload, samples, record)
        return record

    def _add_shares(self, workload: Workload, samples: _Samples, record: dict[str, Any]) -> None:
        size = self.step_bytes(workload)
        shares: dict[str, list[float]] = {}
        for value, state in zip(samples.values, samples.states, strict=True):
            if state is not None:
                shares.setdefault(state["name"], []).append(value * size / (1e9 * state["read_gb_s"]))
        every = [share for found in shares.values() for share in found]
        record["bytes_per_step"] = size
        record["share_of_bound"] = median(every) if every else None
        record["share_by_state"] = {
            name or "one thread": {"share": median(found), "samples": len(found)} for name, found in shares.items()
        }

    def step_bytes(self, workload: Workload) -> int:
        """Bytes of weights, and of keys and values, that a mean step of one stream reads; native only."""
        from octavo.engine.bench_cost import kv_bytes_per_token, weight_bytes_per_step

        model = self.loaded.parts.model
        context = workload.prompt + (workload.output + 1) / 2  # tokens that the mean step after the first reads
        return int(weight_bytes_per_step(model) + context * kv_bytes_per_token(model, self.loaded.config.page_size))
