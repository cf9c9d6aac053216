"""What an engine measures of itself: times of each request, use of each step, pages held.

TTFT is first token minus submission; TPOT is the mean gap between the tokens of a choice after its first; throughput
counts output tokens only; batch utilization is scheduled tokens over the token budget of the steps that ran.

A step's time has names, and they add up: plan, prepare (arrays in, results out), model (the backend's call), commit,
measure (this file, the audit). What readers of the step's events do before the next one is deliver.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.core.batch import ScheduleDecision, ScheduledRow, StepRows
from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.engine.gaps import GapMeter
from octavo.engine.histogram import SEQUENCES, TOKENS, Histogram
from octavo.engine.tenants import CoreSeconds

_KEPT_REQUESTS = 4096
_KEPT_STEPS = 4096
_TOKEN = EventKind.TOKEN
_BY_A_TOKEN = ("stop", "length")  # what ends a choice in the step of its last token
PHASES = ("plan", "prepare", "model", "commit", "measure", "deliver")


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in seconds of the engine's clock."""

    submitted: float
    admitted: float | None = None  # begin of the first step that computed something for it
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # of the choices that have ended
    num_cached_tokens: int = 0
    num_choices: int = 0  # that have ended with tokens
    tenant: str = ""

    def parts(self, sampling: float) -> tuple[float, float, float]:
        """The time to the first token: waiting, prefill, and ``sampling`` seconds of its last step."""
        first = self.submitted if self.first_token is None else self.first_token
        admitted = first if self.admitted is None else self.admitted
        queue, sample = max(0.0, admitted - self.submitted), min(sampling, max(0.0, first - admitted))
        return queue, max(0.0, first - self.submitted - queue - sample), sample

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after each choice's first; None until a token has ended a choice."""
        gaps = self.num_output_tokens - self.num_choices
        if self.first_token is None or self.last_token is None or gaps < 1:
            return None
        # choices run side by side: the span of the request covers the gaps of each
        return (self.last_token - self.first_token) * self.num_choices / gaps


@dataclass(slots=True)  # not frozen: one is made for every step
class StepRecord:
    """One step of the timeline."""

    step: int
    started: float
    ended: float
    active: tuple[str, ...]  # request ids of its rows, in order
    scheduled_tokens: int
    output_tokens: int
    pages_in_use: int
    wasted_slots: int  # places in the last pages of its rows' sequences that hold no token


class Metrics:
    """Counters and records of one engine. Fed by ``EngineCore``; reading it changes nothing."""

    def __init__(
        self, *, max_batched_tokens: int, page_size: int, page_bytes: int, max_gap: float = 0.0, cores: int = 1
    ) -> None:
        self.max_batched_tokens = max_batched_tokens
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.gaps = GapMeter(max_gap)
        self.costs = CoreSeconds(cores)
        self.step_tokens, self.step_sequences = Histogram(TOKENS), Histogram(SEQUENCES)
        self.temporary_bytes = 0  # activations and workspace, as planned
        self.requests: OrderedDict[str, RequestTimes] = OrderedDict()
        self.steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self.num_steps = self.num_failed_steps = 0
        self.scheduled_tokens = self.output_tokens = 0
        self.peak_pages = self.preemptions = self.swapped = 0
        self.finished: dict[str, int] = {}
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # since the start
        self._page_slots = self._wasted_slots = 0
        self._sampling = 0.0  # seconds of the step that is looked at

    @property
    def python_share(self) -> float:
        """What part of the steps' time, and of what was done with their events, was not the model's. 0 before any."""
        total = sum(self.phase_seconds.values())
        return 1.0 - self.phase_seconds["model"] / total if total > 0.0 else 0.0

    def spent(self, phase: str, seconds: float) -> None:
        """Add to one of `PHASES`."""
        self.phase_seconds[phase] += seconds

    def submitted(self, request_id: str, num_prompt_tokens: int, now: float, tenant: str = "") -> None:
        """A request was accepted."""
        self.requests[request_id] = RequestTimes(now, num_prompt_tokens=num_prompt_tokens, tenant=tenant)
        self.costs.enter(request_id, tenant)
        while len(self.requests) > _KEPT_REQUESTS:
            self.requests.popitem(last=False)

    def failed(self, events: Sequence[TokenEvent], now: float) -> None:
        """A step was rolled back."""
        self.num_failed_steps += 1
        self.saw(events, now)

    def stepped(
        self,
        decision: ScheduleDecision,
        events: Sequence[TokenEvent],
        started: float,
        ended: float,
        pages: int,
        num_groups: int,
        sampling: float = 0.0,
    ) -> None:
        """A step was committed; ``pages`` were referenced before its commit gave any back.

        ``sampling``: what of its seconds came after the model's call.
        """
        if not decision.rows:
            self.saw(events, ended)
            return
        active, lengths = _rows_of(decision.rows)
        if self.steps and self.steps[-1].active == active:
            active = self.steps[-1].active  # thousands of equal ones would be kept
        tokens = decision.num_scheduled_tokens
        self._sampling = sampling
        self._charge(decision.rows, active, tokens, started, ended)
        produced = self.saw(events, ended)
        wasted = num_groups * sum([-length % self.page_size for length in lengths])
        self.num_steps += 1
        self.scheduled_tokens += tokens
        if decision.preemptions:
            self.preemptions += len(decision.preemptions)
            self.swapped += sum(lost.kind == "swap" for lost in decision.preemptions)
        self.peak_pages = max(self.peak_pages, pages)
        self._page_slots += wasted + num_groups * sum(lengths)
        self._wasted_slots += wasted
        self.steps.append(StepRecord(decision.step, started, ended, active, tokens, produced, pages, wasted))

    def _charge(
        self, rows: Sequence[ScheduledRow], active: tuple[str, ...], tokens: int, started: float, ended: float
    ) -> None:
        """Who was computed for, and at what cost."""
        self.step_tokens.add(tokens)
        self.step_sequences.add(len(active))
        others = rows.others if isinstance(rows, StepRows) else rows
        for row in others:
            times = self.requests.get(row.request_id)
            if times is not None and times.admitted is None:
                times.admitted = started
        plain = tokens == len(active)
        counts = None if plain else [1] * (len(active) - len(others)) + [len(row.token_ids) for row in others]
        self.costs.step(active, counts, ended - started)

    def saw(self, events: Sequence[TokenEvent], now: float) -> int:
        """Times of the requests that ``events`` speak of. Returns the number of tokens among them."""
        self.gaps.saw(events, now)
        produced, listed = 0, events
        if isinstance(events, StepEvents):  # no request's first tokens are among the columns
            produced, listed = len(events.branches), events.others
        for event in listed:
            times = self.requests.get(event.request_id)
            if event.kind is _TOKEN:
                produced += 1
                if times is not None and times.first_token is None:
                    times.first_token = now
                    event.spent = times.parts(self._sampling)
            else:
                self._saw_end(event, times, now)
        self.output_tokens += produced
        return produced

    def _saw_end(self, event: TokenEvent, times: RequestTimes | None, now: float) -> None:
        """The end of a choice, or of a request."""
        if event.kind is EventKind.REQUEST_END:
            self.finished[event.finish_reason or ""] = self.finished.get(event.finish_reason or "", 0) + 1
            first = None if times is None else times.first_token
            event.spent = (0.0 if first is None else now - first, self.costs.leave(event.request_id), *event.spent)
        if times is None:
            return
        times.num_cached_tokens = max(times.num_cached_tokens, event.num_cached_tokens)
        if event.kind is EventKind.REQUEST_END:
            times.finished = now
        elif event.num_output_tokens:
            times.num_output_tokens += event.num_output_tokens
            times.num_choices += 1
            if event.finish_reason in _BY_A_TOKEN:
                times.last_token = now

    def totals(self) -> dict[str, float]:
        """Histograms, gaps, and seconds by phase and by tenant as flat statistics; callable from any thread."""
        return {
            **self.gaps.summary(),
            **self.gaps.histogram().told("token_gap"),
            **self.step_tokens.told("step_tokens"),
            **self.step_sequences.told("step_sequences"),
            **{f"phase_seconds/{phase}": seconds for phase, seconds in self.phase_seconds.items()},
            **{f"core_seconds/{label}": seconds for label, seconds in self.costs.by_label.copy().items()},
        }

    def summary(self) -> dict[str, Any]:
        """All measures as plain values; None where nothing was measured."""
        busy = sum(step.ended - step.started for step in self.steps)
        budget = self.num_steps * self.max_batched_tokens
        return {
            "steps": self.num_steps,
            "failed_steps": self.num_failed_steps,
            "preemptions": self.preemptions,
            "scheduled_tokens": self.scheduled_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": _mean([times.ttft for times in self.requests.values()]),
            "tpot_s": _mean([times.tpot for times in self.requests.values()]),
            "output_tokens_per_s": sum(s.output_tokens for s in self.steps) / busy if busy > 0 else None,
            "batch_utilization": self.scheduled_tokens / budget if budget else None,
            "kv_peak_bytes": self.peak_pages * self.page_bytes,
            "python_share": self.python_share,
            "phase_seconds": dict(self.phase_seconds),
            "page_internal_fragmentation": self._wasted_slots / self._page_slots if self._page_slots else 0.0,
            **self.gaps.summary(),
            "finished": dict(sorted(self.finished.items())),
        }

    def timeline(self) -> list[Mapping[str, Any]]:
        """The kept steps as plain values, oldest first."""
        return [asdict(step) for step in self.steps]


def _rows_of(rows: Sequence[ScheduledRow]) -> tuple[tuple[str, ...], list[int]]:
    """The request of each row, and how many of its sequence's tokens have K/V after the step."""
    active, lengths, others = [], [], rows
    if isinstance(rows, StepRows):
        active, lengths, others = rows.request_ids, [start + 1 for start in rows.starts], rows.others
    if others:
        active = active + [row.request_id for row in others]
        lengths += [row.start + len(row.token_ids) for row in others]
    return tuple(active), lengths


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
