"""The bound on token gaps: it holds whatever arrives, prompts progress, and nothing is held back without need."""

from __future__ import annotations

import random

import pytest
from builders import Bench, make_request
from cost_run import Arrival, CostRun, linear, long_prompts, loud, memory_bound, quiet
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from null_model import null_tokens

from octavo.core.gap import FIRST_CHUNK, Allowance, GapControl
from octavo.core.step_model import StepModel, StepWork

MACHINES = {"linear": linear(8, 0.4, 0.0004, 0.35, 0.00005, 1.0), "memory": memory_bound(8, 0.3, 0.0004, 0.00005)}
DECODERS = [Arrival(0.0, 32, 4000) for _ in range(8)]
SLOTS = {"max_running_requests": 24}


def share_above(run: CostRun) -> float:
    return sum(gap > run.bound_ms / 1000 for gap in run.gaps) / len(run.gaps)


def model_of(*coefficients: float, prefill: int = 512) -> StepModel:
    """A fitted model with these coefficients."""
    model = StepModel()
    model.coefficients = coefficients
    model.num_steps = model.num_chunked = 100
    model.most_prefill = model.most_scored = float(prefill)
    model.most_attention = 1e9
    model.usual_error = 0.01
    return model


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("noise", [quiet, loud])
def test_the_bound_holds_at_p999_from_the_first_step_on(machine, noise):
    arrivals = DECODERS + long_prompts(5, 40, 1.5)
    run = CostRun(MACHINES[machine], noise, 60, seed=3, config=SLOTS).play(arrivals, 60)
    assert len(run.gaps) > 12_000 and len(run.first_tokens) > 30
    assert share_above(run) <= 0.001
    assert run.gap_quantile(0.999) <= 0.060
    free = CostRun(MACHINES[machine], noise, 0, seed=3, config=SLOTS).play(arrivals, 60)
    assert free.gap_quantile(0.99) > 0.120


@given(
    seed=st.integers(0, 10**6),
    weights=st.floats(2, 15),
    row=st.floats(0.05, 0.5),
    attention=st.floats(0, 0.0001),
    knee=st.booleans(),
)
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_the_bound_holds_on_any_machine(seed, weights, row, attention, knee):
    """For a minute: one step of eight decodes above it is 0.1% of the gaps."""
    machine = memory_bound(weights, row, 0.0005, attention) if knee else linear(weights, row, 0.0005, row, attention)
    run = CostRun(machine, quiet, 50, seed=seed, config=SLOTS)
    run.play(DECODERS + long_prompts(seed, 140, 0.5, output=8), 60)
    assert share_above(run) <= 0.001
    assert run.first_tokens


def test_the_price_is_sane():
    """As many prompts as the machine can take: a bound of 60 ms costs it less than a quarter of its prompts' tokens."""
    rates = []
    for bound in (0, 60):
        arrivals = DECODERS + [Arrival(0.5, 2048, 4) for _ in range(200)]
        run = CostRun(MACHINES["memory"], quiet, bound, config=SLOTS).play(arrivals, 40)
        rates.append(sum(work.prefill for work, _ in run.cycles) / run.clock)
    assert rates[1] > 0.75 * rates[0]
    gap = run.scheduler.gap
    assert gap.steps_limited > 100 and gap.tokens_held_back > 0
    assert 0.0 < gap.seconds_lost < 0.4 * gap.seconds_limited


def test_nothing_is_held_back_while_nobody_decodes():
    run = CostRun(MACHINES["linear"], quiet, 1, config={"max_running_requests": 1})
    run.play([Arrival(0.0, 2048, 1), Arrival(0.0, 1024, 1)])
    assert [work.prefill for work, _ in run.cycles] == [512] * 6
    assert run.scheduler.gap.steps_limited == 0


def test_prompts_progress_where_decodes_alone_exceed_the_bound():
    run = CostRun(MACHINES["linear"], quiet, 2, config=SLOTS)
    run.play([*DECODERS[:2], Arrival(0.1, 100, 2), Arrival(0.1, 50, 2)], 5)
    assert len(run.first_tokens) == 4
    assert run.scheduler.gap.steps_hopeless > 100
    # a row of one token is counted as a decode
    assert max(work.decodes + work.prefill for work, _ in run.cycles[30:]) <= 4


def test_prompts_that_wait_take_turns():
    """One token of prefill a step; nobody who has begun waits longer than `stall_steps` and the others' turns."""
    bench = Bench(max_token_gap_ms=1, stall_steps=4, max_running_requests=6)
    bench.submit(make_request("d", [1], max_tokens=None))
    bench.step()
    for name in "abc":
        bench.submit(make_request(name, [1 + ord(name) % 7] * 20, max_tokens=2))
    bench.step()
    while len(bench.scheduler._roster.requests) > 1:
        bench.step()
        bench.scheduler.observe(0.01)
    for name in "abc":
        assert bench.tokens(name) == null_tokens([1 + ord(name) % 7] * 20, 2, 7)


def test_a_chunk_fits_into_what_is_left():
    model = model_of(0.010, 0.001, 1e-6, 0.002, 0.0005, 1e-7, 0.0)
    gap = GapControl(0.050, model)
    gap.tail.add(0.0)
    allowance = gap.open(4, 1000)
    left = 0.050 - gap.margin - (0.010 + 0.004 + 0.001)
    assert allowance.seconds == pytest.approx(left)
    tokens = allowance.fit(300, 512)
    chunk = StepWork().with_chunk(300, tokens)
    assert model.predict(chunk) - 0.010 <= left < model.predict(StepWork().with_chunk(300, tokens + 1)) - 0.010
    allowance.take(300, tokens, 512)
    assert allowance.is_spent and allowance.fit(0, 512) == 0
    gap.close(StepWork(4, 1000).with_chunk(300, tokens), allowance)
    assert (gap.steps_limited, gap.tokens_held_back) == (1, 512 - tokens)


@given(
    start=st.integers(0, 5000),
    wanted=st.integers(1, 600),
    seconds=st.floats(-0.01, 0.1),
    rates=st.tuples(*[st.floats(0, 1e-3)] * 3),
    scored=st.booleans(),
)
def test_fit_is_the_most_that_the_model_affords(start, wanted, seconds, rates, scored):
    model = model_of(0.001, 0.0, 0.0, rates[0], rates[1], rates[2] * 1e-3, rates[2], prefill=300)
    tokens = Allowance(model, seconds).fit(start, wanted, scored)
    assert 1 <= tokens <= min(wanted, 600)

    def price(count: int) -> float:
        return model.predict(StepWork().with_chunk(start, count, scored)) - 0.001

    assert tokens == 1 or price(tokens) <= seconds + 1e-9
    if tokens < wanted:
        assert price(tokens + 1) > seconds - 1e-9


def test_little_is_trusted_before_anything_is_known():
    fresh = Allowance(StepModel(), 1.0)
    assert fresh.fit(0, 512) == FIRST_CHUNK
    model = model_of(0.001, 0.0, 0.0, 0.0, 1e-9, 1e-12, 1e-9, prefill=50)
    assert Allowance(model, 1.0).fit(0, 512) == 100
    model.most_scored = 20.0
    assert Allowance(model, 1.0).fit(0, 512, scored=True) == 40
    model.most_attention = 500.0  # a chunk of 31 from the beginning; deep in a prompt few tokens read as much
    assert Allowance(model, 1.0).fit(0, 512) == 63
    assert Allowance(model, 1.0).fit(4000, 512) == FIRST_CHUNK


def test_the_margin_follows_what_was_measured_within_bounds():
    model = model_of(0.010, 0.0, 0.0, 0.0, 0.0001, 0.0, 0.0)
    gap, work = GapControl(0.1, model), StepWork(1, 10).with_chunk(0, 100)
    assert gap.margin == pytest.approx(0.03)  # nothing seen
    for _ in range(40):
        gap.observe(work, 0.020)
    assert gap.margin == pytest.approx(0.024)
    for _ in range(200):
        gap.observe(work, 0.020)
    assert gap.margin == pytest.approx(0.008)
    gap.observe(work, 0.030)
    assert gap.margin == pytest.approx(0.010 * (1.25 - 0.25 * 241 / 1024))  # the largest of a hundred
    for seconds in (0.029, 0.028, 0.027):
        gap.observe(work, seconds)
    before = gap.margin  # several of them: there are larger ones to come
    assert 0.013 < before < 0.015
    gap.observe(StepWork(1, 10), 9.0)  # no prefill: not what the margin is for
    gap.observe(StepWork().with_chunk(0, 100), 9.0)  # nobody waited
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        gap.observe(work, seconds)  # says nothing
    assert gap.margin == before
    for _ in range(4):
        gap.observe(work, 9.0)
    assert gap.margin == pytest.approx(0.05)
    for _ in range(400):
        gap.observe(work, 0.020)  # what was before the later half is forgotten
    assert gap.margin == pytest.approx(0.008)


def test_what_the_model_is_off_by_lately_comes_out_of_the_budget():
    model = model_of(0.010, 0.0, 0.0, 0.0, 0.0001, 0.0, 0.0)
    gap, work = GapControl(0.1, model), StepWork(1, 10).with_chunk(0, 100)
    for _ in range(200):
        gap.observe(work, 0.025)
    assert gap.drift == pytest.approx(0.005, rel=0.01)
    assert gap.budget == pytest.approx(0.1 - gap.margin - 0.005, rel=0.01)
    room = gap.open(1, 10)
    assert room.seconds == pytest.approx(gap.budget - 0.010) and not gap.steps_hopeless
    assert gap.affordable(1, 10, 0) == room.fit(0, 10**9)
    gap.observe(work, 10.0)
    assert gap.drift < 0.007  # one step says little
    model.coefficients = (0.096, *model.coefficients[1:])
    gap.open(1, 10)
    assert gap.steps_hopeless == 1  # 96 ms by the model, and it is 6 off
    model.coefficients = (0.010, *model.coefficients[1:])
    for seconds, drift in ((10.0, 0.05), (1e-6, -0.02)):
        for _ in range(500):
            gap.observe(work, seconds)
        assert gap.drift == pytest.approx(drift, rel=0.01)
    for _ in range(500):
        gap.observe(StepWork(1, 10), 0.010)  # where there is no room for chunks, plain steps tell that there is again
    assert gap.drift == pytest.approx(0.0, abs=1e-6)


def test_a_machine_that_becomes_slower_keeps_the_bound_after_a_second():
    run = CostRun(MACHINES["linear"], quiet, 60, seed=1, config=SLOTS)
    run.noise = lambda dice: quiet(dice) * (1.0 + 0.6 * (run.clock > 15.0))
    run.play(DECODERS + [Arrival(0.5, 2048, 4) for _ in range(60)], 16.0)
    before = len(run.gaps)
    run.play([], 40.0)
    assert sum(gap > 0.060 for gap in run.gaps[before:]) <= 0.001 * (len(run.gaps) - before)


def test_tokens_are_the_same_with_and_without_a_bound():
    dice = random.Random(0)
    outputs = []
    for bound in (0, 1, 20):
        bench = Bench(max_token_gap_ms=bound, max_running_requests=3)
        for i in range(8):
            bench.submit(make_request(f"r{i}", [1 + (i * j) % 5 for j in range(3 + 4 * i)], n=1 + i % 2, max_tokens=6))
        while bench.scheduler.has_work:
            bench.step()
            bench.scheduler.observe(dice.uniform(0.001, 0.03))
        outputs.append([bench.tokens(f"r{i}", c) for i in range(8) for c in range(1 + i % 2)])
    assert outputs[0] == outputs[1] == outputs[2]
