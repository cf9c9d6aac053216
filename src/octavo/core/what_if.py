"""What a recorded load would have met with other settings: the same arrivals and tokens, steps that cost as recorded.

    recording -> replay: the work of each step, the tokens of each choice, the step model as it was fitted
              -> simulation: arrivals at their times, plan, a step takes what the model says, commit its known tokens

Tokens do not depend on the schedule, so they are known whatever the order. Cancellations come at their recorded times;
where one cut a choice short that now gets further, its tokens are made up, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.batch import ScheduleDecision
from octavo.core.errors import InvalidInput
from octavo.core.facts import request_of
from octavo.core.history import History, history_of
from octavo.core.replay import Replayer, recorded_result, scheduler_for, tokens_of
from octavo.core.step_model import StepModel, work_of
from octavo.core.timeline import plain

__all__ = ["Load", "Outcome", "load_of", "outcome_of", "simulate"]

_NAP = 0.001  # seconds until a scheduler that had nothing to run is asked again
_MOST_NAPS = 10_000  # in a row
_MADE_UP = 0  # a token that was never drawn

Branch = tuple[str, int]


@dataclass
class Load:
    """What came from outside, and what the steps cost."""

    facts: Mapping[str, Any]
    arrivals: list[Mapping[str, Any]] = field(default_factory=list)  # `arrive` events, by time
    cancels: list[Mapping[str, Any]] = field(default_factory=list)
    stops: dict[Branch, Mapping[str, Any]] = field(default_factory=dict)
    tokens: dict[Branch, dict[int, int]] = field(default_factory=dict)  # by output index
    moves: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # of gangs, in order
    model: StepModel = field(default_factory=StepModel)


@dataclass(frozen=True)
class Outcome:
    """What requests met with. Times are seconds; None where nobody had a token."""

    requests: int
    finished: int  # by themselves
    dropped: int  # refused, shed, timed out, failed
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    ttft_median: float | None
    ttft_p99: float | None
    gap_median: float | None  # of the longest gap of each request
    gap_p99: float | None
    steps: int
    preemptions: int
    made_up: int = 0  # tokens that the recording does not have

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


def load_of(epoch: Sequence[Mapping[str, Any]]) -> Load:
    """The load of a recorded epoch, its ``start`` first. Raises ``InvalidInput`` if it does not replay, or if too few
    of its steps were measured to know what a step costs.
    """
    load = Load(epoch[0]["facts"])
    scheduler = scheduler_for(load.facts)
    replayer = Replayer(scheduler, on_step=lambda decision, event: _note_tokens(load, decision, event))
    for event in epoch[1:]:
        if not replayer.feed(event):
            raise InvalidInput("recording", str(replayer.difference), "does not replay as it is: nothing can be asked")
        if event["kind"] == "arrive":
            load.arrivals.append(event)
        elif event["kind"] == "ask_cancel":
            load.cancels.append(event)
        elif event["kind"] == "ask_stop":
            load.stops[event["request"], event["choice"]] = event
    load.arrivals.sort(key=lambda event: event["t"])
    load.model = scheduler.step_model
    if not load.model.is_fitted:
        raise InvalidInput(
            "recording", f"{replayer.num_steps} steps", "are too few to know what one costs: record a longer run"
        )
    return load


def _note_tokens(load: Load, decision: ScheduleDecision, event: Mapping[str, Any]) -> None:
    for move in event["moves"]:
        load.moves.setdefault(move["request"], []).append(move)
    for row, tokens in zip(decision.rows, tokens_of(event), strict=True):
        for index, token in enumerate(tokens, row.output_index):
            load.tokens.setdefault((row.request_id, row.choice), {})[index] = token


def simulate(load: Load, *, num_pages: int | None = None, **changes: Any) -> Outcome:
    """Run the load with ``changes`` to the scheduler's configuration, or another number of pages."""
    return _Simulation(load, num_pages, changes).run()


class _Simulation:
    def __init__(self, load: Load, num_pages: int | None, changes: Mapping[str, Any]) -> None:
        self.load = load
        self.scheduler = scheduler_for(load.facts, num_pages=num_pages, **changes)
        self.events: list[Mapping[str, Any]] = []
        self.scheduler.timeline.listen(
            lambda kind, t, values: self.events.append({"kind": kind, "t": t, **plain(kind, values)})
        )
        self.refused = self.made_up = self._naps = 0
        self._arrivals = list(reversed(load.arrivals))
        self._cancels = sorted(load.cancels, key=lambda event: -event["t"])
        self._stops = dict(load.stops)
        self.now = self._arrivals[-1]["t"] if self._arrivals else 0.0

    def run(self) -> Outcome:
        while self._arrivals or self.scheduler.has_work:
            self._let_in()
            decision = self.scheduler.plan(self.now)
            if decision.rows:
                self._step(decision)
            else:
                self._wait()
        outcome = outcome_of(history_of(self.events), self.events, self.refused)
        return Outcome(**{**vars(outcome), "made_up": self.made_up})

    def _let_in(self) -> None:
        while self._arrivals and self._arrivals[-1]["t"] <= self.now:
            try:
                self.scheduler.submit(request_of(self._arrivals.pop()))
            except InvalidInput:  # it does not fit into fewer pages
                self.refused += 1
        while self._cancels and self._cancels[-1]["t"] <= self.now:
            event = self._cancels.pop()
            self.scheduler.cancel(event["request"], event["reason"])

    def _wait(self) -> None:
        """Nothing can run: until the next arrival, or for a moment."""
        self._naps += 1
        if self._naps > _MOST_NAPS:
            raise InvalidInput("what if", f"{self.scheduler.num_waiting} waiting", "nothing runs any more: no progress")
        if self._arrivals and not self.scheduler.has_work:
            self.now = max(self.now, self._arrivals[-1]["t"])
        else:
            self.now += _NAP

    def _step(self, decision: ScheduleDecision) -> None:
        self._naps = 0
        seconds = self.load.model.predict(work_of(decision.rows))
        tokens = [self._token(row.request_id, row.choice, row.output_index, row.flags.sample) for row in decision.rows]
        drawn = {row.request_id: row.output_index for row in decision.rows if row.flags.sample}
        moves = [self._move(request, index) for request, index in drawn.items() if self._is_gang(request)]
        event = {"tokens": tokens, "drawn": 0, "errors": None, "moves": moves}
        self.now += seconds
        self.scheduler.commit(recorded_result(self.scheduler, decision, event), self.now)
        self.scheduler.observe(seconds)
        for row in decision.rows:
            self._stop(row.request_id, row.choice, row.output_index)

    def _token(self, request: str, choice: int, index: int, sample: bool) -> int | None:
        if not sample:
            return None
        token = self.load.tokens.get((request, choice), {}).get(index)
        self.made_up += token is None
        return _MADE_UP if token is None else token

    def _is_gang(self, request: str) -> bool:
        found = self.scheduler.get(request)
        return found is not None and found.gang

    def _move(self, request: str, index: int) -> Mapping[str, Any]:
        """How a gang went on after its token ``index``; one that is not known keeps its members apart."""
        known = self.load.moves.get(request, ())
        if index < len(known):
            return known[index]
        width = len(self.scheduler.get(request).branches)  # type: ignore[union-attr]
        parents = range(width) if index else [0] * width
        return {"request": request, "parents": parents, "tokens": [_MADE_UP] * width, "endings": None}

    def _stop(self, request: str, choice: int, index: int) -> None:
        """The last recorded token of a choice came: where its text ended it, so it does here."""
        key = (request, choice)
        if key in self._stops and index + 1 >= len(self.load.tokens.get(key, {})):
            event = self._stops.pop(key)
            self.scheduler.stop(request, choice, event["tokens"], event["stop_reason"])


def outcome_of(history: History, events: Iterable[Mapping[str, Any]], refused: int = 0) -> Outcome:
    """The figures of a history; ``events`` are those it was made of."""
    lives = list(history.lives.values())
    first = sorted(life.first_token - life.arrival for life in lives if life.first_token is not None)
    gaps = sorted(life.longest_gap for life in lives if life.outputs > 1)
    ends = [life.arrival + life.wall for life in lives]
    finished = sum(life.reason in ("stop", "length", "tool_calls") for life in lives)
    cancelled = sum(life.reason == "cancelled" for life in lives)
    ended = sum(life.end is not None for life in lives)
    return Outcome(
        requests=len(lives) + refused,
        finished=finished,
        dropped=ended - finished - cancelled + refused,
        output_tokens=sum(life.outputs for life in lives),
        seconds=max(ends, default=0.0) - min((life.arrival for life in lives), default=0.0),
        ttft_median=_at(first, 0.5),
        ttft_p99=_at(first, 0.99),
        gap_median=_at(gaps, 0.5),
        gap_p99=_at(gaps, 0.99),
        steps=len(history.steps),
        preemptions=sum(event["kind"] == "preempt" for event in events),
    )


def _at(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
