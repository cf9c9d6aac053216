"""The first token's forecast: Little's law for slots, the step model for prompts, and what they were off by."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import pytest
from builders import Bench, make_request
from cost_run import MODEL_COST, CostRun, Noise, linear, quiet
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.admission import Ask, Door, Limits, Refusal
from octavo.core.forecast import Ahead, FirstTokenForecast, Forecast, Pace, prefill_rate, prefill_seconds
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.step_model import StepModel, StepWork


def model_of(*coefficients: float) -> StepModel:
    model = StepModel()
    model.coefficients, model.num_chunked = coefficients, 100
    return model


@given(tokens=st.integers(1, 500), start=st.integers(0, 500), chunk=st.integers(1, 128))
def test_prefill_seconds_are_those_of_its_steps(tokens, start, chunk):
    model = model_of(0.01, 0.0, 0.0, 0.002, 0.0003, 1e-7, 0.0)
    left, at, seconds = tokens, start, 0.0
    while left:
        step = min(left, chunk)
        seconds += model.predict(StepWork().with_chunk(at, step))
        left, at = left - step, at + step
    assert prefill_seconds(model, tokens, start, chunk) == pytest.approx(seconds)


def test_the_rate_of_prompts():
    model = model_of(0.01, 0.001, 0.0, 0.0, 0.0001, 0.0, 0.0)
    assert prefill_rate(model, StepWork(10, 100), 200, 100) == pytest.approx(200 / (0.01 + 0.01 + 0.02))
    assert prefill_rate(model, StepWork(10, 100), 0, 100) == 0.0
    assert prefill_rate(StepModel(), StepWork(), 100, 100) == 0.0


def test_what_is_slower_counts():
    forecasts, pace = FirstTokenForecast(), Pace(slots=4, tokens_per_s=1000.0, steps=70, step_seconds=0.1)
    ahead = Ahead(sequences=9, tokens=900, running=4)
    told = forecasts.forecast(ahead, 1, 100, pace)  # nobody has left: no rate of departures
    assert (told.seconds, told.by, told.steps) == (pytest.approx(1.1), "prompts", pytest.approx(11))
    forecasts.departed(20)
    assert forecasts.departure_rate(4, pace) == 2.0
    told = forecasts.forecast(ahead, 1, 100, pace)  # ten departures, the own prompt, a step
    assert (told.seconds, told.by, told.steps) == (pytest.approx(5.2), "slots", pytest.approx(52))
    free = Pace(8, 1000.0, 70, 0.1)
    assert forecasts.forecast(Ahead(2, 200, 4), 1, 100, free).by == "prompts"
    assert forecasts.forecast(Ahead(2, 200, 7), 2, 100, free).raw == pytest.approx(3 * 20 * 0.1 / 8 + 0.2)
    assert forecasts.forecast(Ahead(0, 0, 0), 1, 100, Pace()).seconds == 0.0


def test_errors_correct_each_kind_apart():
    forecasts, pace = FirstTokenForecast(), Pace(1, 1000.0, 0, 0.1)
    for _ in range(200):
        forecasts.learn(Forecast(1.0, 1.0, "slots", 10.0), 99.0, 15)  # the clock says nothing of a count of steps
        forecasts.learn(Forecast(0.0, 0.0, "prompts"), 1.0, 1)  # nothing was foretold
    forecasts.departed(10)
    ahead = Ahead(10, 1000, 1)
    assert forecasts.forecast(ahead, 1, 0, pace).seconds == pytest.approx(1.5 * 11.1, rel=0.01)
    assert forecasts.forecast(Ahead(0, 1000, 0), 1, 0, pace).seconds == pytest.approx(1.1)
    for _ in range(200):
        forecasts.learn(Forecast(1.0, 1.0, "slots", 10.0), 1.0, 1000)
        forecasts.learn(Forecast(1.0, 1.0, "prompts", 10.0), 0.5, 1000)
    assert forecasts.forecast(ahead, 1, 0, pace).seconds == pytest.approx(3.0 * 11.1)
    assert forecasts.forecast(Ahead(0, 1000, 0), 1, 0, pace).seconds == pytest.approx(0.55, rel=0.01)


def test_one_odd_wait_teaches_little():
    forecasts, pace = FirstTokenForecast(), Pace(8, 1000.0, 0, 0.1)
    forecasts.learn(Forecast(1.0, 1.0, "prompts", 10.0), 1000.0, 1)
    assert 1.0 < forecasts.forecast(Ahead(0, 0, 0), 1, 900, pace).seconds < 1.03


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_little_holds_in_a_queue(seed):
    """Four servers, stays of about 2 s, twice the load they take: half of all forecasts are within 20%."""
    dice, door = random.Random(seed), Door(Limits(waiting=40))
    now, servers, queue, errors = 0.0, [0.0] * 4, deque(), []
    inside = []  # (end, guest)
    for number in range(3000):
        now += dice.expovariate(4.0)
        while queue and (start := max(min(servers), queue[0].arrived)) <= now:
            servers.remove(min(servers))
            guest, stay = queue.popleft(), dice.gammavariate(8.0, 0.25)
            for end, ended in sorted([pair for pair in inside if pair[0] <= start], key=lambda pair: pair[0]):
                inside.remove((end, ended))
                door.leave(ended, int(50 * end))
            door.first_token(guest, int(50 * start), start)
            if number > 500:
                errors.append(abs(guest.forecast.seconds - (start - guest.arrived)) / (start - guest.arrived + 1e-9))
            servers.append(start + stay)
            inside.append((start + stay, guest))
        guest = door.enter(Ask("", 1, 10), Pace(4, 1e6, int(50 * now), 0.02), now)
        if hasattr(guest, "arrived"):
            queue.append(guest)
    assert len(errors) > 500
    assert sorted(errors)[len(errors) // 2] < 0.2


@dataclass
class Overload:
    """Three times what a scheduler serves, for two minutes; each forecast with the wait that it was of."""

    run: CostRun
    limits: Limits
    waits: list[tuple[float, float, float]] = field(default_factory=list)  # arrived, foretold, waited
    refusals: list[Refusal] = field(default_factory=list)

    def play(self, seconds: float = 120.0) -> Overload:
        door, dice, guests, next_at, number = Door(self.limits), random.Random(7), {}, 0.0, 0
        run = self.run
        while run.clock < seconds:
            while next_at <= run.clock:
                next_at += dice.expovariate(6.0)
                number += 1
                tokens, output = dice.randrange(50, 600), dice.randrange(20, 120)
                guest = door.enter(Ask("", 1, tokens), self.pace(), run.clock)
                if isinstance(guest, Refusal):
                    self.refusals.append(guest)
                    continue
                guests[f"r{number}"] = guest
                run.submit(f"r{number}", tokens, output)
            if not run.scheduler.has_work:
                run.clock = next_at
                continue
            for event in run.step():
                guest, ended = guests[event.request_id], event.kind.value == "request_end"
                waited = door.first_token(guest, len(run.cycles), run.clock) if event.kind.value == "token" else None
                if waited is not None:
                    self.waits.append((guest.arrived, guest.forecast.seconds, waited))
                if ended:
                    door.leave(guest, len(run.cycles))
        return self

    def pace(self) -> Pace:
        scheduler = self.run.scheduler
        return Pace(8, scheduler.prefill_rate(), len(self.run.cycles), scheduler.step_model.step_seconds)

    def error(self, since: float, until: float = 1e9) -> float:
        """Half of those that came in that time were off by no more."""
        errors = [abs(told - waited) / waited for came, told, waited in self.waits if since < came < until]
        assert len(errors) >= 10
        return median(errors)


def overload(bound_ms: int, noise: Noise, limits: Limits) -> Overload:
    machine = linear(8, 0.4, 0.0004, 0.35, 0.00005, 1.0)
    return Overload(CostRun(machine, noise, bound_ms, config={"max_running_requests": 8}), limits)


@pytest.mark.parametrize("bound_ms", [0, 60])
def test_forecasts_of_the_scheduler_in_overload(bound_ms):
    """A bounded queue: half of the forecasts are within 15% of the real first token."""
    load = overload(bound_ms, quiet, Limits(waiting=24)).play()
    assert len(load.refusals) > 100 and all(1 <= refusal.retry_after <= 600 for refusal in load.refusals)
    assert load.error(20.0) < 0.15


def test_a_machine_that_stood_still_is_not_held_against_those_that_come_later():
    """Ten seconds in one step: who waited then waited longer; forecasts and queue are as before right after it."""
    load = overload(0, quiet, Limits(first_token_s=5.0))
    run, stood = load.run, []

    def once(dice: random.Random) -> float:
        if run.clock < 60 or stood:
            return quiet(dice)
        stood.append(run.clock)
        return 10.0 / run.cost(run.scheduler.last_work)

    run.noise = once
    load.play()
    [at] = stood
    after = at + 10.0
    assert load.error(20.0, at - 8.0) < 0.15
    assert load.error(after, after + 10.0) < 0.2
    waits = [waited for came, _, waited in load.waits if after + 8.0 < came < after + 30.0]
    assert min(waits) > 3.0  # the queue is as long as the bound on first tokens allows


def test_a_machine_that_becomes_slower_is_noticed_within_seconds():
    load = overload(0, quiet, Limits(first_token_s=5.0))
    load.run.noise = lambda dice: quiet(dice) * (1.0 + (load.run.clock > 60.0))
    load.play()
    assert load.error(65.0, 75.0) < 0.2


def test_the_least_time_of_a_deadline():
    bench = Bench(max_prefill_chunk=8)
    model = bench.scheduler.step_model
    model.coefficients, model.num_chunked = (0.01, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0), 100
    late = make_request("late", [1] * 33, deadline=10.0)
    assert bench.scheduler.least_seconds(late.branches[0]) == pytest.approx(0.8 * (5 * 0.01 + 0.033))
    assert bench.scheduler.least_seconds(make_request("free", [1] * 33).branches[0]) == 0.0
    bench.submit(make_request("warm", [1] * 32)).run()
    assert bench.scheduler.least_seconds(late.branches[0]) == pytest.approx(0.8 * 0.011)
    scored = Request("s", [1] * 33, SamplingParams(max_tokens=1, prompt_logprobs=0), deadline=10.0)
    assert bench.scheduler.least_seconds(scored.branches[0]) == pytest.approx(0.8 * (5 * 0.01 + 0.033))
    model.num_chunked = 0
    assert bench.scheduler.least_seconds(late.branches[0]) == 0.0


def test_the_rate_follows_the_bound():
    run = CostRun(MODEL_COST, quiet, 60, config={"max_running_requests": 16})
    free = CostRun(MODEL_COST, quiet, 0, config={"max_running_requests": 16})
    for each in (run, free):
        for i in range(8):
            each.submit(f"d{i}", 40, 400)
        for turn in range(300):
            if not turn % 60:
                each.submit(f"p{turn}", 1500, 2)
            each.step()
    assert 0 < run.scheduler.prefill_rate() < free.scheduler.prefill_rate()
    model, beside = run.scheduler.step_model, run.scheduler.last_work
    assert beside.decodes == 8
    assert run.scheduler.prefill_rate() < 0.95 * prefill_rate(model, beside, 512 - beside.decodes, 512)
