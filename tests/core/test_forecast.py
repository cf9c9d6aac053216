"""The first token's forecast: Little's law for slots, the step model for prompts, and what they were off by."""

from __future__ import annotations

import random
from collections import deque

import pytest
from builders import Bench, make_request
from cost_run import MODEL_COST, CostRun, linear, quiet
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.admission import Ask, Door, Limits
from octavo.core.forecast import Ahead, FirstTokenForecast, Forecast, prefill_rate, prefill_seconds
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
    forecasts = FirstTokenForecast()
    ahead = Ahead(sequences=9, tokens=900, running=4, slots=4, tokens_per_s=1000.0)
    assert forecasts.forecast(ahead, 1, 100) == Forecast(1.0, 1.0, "prompts")  # nobody has left: no rate of departures
    forecasts.departed(2.0)
    assert forecasts.departure_rate(4) == 2.0
    assert forecasts.forecast(ahead, 1, 100) == Forecast(5.0, 5.0, "slots")
    free = Ahead(sequences=2, tokens=200, running=4, slots=8, tokens_per_s=1000.0)
    assert forecasts.forecast(free, 1, 100).by == "prompts"
    assert forecasts.forecast(Ahead(0, 0, 0, 0, 0.0), 1, 100).seconds == 0.0


def test_errors_correct_each_kind_apart():
    forecasts = FirstTokenForecast()
    for _ in range(100):
        forecasts.learn(Forecast(1.0, 1.0, "slots"), 1.5)
        forecasts.learn(Forecast(0.0, 0.0, "prompts"), 1.0)  # nothing was foretold
    forecasts.departed(1.0)
    ahead = Ahead(10, 1000, 1, 1, 1000.0)
    assert forecasts.forecast(ahead, 1, 0).seconds == pytest.approx(1.5 * 11, rel=0.01)
    assert forecasts.forecast(Ahead(0, 1000, 0, 8, 1000.0), 1, 0) == Forecast(1.0, 1.0, "prompts")
    for _ in range(100):
        forecasts.learn(Forecast(1.0, 1.0, "slots"), 100.0)
    assert forecasts.forecast(ahead, 1, 0).seconds == pytest.approx(3.0 * 11)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_little_holds_in_a_queue(seed):
    """Four servers, exponential stays, twice the load they take: half of all forecasts are within 20%."""
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
                door.leave(ended, end)
            door.first_token(guest, start)
            if number > 500:
                errors.append(abs(guest.forecast.seconds - (start - guest.arrived)) / (start - guest.arrived + 1e-9))
            servers.append(start + stay)
            inside.append((start + stay, guest))
        guest = door.enter(Ask("", 1, 10), 4, 1e6, now)
        if hasattr(guest, "arrived"):
            queue.append(guest)
    assert len(errors) > 500
    assert sorted(errors)[len(errors) // 2] < 0.2


@pytest.mark.parametrize("bound_ms", [0, 60])
def test_forecasts_of_the_scheduler_in_overload(bound_ms):
    """Three times what it serves, a bounded queue: half of the forecasts are within 20% of the real first token."""
    run = CostRun(linear(8, 0.4, 0.0004, 0.35, 0.00005, 1.0), quiet, bound_ms, config={"max_running_requests": 8})
    door, dice = Door(Limits(waiting=24)), random.Random(7)
    guests, errors, refused, next_at, number = {}, [], 0, 0.0, 0
    while run.clock < 120:
        while next_at <= run.clock:
            next_at += dice.expovariate(6.0)
            number += 1
            tokens, output = dice.randrange(50, 600), dice.randrange(20, 120)
            guest = door.enter(Ask("", 1, tokens), 8, run.scheduler.prefill_rate(), run.clock)
            if not hasattr(guest, "arrived"):
                refused += 1
                assert 1 <= guest.retry_after <= 600
                continue
            guests[f"r{number}"] = guest
            run.submit(f"r{number}", tokens, output)
        if not run.scheduler.has_work:
            run.clock = next_at
            continue
        for event in run.step():
            guest = guests[event.request_id]
            waited = door.first_token(guest, run.clock) if event.kind.value == "token" else None
            if waited and run.clock > 20:
                errors.append(abs(guest.forecast.seconds - waited) / waited)
            if event.kind.value == "request_end":
                door.leave(guest, run.clock)
    assert refused > 100 and len(errors) > 50
    assert sorted(errors)[len(errors) // 2] < 0.2


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
