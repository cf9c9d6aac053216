"""The step model: learns what steps cost, from their measured times alone."""

from __future__ import annotations

import random
from math import log
from statistics import stdev

import pytest
from builders import Bench, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.batch import RowFlags, ScheduledRow, StepRows
from octavo.core.errors import InvalidInput
from octavo.core.step_model import FRESH, StepModel, StepWork, Tail, _Sums, positions_read, work_of

TRUE = (8e-3, 4e-4, 4e-7, 1e-3, 3e-4, 5e-8, 2e-4)


def cost(work: StepWork, factor: float = 1.0) -> float:
    return factor * sum(c * value for c, value in zip(TRUE, (1, *work), strict=True))


def some_work(dice: random.Random, prefill: bool = True, scored: float = 0.1) -> StepWork:
    decodes = dice.randrange(0, 32)
    work = StepWork(decodes, sum(dice.randrange(1, 2000) for _ in range(decodes)))
    if prefill and (dice.random() < 0.5 or not decodes):
        work = work.with_chunk(dice.randrange(2000), dice.randrange(2, 256), dice.random() < scored)
    return work


def trained(steps: int, seed: int = 0, noise: float = 0.0, outliers: float = 0.0, **kwargs: float) -> StepModel:
    dice, model = random.Random(seed), StepModel()
    learn(model, dice, steps, noise, outliers, **kwargs)
    return model


def learn(
    model: StepModel, dice: random.Random, steps: int, noise: float, outliers: float, factor: float = 1.0
) -> None:
    for _ in range(steps):
        work = some_work(dice)
        seconds = cost(work, factor) * dice.gauss(1.0, noise)
        model.observe(work, seconds * (20.0 if dice.random() < outliers else 1.0))


def worst_error(model: StepModel, factor: float = 1.0, scored: float = 0.1) -> float:
    """The largest relative error over works of a kind it has seen."""
    dice = random.Random(99)
    works = [some_work(dice, scored=scored) for _ in range(200)]
    return max(abs(model.predict(work) / cost(work, factor) - 1.0) for work in works)


def test_finds_what_the_times_were_made_of():
    assert worst_error(trained(300)) < 0.02


@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_noise_and_outliers_hardly_move_it(seed):
    model = trained(600, seed, noise=0.05)
    learn(model, random.Random(seed + 1), 300, 0.05, outliers=0.04)
    assert worst_error(model, scored=0.0) < 0.35  # steps with logprobs are too few to tell
    assert all(value >= 0.0 for value in model.coefficients)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=3, deadline=None)
def test_equal_inputs_give_equal_coefficients(seed):
    assert trained(120, seed, 0.1, 0.05).coefficients == trained(120, seed, 0.1, 0.05).coefficients


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_what_is_summed_up_late_is_what_would_be_summed_up_at_once(seed):
    class AtOnce(_Sums):
        def add(self, work, weight, target):
            super().add(work, weight, target)
            self.settle()

    late, at_once = StepModel(), StepModel()
    at_once._kinds = (AtOnce(), AtOnce())
    for model in (late, at_once):
        learn(model, random.Random(seed), 150, noise=0.1, outliers=0.05)
    assert late.coefficients == at_once.coefficients and any(late.coefficients)


def test_follows_a_machine_that_becomes_slower():
    dice, model = random.Random(1), StepModel()
    learn(model, dice, 400, 0.02, 0.0)
    learn(model, dice, 1200, 0.02, 0.0, factor=2.0)
    assert worst_error(model, 2.0) < 0.1


def test_plain_decoding_does_not_wash_out_what_prompts_cost():
    """So that a few odd chunks after it do not become all that is known of chunks."""
    model = trained(400, noise=0.05)
    before, chunk, dice = model.coefficients, StepWork(8, 8000).with_chunk(500, 200), random.Random(5)
    for _ in range(2000):
        work = some_work(dice, prefill=False)
        if work.decodes:
            model.observe(work, cost(work))
    for _ in range(8):
        model.observe(chunk, 1.15 * cost(chunk))
    assert before != model.coefficients
    assert model.predict(chunk) < 1.05 * cost(chunk)


def test_no_work_is_foretold_to_save_time():
    model = StepModel()
    for context in range(100, 200):
        model.observe(StepWork(4, context), 0.03 - 1e-4 * context)
    assert all(value >= 0.0 for value in model.coefficients)
    assert model.predict(StepWork(4, 150)) == pytest.approx(0.015, rel=0.1)


def test_what_was_never_seen_costs_nothing():
    model = StepModel()
    for context in range(100, 200):
        model.observe(StepWork(1, context), 0.01)
    assert model.predict(StepWork(1, 150)) == pytest.approx(0.01, rel=0.01)
    assert model.coefficients[3:] == (0.0, 0.0, 0.0, 0.0)
    assert not model.is_fitted


def test_the_pace_is_that_of_the_last_steps_and_one_long_step_is_not_one():
    dice, model = random.Random(3), StepModel()
    learn(model, dice, 300, 0.0, 0.0)
    usual = model.step_seconds
    assert usual == pytest.approx(sum(cost(some_work(dice)) for _ in range(2000)) / 2000, rel=0.25)
    model.observe(StepWork(8, 8000).with_chunk(500, 200), 10.0)
    assert usual < model.step_seconds < 1.2 * usual
    learn(model, dice, 200, 0.0, 0.0, factor=2.0)
    assert model.step_seconds == pytest.approx(2 * usual, rel=0.25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_say_nothing_are_passed_over(seconds):
    model = StepModel()
    model.observe(StepWork(1, 1), seconds)
    assert model.num_steps == 0 and model.coefficients == (0.0,) * 7


def test_what_is_known_of_large_chunks_fades():
    model = StepModel()
    model.observe(StepWork().with_chunk(0, 256), 0.1)
    for _ in range(100):
        model.observe(StepWork(4, 400).with_chunk(0, 16), 0.01)
    assert 16 < model.most_prefill < 128


def test_work_of_rows():
    scored, flagged = RowFlags(prompt_logprobs=1), RowFlags(sample=True, logprobs=0)
    decode = ScheduledRow("a", 0, 0, 9, (5,), 10, 3, flagged)
    chunk = ScheduledRow("b", 0, 1, 4, (1, 2, 3), 9, 0)
    asked = ScheduledRow("c", 0, 2, 0, (1, 2), 2, 0, scored)
    assert work_of([decode, chunk, asked]) == StepWork(1, 10, 2, 5, 5 + 6 + 7 + 1 + 2, 3)
    columns = StepRows(["x", "y"], [0, 0], [3, 4], [7, 11], [1, 1], [0, 0], {}, (chunk,))
    assert work_of(columns) == StepWork(2, 8 + 12, 1, 3, 18, 0)
    assert StepWork(2, 20).with_chunk(4, 3, True) == StepWork(2, 20, 1, 3, 18, 3)


@given(start=st.integers(0, 50), tokens=st.integers(0, 50))
def test_positions_read_is_a_sum(start, tokens):
    assert positions_read(start, tokens) == sum(start + i + 1 for i in range(tokens))


@given(values=st.lists(st.floats(-1, 1), max_size=40), size=st.integers(1, 20), share=st.floats(0, 0.99))
def test_tail_is_a_quantile_of_the_last_values(values, size, share):
    tail = Tail(size)
    for value in values:
        tail.add(value)
    kept = values[-size:]
    assert len(tail) == len(kept)
    found = tail.above(share)
    if kept:
        assert found in kept and sum(value > found for value in kept) <= share * len(kept)
        assert sum(value >= found for value in kept) > int(share * len(kept))
    else:
        assert found == 0.0


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=200), part=st.floats(0.1, 1))
def test_tail_keeps_the_later_part(values, part):
    tail = Tail(part=part)
    for value in values:
        tail.add(value)
    assert tail.seen == len(values)
    kept = values[-len(tail) :]
    assert tail.above(0.0) == max(kept)
    assert min(len(values), max(FRESH, int(part * len(values)))) <= len(tail) <= max(FRESH, part * len(values) + 1)


@pytest.mark.parametrize("share", [0.01, 0.001, 0.0001])
def test_what_lies_beyond_the_values_seen_is_told_from_how_they_fall_off(share):
    """Of an exponential law, whose quantiles are known, from 500 values: far closer than the largest of them is."""
    dice, found = random.Random(1), []
    for _ in range(60):
        tail = Tail()
        for _ in range(500):
            tail.add(dice.expovariate(2.0))
        found.append(tail.beyond(share))
    true = -log(share) / 2.0
    assert sum(found) / len(found) == pytest.approx(true, rel=0.05)
    assert stdev(found) < 0.2 * true
    assert Tail().beyond(share) == 0.0
    tail = Tail()
    tail.add(3.0)
    assert tail.beyond(share) == 3.0


def test_tail_needs_room():
    with pytest.raises(InvalidInput, match="size"):
        Tail(0)


def test_the_scheduler_learns_from_committed_steps_and_tells_of_it():
    bench = Bench().submit(make_request(max_tokens=4))
    bench.scheduler.observe(1.0)  # nothing was committed yet
    times = iter((0.25, 0.125, 0.0625))
    while bench.scheduler.has_work:
        bench.step()
        bench.scheduler.observe(next(times, 0.5))
        bench.scheduler.observe(9.0)  # once for each step
    assert bench.scheduler.step_model.num_steps == 4
    assert bench.scheduler.step_model.num_chunked == 1
    told = [event["seconds"] for event in bench.scheduler.timeline if event["kind"] == "observed"]
    assert told == [0.25, 0.125, 0.0625, 0.5]
