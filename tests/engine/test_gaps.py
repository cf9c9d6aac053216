"""Gaps are measured as they are, and the operator is told what their bound costs."""

from __future__ import annotations

import logging

import pytest
from engine_harness import make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.events import EventKind
from octavo.core.gap import GapControl
from octavo.core.params import SamplingParams
from octavo.core.step_model import StepModel
from octavo.engine.gaps import GapMeter, GapWatch
from octavo.engine.stats import engine_stats


class Ticking:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=15, deadline=None)
@given(
    plans=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 12), st.sampled_from([None, 0]), st.integers(0, 20)),
        min_size=1,
        max_size=5,
    ),
    spans=st.lists(st.floats(0.001, 0.2), min_size=8, max_size=8),
)
def test_every_gap_is_counted_once_and_as_it_was(plans, spans):
    """Plain decodes as columns, others singly, first tokens without a gap: against times kept for each choice."""
    core = make_core(max_running_requests=3)
    clock = core.clock = Ticking()
    seen, last = [], {}
    waiting = sorted(enumerate(plans), key=lambda item: item[1][3])
    for turn in range(400):
        while waiting and waiting[0][1][3] <= turn:
            number, (prompt, output, logprobs, _) = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0, max_tokens=output, logprobs=logprobs, ignore_eos=True, n=1 + turn % 2
            )
            core.submit(make_request(f"r{number}", [3] * prompt, params), clock.now)
        if not core.has_work:
            clock.now += 5.0
            continue
        clock.now += spans[turn % len(spans)]
        for event in core.step(clock.now):
            if event.kind is EventKind.TOKEN:
                key = (event.request_id, event.choice)
                seen += [clock.now - last[key]] if key in last else []
                last[key] = clock.now
    meter = core.metrics.gaps
    assert not core.has_work and meter.num_gaps == len(seen)
    assert not meter._last or meter._steady  # nothing is kept of what has ended
    if seen:
        for share in (0.5, 0.99, 1.0):
            true = sorted(seen)[max(0, -int(-share * len(seen) // 1) - 1)]
            assert meter.quantile(share) == pytest.approx(true, rel=0.021)


def test_gaps_above_the_bound_are_counted():
    meter = GapMeter(0.05)
    meter._add(0.049, 3)
    meter._add(0.051, 2)
    assert (meter.num_gaps, meter.num_above) == (5, 2)
    assert GapMeter().quantile(0.5) == 0.0


def test_who_takes_anothers_place_has_gaps_of_its_own():
    """One of two that decode is preempted and another one goes on: no event tells of either."""
    a, b, c = (make_request(name, [1], SamplingParams()).branches[0] for name in "abc")
    meter = GapMeter()
    for now, branches in ((1.0, [a, b]), (1.1, [a, b]), (1.3, [a, c]), (1.6, [a, b])):
        meter._saw_drawn(branches, now)
    assert meter.num_gaps == 3 + 2  # of a; of b, the second over the time in which it had no slot
    assert meter.quantile(1.0) == pytest.approx(0.5, rel=0.021)


def test_a_bound_shows_in_the_statistics():
    core = make_core(max_token_gap_ms=50)
    core.submit(make_request("r", [1, 2, 3], SamplingParams(max_tokens=3)), 0.0)
    while core.has_work:
        core.step(0.0)
    stats = engine_stats(core)
    assert stats["gap_bound_s"] == 0.05 and stats["gap_steps_limited"] == 0
    core.scheduler.step_model.step_seconds = 0.25
    assert engine_stats(core)["mean_step_seconds"] == 0.25
    assert "gap_bound_s" not in engine_stats(make_core())


def test_the_model_learns_whole_cycles():
    """From the end of a step to the end of the next: what readers do in between belongs to it; idle time does not."""
    core = make_core()
    clock = core.clock = Ticking()
    told = []
    core.scheduler.observe = told.append
    execute = core.executor

    def slow(decision):
        clock.now += 0.25
        return execute(decision)

    core.executor = slow
    for name in ("a", "b"):
        core.submit(make_request(name, [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)), clock.now)
        while core.has_work:
            core.step(clock.now)
            clock.now += 0.5
    assert told == [0.25, 0.75, 0.75] * 2


def test_warns_once_and_says_the_price(caplog):
    gap, meter = GapControl(0.06, StepModel()), GapMeter(0.06)
    watch = GapWatch(gap, meter)
    with caplog.at_level(logging.INFO):
        watch.look(0.0, 1.0)
        gap.steps_hopeless = 3
        watch.look(1.0, 1.0)
        watch.look(2.0, 1.0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        gap.steps_limited, gap.seconds_lost = 5, 2.0
        watch.look(61.0, 40.0)
        watch.look(200.0, 40.0)
    assert len(caplog.records) == 2 and "cost 5.0% of the time" in caplog.records[1].getMessage()
