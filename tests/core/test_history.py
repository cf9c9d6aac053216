"""Every wait has a name: the causes of a request's time add up to it, whatever happens."""

import pytest
from builders import Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from random_run import PLANS, Run, worlds
from test_overlap import OverlappedRun

from octavo.core.errors import InvalidInput
from octavo.core.explain import explain, waited_behind
from octavo.core.history import CAUSES, history_of
from octavo.core.timeline import Timeline


def check_sums(history):
    for life in history.lives.values():
        assert life.end is not None and set(life.sums) <= set(CAUSES)
        explained = explain(history, life.request)
        assert explained.total == pytest.approx(life.wall, rel=1e-9, abs=1e-9)
        assert all(cause.detail for cause in explained.causes)
        if life.spans:
            assert life.spans[0].start == life.arrival and life.spans[-1].end == life.end
            assert all(a.end == b.start for a, b in zip(life.spans, life.spans[1:], strict=False))


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_causes_add_up_in_every_run(world, plans, measured):
    """With and without a clock around the steps."""
    run = Run(world, plans)
    ring = Timeline(100_000)
    run.scheduler.timeline.listen(lambda kind, t, values: ring.record(kind, t, **values))
    run.play()
    events = list(ring)
    history = history_of(with_clock(events) if measured else events)
    assert set(history.lives) == {event["request"] for event in events if event["kind"] == "submit"}
    check_sums(history)
    told = sum(life.outputs for life in history.lives.values())
    assert told >= sum(event.kind.value == "token" for event in run.bench.events)


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_causes_add_up_with_overlap(world, plans, early):
    run = OverlappedRun(world, plans, early, 0)
    ring = Timeline(100_000)
    run.scheduler.timeline.listen(lambda kind, t, values: ring.record(kind, t, **values))
    run.play()
    history = history_of(ring)
    check_sums(history)
    told = sum(life.outputs for life in history.lives.values())
    assert told >= sum(event.kind.value == "token" for event in run.bench.events)


def with_clock(events):
    """The same with readings: each step takes 0.8 of a second, its text 0.02."""
    step = None
    for event in events:
        if step is not None and event["kind"] not in ("finish", "cancel"):
            yield {"kind": "measured", "step": step, "plan": 100_000, "prepare": 0, "model": 500_000, "commit": 200_000}
            yield {"kind": "delivered", "spent": 20_000}
            step = None
        yield event
        if event["kind"] in ("tokens", "rollback"):
            step = event["step"]


class Clocked:
    """A bench whose steps take a tenth of a second, and a hundredth passes between them."""

    def __init__(self, kv=None, **config):
        self.bench = Bench(kv or make_kv(), **config)
        self.now = 10.0

    def submit(self, name, prompt, **values):
        self.bench.submit(make_request(name, prompt, arrival=self.now - 0.05, **values))
        return self

    def step(self, budget=512):
        scheduler = self.bench.scheduler
        decision = scheduler.step(budget, self.now)
        if decision.rows:
            times = {"plan": 10_000, "prepare": 0, "model": 80_000, "commit": 10_000}
            scheduler.timeline.record("measured", self.now + 0.1, step=decision.step, **times)
            scheduler.timeline.record("delivered", self.now + 0.1, spent=4_000)
        self.now += 0.11
        return self

    def run(self):
        while self.bench.scheduler.has_work:
            self.step()
        history = history_of(self.bench.scheduler.timeline)
        check_sums(history)
        return history

    def read(self, name, after):
        self.bench.scheduler.timeline.record("read", self.now + after, request=name)


def causes(history, name):
    return {cause.name: round(cause.seconds, 6) for cause in explain(history, name).causes}


def detail(history, name, cause):
    return next(found.detail for found in explain(history, name).causes if found.name == cause)


def test_a_life_alone():
    clocked = Clocked(max_prefill_chunk=4).submit("a", range(1, 11), max_tokens=3)
    history = clocked.run()
    assert causes(history, "a") == {
        "arriving": 0.05,
        "prefill": 0.3,
        "decode": 0.2,
        "detokenize": 5 * 0.004,
        "between": pytest.approx(4 * 0.006),
    }
    life = history.lives["a"]
    assert (life.chunks, life.steps, life.outputs, life.reason) == (3, 2, 3, "length")
    assert life.first_token == pytest.approx(10.32) and life.longest_gap == pytest.approx(0.11)
    assert detail(history, "a", "prefill") == "10 tokens, 0 of them from the prefix cache"
    assert history.steps[0].model == pytest.approx(0.08)


def test_a_grammar_is_compiled_before_a_request_comes():
    clocked = Clocked()
    for name in ("a", "nobody"):
        clocked.bench.scheduler.timeline.record("compiled", clocked.now - 0.01, request=name, seconds=0.03)
    history = clocked.submit("a", [1], max_tokens=1).submit("b", [2], max_tokens=1).run()
    found = causes(history, "a")
    assert list(found)[:2] == ["grammar", "arriving"] and (found["grammar"], found["arriving"]) == (0.03, 0.02)
    assert "grammar" not in causes(history, "b")


def test_a_client_that_does_not_read():
    clocked = Clocked().submit("a", [1, 2], max_tokens=2)
    clocked.run()
    clocked.read("a", 2.0)
    clocked.read("nobody", 3.0)
    history = history_of(clocked.bench.scheduler.timeline)
    check_sums(history)
    assert causes(history, "a")["client"] == pytest.approx(clocked.now + 2.0 - (10.11 + 0.1 + 0.004))


def test_who_is_waited_behind_is_named():
    clocked = Clocked(max_running_requests=1).submit("a", [1, 2, 3], max_tokens=4).step()
    clocked.submit("b", [4], max_tokens=1)
    history = clocked.run()
    found = causes(history, "b")
    assert found["queued"] == pytest.approx(3 * 0.11) and found["prefill"] == 0.1
    assert waited_behind(history, history.lives["b"], "queued") == {"a": pytest.approx(0.3)}
    assert detail(history, "b", "queued") == "behind a (0.300 s)"


def test_others_are_added_up():
    clocked = Clocked(max_running_requests=5)
    for i in range(5):
        clocked.submit(f"r{i}", [i + 1], max_tokens=3)
    clocked.step().submit("late", [9], max_tokens=1)
    history = clocked.run()
    assert detail(history, "late", "queued").endswith("2 others (0.080 s)")


def test_waiting_for_pages():
    clocked = Clocked(make_kv(3)).submit("a", range(1, 9), max_tokens=3).step()
    clocked.submit("b", range(21, 30), max_tokens=1)
    history = clocked.run()
    assert causes(history, "b")["pages"] == pytest.approx(2 * 0.11)


def test_waiting_for_a_prefix_names_who_computes_it():
    clocked = Clocked(max_prefill_chunk=4).submit("a", range(1, 13), max_tokens=2).step()
    clocked.submit("b", [*range(1, 13), 50], max_tokens=1)
    history = clocked.run()
    assert causes(history, "b")["prefix"] > 0.1
    assert detail(history, "b", "prefix") == "computed by a"
    assert "12 of them from the prefix cache" in detail(history, "b", "prefill")


def test_preemption_names_for_whom():
    clocked = Clocked(make_kv(4)).submit("a", range(1, 7), max_tokens=9).submit("b", range(11, 16), max_tokens=8)
    history = clocked.run()
    found = causes(history, "b")
    assert found["preempted"] > 0.1 and found["recompute"] >= 0.1
    assert detail(history, "b", "preempted").startswith("for a; behind a (")


def test_a_failed_step_is_a_cause():
    clocked = Clocked().submit("a", [1, 2], max_tokens=2)
    failing = iter([ValueError("once")])
    clocked.bench.model.fault = lambda decision: next(failing, None)
    clocked.submit("b", [5], max_tokens=2)
    history = clocked.run()
    assert causes(history, "a")["failed"] == 0.1 and history.steps[0].failed == "ValueError: once"


def test_left_out_of_a_step():
    clocked = Clocked().submit("a", [1], max_tokens=4).submit("b", [2], max_tokens=4).step()
    clocked.step(budget=1)
    assert causes(clocked.run(), "b")["held"] == 0.1


def test_a_request_that_waits_can_be_cancelled():
    clocked = Clocked(max_running_requests=1).submit("a", [1], max_tokens=3).step().submit("b", [2]).step()
    clocked.bench.scheduler.cancel("b")
    history = clocked.run()
    assert history.lives["b"].reason == "cancelled"
    assert list(causes(history, "b")) == ["arriving", "queued"]


def test_choices_of_one_request_are_charged_once():
    clocked = Clocked(max_running_requests=2).submit("a", range(1, 6), n=3, max_tokens=3)
    history = clocked.run()
    assert history.lives["a"].outputs == 9


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [1, 3])
def test_tokens_of_a_gang_are_those_that_it_says(width, seed):
    """Its first draw has one row, and its driver may end it, so that rows do not say how many there are."""
    bench, ring = Bench(), Timeline(10_000)
    bench.scheduler.timeline.listen(lambda kind, t, values: ring.record(kind, t, **values))
    bench.submit(make_request("g", n=width, gang=True, max_tokens=9, seed=seed), make_request("a")).run()
    usage = {event.request_id: event.num_output_tokens for event in bench.events if event.kind.value == "request_end"}
    assert {name: life.outputs for name, life in history_of(ring).lives.items()} == usage


def test_a_beginning_that_is_lost_is_passed_over():
    clocked = Clocked().submit("a", [1], max_tokens=6).step()
    events = list(clocked.bench.scheduler.timeline)
    clocked.submit("b", [2]).run()
    late = list(clocked.bench.scheduler.timeline)[len(events) :]
    assert list(history_of(late).lives) == ["b"]


def test_what_is_alive_has_no_end():
    clocked = Clocked().submit("a", [1], max_tokens=6).step()
    life = history_of(clocked.bench.scheduler.timeline).lives["a"]
    assert life.end is None and life.wall == pytest.approx(0.15)


def test_refusals_are_kept_and_unknown_requests_refused():
    timeline = Timeline()
    timeline.record("refuse", 1.0, request="x", reason="full", status=429)
    history = history_of(timeline)
    assert history.refused[0]["status"] == 429
    with pytest.raises(InvalidInput, match="not in the recording"):
        explain(history, "x")


def test_the_token_before_a_preemption_is_counted():
    ring = Timeline(1000)
    bench = Bench(max_running_requests=1)
    bench.scheduler.timeline.listen(lambda kind, t, values: ring.record(kind, t, **values))
    bench.submit(make_request("bulk", bulk=True)).step()
    bench.submit(make_request("online")).run()
    assert [life.outputs for life in history_of(ring).lives.values()] == [3, 3]
