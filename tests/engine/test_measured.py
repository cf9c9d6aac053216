"""What an engine measures of its requests: where the time to the first token went, and whose its core-seconds are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_harness import make_core, make_request, tiny_parts
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.engine.histogram import Histogram
from octavo.engine.output import OutputRouter, merge_deltas
from octavo.engine.stats import engine_stats
from octavo.engine.tenants import MAX_METRIC_TENANTS, CoreSeconds, TenantLabels
from octavo.serve.metric_table import METRICS

NAMES = st.sampled_from("abcde")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["step", "same", "end"]),
        st.lists(st.tuples(NAMES, st.integers(1, 9)), min_size=1),
        st.floats(0, 9),
    ),
    max_size=90,
)


@given(STEPS)
def test_core_seconds_are_shared_by_tokens_and_none_is_lost(steps: list[Any]) -> None:
    costs, given_to = CoreSeconds(cores=3), dict.fromkeys("abcde", 0.0)
    total, last = 0.0, (("a",), [1])
    for name in "abcde":
        costs.enter(name, f"tenant {name}")
    for kind, rows, seconds in steps:
        if kind == "end":
            name = rows[0][0]
            assert math.isclose(costs.leave(name), given_to[name], abs_tol=1e-9)
            costs.enter(name, f"tenant {name}")
            given_to[name] = 0.0
            continue
        if kind == "step":
            last = tuple(name for name, _ in rows), [count for _, count in rows]
        active, counts = last
        costs.step(active, None if set(counts) == {1} else counts, seconds)
        total += 3 * seconds
        for name, count in zip(active, counts, strict=True):
            given_to[name] += 3 * seconds * count / sum(counts)
    for name, seconds in given_to.items():
        assert math.isclose(costs.leave(name), seconds, abs_tol=1e-9)
    assert math.isclose(sum(costs.by_label.values()), total, abs_tol=1e-9)


def test_what_is_shared_reaches_the_counters_while_the_batch_stays() -> None:
    costs = CoreSeconds()
    costs.enter("a", "ann")
    for _ in range(1000):
        costs.step(("a",), None, 1.0)
    assert costs.by_label["ann"] > 900.0


@given(st.lists(st.integers(-1, 60).map(lambda number: "" if number < 0 else f"key {number}"), max_size=200))
@example([f"key {number}" for number in range(60)])
def test_tenants_have_boundedly_many_labels(tenants: list[str]) -> None:
    labels = TenantLabels()
    seen = [labels.seat(tenant) for tenant in tenants]
    assert len({*seen, labels.find("never seen")}) <= MAX_METRIC_TENANTS + 1
    first = list(dict.fromkeys(tenant or "none" for tenant in tenants))[:MAX_METRIC_TENANTS]
    assert all(label == (tenant or "none") for tenant, label in zip(tenants, seen, strict=True) if tenant in first)
    assert labels.find("never seen") == "other"


@given(st.lists(st.floats(0, 700)))
def test_a_histogram_counts_up_to_its_edges(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    told = histogram.told("x")
    for index, edge in enumerate(histogram.edges):
        assert sum(histogram.counts[: index + 1]) == sum(value <= edge for value in values)
    assert told["x/le/inf"] == sum(value > 640 for value in values) and told["x/sum"] == pytest.approx(sum(values))


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def measured() -> tuple[Any, dict[str, Any], list[Any]]:
    """A core that has run three requests, two at a time, with its events and the times of its requests."""
    clock, params = Ticking(), SamplingParams(max_tokens=4, ignore_eos=True)
    core = make_core("llama", max_running_requests=2, clock=clock)
    for index in range(3):
        core.submit(make_request(f"r{index}", (1, 2, 3 + index), params, tenant="ann"), clock())
    events = []
    while core.has_work:
        events += core.step(clock())
    return core, core.metrics.requests, events


def test_a_first_token_says_what_its_time_went_into() -> None:
    _, requests, events = measured()
    firsts = {e.request_id: e.spent for e in events if e.kind is EventKind.TOKEN and e.index == 0}
    assert {name: sum(spent) for name, spent in firsts.items()} == {n: t.ttft for n, t in requests.items()}
    assert all(min(spent) > 0.0 for spent in firsts.values())
    assert firsts["r2"][0] > firsts["r0"][0]  # it waited for a slot
    assert not [e for e in events if e.kind is EventKind.TOKEN and e.index > 0 and e.spent]


def test_an_end_says_what_the_request_cost() -> None:
    core, requests, events = measured()
    ends = {e.request_id: e.spent for e in events if e.kind is EventKind.REQUEST_END}
    assert {n: decode for n, (decode, _) in ends.items()} == {
        n: t.finished - t.first_token for n, t in requests.items()
    }
    busy = sum(step.ended - step.started for step in core.metrics.steps)
    assert sum(cost for _, cost in ends.values()) == pytest.approx(busy * core.metrics.costs.cores)
    assert core.metrics.totals()["core_seconds/ann"] == pytest.approx(busy * core.metrics.costs.cores)


def test_readers_get_both_accounts() -> None:
    core = make_core("llama")
    router, request = OutputRouter(core, tiny_parts("llama").tokenizer), make_request("r", (1, 2), SamplingParams())
    core.submit(request, 0.0)
    router.open(request)
    deltas = []
    while core.has_work:
        deltas += router.take(core.step(0.0))
    assert [bool(delta.first) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [bool(delta.spent) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    merged = merge_deltas(deltas)
    assert merged.first == deltas[0].first and merged.spent == deltas[-1].spent


def test_every_statistic_is_a_metric_and_every_metric_a_statistic() -> None:
    core, _, _ = measured()
    told = {**engine_stats(core), **core.metrics.totals()}
    names = {name.partition("/")[0] for name in told}
    always = {metric.stat.rstrip("/") for metric in METRICS if not metric.when} - {""}
    known = {"last_step_age", "kv_usage", "live_objects", "log_lines_dropped"}  # to the front end, or to the process
    assert always - names == known
    assert names - always == {"max_running", "mean_step_seconds", "last_step_ended", "output_tokens", "token_gaps"}
    gaps = sum(value for name, value in told.items() if name.startswith("token_gap/le/"))
    assert gaps == told["token_gaps"] == 9 and told["token_gap/sum"] > 0.0
    assert sum(value for name, value in told.items() if name.startswith("step_tokens/le/")) == told["steps"]
