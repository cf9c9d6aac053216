"""A recording runs again: the same steps, or the first difference by name."""

import copy
import io

import pytest
from builders import Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from null_model import NullModel
from random_run import PLANS, Run, worlds
from test_overlap import OverlappedRun

from octavo.core.errors import InvalidInput, RowError
from octavo.core.facts import facts_of, request_of, scheduler_facts
from octavo.core.policies import POLICIES, PolicySettings
from octavo.core.recording import MAGIC, FrameWriter, RecordingReader
from octavo.core.replay import Replayer, scheduler_for
from octavo.core.request import Request


class Tape:
    """Records a scheduler into bytes, and reads them back."""

    def __init__(self, scheduler) -> None:
        self.out = io.BytesIO()
        self.writer = FrameWriter(self.out.write)
        self.writer.add("start", 0.0, {"process": "test", "epoch": 0, "facts": scheduler_facts(scheduler)})
        scheduler.timeline.listen(self.writer.add)

    def events(self, end=True):
        if end:
            self.writer.add("end", 0.0, {})
        self.writer.flush()
        reader = RecordingReader(io.BytesIO(MAGIC + self.out.getvalue()).read)
        events = list(reader)
        assert reader.damage is None
        return events


def replay(events, model=False, **changes):
    scheduler = scheduler_for(events[0]["facts"], **changes)
    replayer = Replayer(scheduler, NullModel(scheduler.kv, scheduler.vocab_size) if model else None)
    for event in events[1:]:
        if not replayer.feed(event):
            break
    return replayer


def faults(draw_from):
    """A model that now and then fails: a row by name, some rows alone, or the whole step."""

    def fault(decision):
        kind = draw_from[decision.step % len(draw_from)]
        last = len(decision.rows) - 1
        return {"row": RowError((last,), "row"), "some": {last: "bad luck"}, "all": ValueError("no")}.get(kind)

    return fault


FAULTS = st.lists(st.sampled_from(["", "", "", "", "row", "some", "all"]), min_size=1, max_size=9)


def random_tape(world, plans, draw, kinds):
    run = Run(world, plans)
    run.model.always_draws = draw
    run.model.fault = faults(kinds)
    run.blamed = set(run.plans)
    tape = Tape(run.scheduler)
    run.play()
    return tape.events()


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), st.booleans(), FAULTS)
@settings(max_examples=80, deadline=None)
def test_every_run_replays(world, plans, draw, kinds):
    events = random_tape(world, plans, draw, kinds)
    replayer = replay(events)
    assert str(replayer.difference) == "None"
    assert replayer.num_steps == len([e for e in events if e["kind"] in ("tokens", "rollback")])
    assert not replayer.scheduler.has_work
    replayer.scheduler.audit()


@given(worlds(), st.lists(PLANS, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_every_run_replays_on_the_model(world, plans):
    replayer = replay(random_tape(world, plans, True, [""]), model=True)
    assert replayer.difference is None


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), st.booleans(), st.sampled_from([0, 0, 5]))
@settings(max_examples=30, deadline=None)
def test_a_run_with_overlap_replays(world, plans, early, fails):
    run = OverlappedRun(world, plans, early, fails)
    tape = Tape(run.scheduler)
    run.play()
    assert str(replay(tape.events()).difference) == "None"


@pytest.mark.parametrize("policy", [*POLICIES, "priority,fair", "fair,prefix", "deadline,shortest"])
def test_every_policy_replays(policy):
    settings = PolicySettings(ageing_s=0.5, weights=(("t0", 3), ("t1", 1)))
    bench = Bench(make_kv(14), policy=policy, policies=settings, max_running_requests=3, max_batched_tokens=9)
    tape, now = Tape(bench.scheduler), 0.0
    for i in range(60):
        if i < 24:
            prompt = [*range(1, 2 + i % 5), 50 + i % 7]
            about = {"tenant": f"t{i % 3}", "priority": i % 2, "deadline": now + 0.15 if i % 4 == 3 else None}
            about["bulk"] = i % 5 == 4
            bench.submit(make_request(f"r{i}", prompt, max_tokens=3 + i % 6, arrival=now, **about))
        if i in (9, 30):
            bench.scheduler.flush_cache()
        bench.scheduler.step(9, now)
        now += 0.1 + i / 700
    bench.run()
    events = tape.events()
    assert replay(events).difference is None
    assert {e["finish_reason"] for e in events if e["kind"] == "cancel"} >= {"timeout"}


def test_what_was_measured_is_replayed():
    """The bound on token gaps sizes prefills by what steps took: with other times they come out otherwise."""
    bench = Bench(make_kv(200), max_token_gap_ms=20, max_prefill_chunk=64)
    tape, now = Tape(bench.scheduler), 0.0
    for i in range(90):
        if i % 6 == 0:
            bench.submit(make_request(f"r{i}", [i + 1] * (20 + i % 40), max_tokens=30, arrival=now))
        decision = bench.scheduler.step(64, now)
        seconds = 0.002 + 0.0004 * decision.num_scheduled_tokens * (1 + i % 3 / 10)
        bench.scheduler.observe(seconds)
        now += seconds
    events = tape.events()
    assert replay(events).difference is None
    slower = [{**e, "seconds": 3 * e["seconds"]} if e["kind"] == "observed" else e for e in events]
    assert "decision: rows was" in str(replay(slower).difference)


def bench_tape(**config):
    bench = Bench(make_kv(12), max_batched_tokens=8, **config)
    tape = Tape(bench.scheduler)
    bench.submit(*(make_request(f"r{i}", range(1, 8), max_tokens=12, logprobs=i % 2 or None) for i in range(4)))
    bench.submit(make_request("p", [1, 2, 3, 4, 5], prompt_logprobs=1, arrival=3.0)).run()
    return tape.events()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_change_is_named(data):
    events = copy.deepcopy(bench_tape())
    numbers = [e["n"] for e in events if e["kind"] in CHANGES]
    at = data.draw(st.sampled_from(numbers))
    CHANGES[events[at]["kind"]](events[at])
    difference = replay(events).difference
    assert difference is not None
    assert difference.number == at or (events[at]["kind"] == "arrive" and difference.number > at)
    assert f"event {difference.number}" in str(difference)


CHANGES = {
    "arrive": lambda e: e["prompt"].append(9),
    "submit": lambda e: e.update(prompt=99),
    "admit": lambda e: e.update(slot=77),
    "decision": lambda e: e.update(free=999),
    "preempt": lambda e: e.update(by="x"),
    "finish": lambda e: e.update(choice=5),
    "tokens": lambda e: e.update(step=e["step"] + 1),
}


def test_a_token_that_differs_is_named():
    events = copy.deepcopy(bench_tape())
    at = next(e for e in events if e["kind"] == "tokens" and e["step"] == 5)
    row = next(i for i, token in enumerate(at["tokens"]) if token is not None)
    at["tokens"][row] += 1
    text = str(replay(events, model=True).difference)
    assert f"event {at['n']}, step 5: tokens: token was {at['tokens'][row]}, is {at['tokens'][row] - 1}" in text


@pytest.mark.parametrize("lost", ["finish", "admit"])
def test_an_event_that_is_missing_is_named(lost):
    events = bench_tape()
    at = next(i for i, e in enumerate(events) if e["kind"] == lost)
    assert f"replayed {lost} " in str(replay(events[:at] + events[at + 1 :]).difference)


def test_an_event_too_many_is_named():
    events = bench_tape()
    at = next(i for i, e in enumerate(events) if e["kind"] == "admit")
    last = next(i for i in range(at, len(events)) if events[i]["kind"] == "decision")
    both = [*events[:last], {**events[at], "request": "ghost"}, *events[last:]]
    assert "ghost" in str(replay(both).difference)
    end = [*events[:-1], {**events[at], "request": "ghost"}, events[-1]]
    assert "recorded admit (request 'ghost'" in str(replay(end).difference)


def test_the_last_event_counts_if_the_recording_was_closed():
    events = bench_tape()
    finish = max(i for i, e in enumerate(events) if e["kind"] == "finish")
    cut = [e for i, e in enumerate(events) if i != finish]
    assert "recorded nothing, replayed finish" in str(replay(cut).difference)
    assert replay(cut[:-1]).difference is None  # it may have been cut off there


def test_a_recording_without_its_end_replays_as_far_as_it_goes():
    events = bench_tape()
    for length in range(1, len(events)):
        assert replay(events[:length]).difference is None


def test_a_request_that_no_longer_fits_is_named():
    assert "refuse" in str(replay(bench_tape(), num_pages=2).difference)


def test_another_policy_differs():
    events = bench_tape()
    assert replay(events, max_prefill_chunk=3).difference is not None
    with pytest.raises(InvalidInput, match="policy"):
        replay(events, policy="chaos")


@pytest.mark.parametrize("facts", [{}, {"scheduler": {"colour": 1}}, {"scheduler": {}, "kv": {"groups": 3}}])
def test_facts_of_another_version_are_refused(facts):
    with pytest.raises(InvalidInput, match="facts"):
        scheduler_for(facts)


def test_a_request_survives_as_facts():
    request = make_request("é", [3, 4], temperature=0.5, seed=2**64 - 1, logit_bias={3: 0.5}, tenant="t", deadline=5.5)
    again = request_of({"request": "é", "prompt": [3, 4], "facts": facts_of(request)})
    assert again.snapshot() == request.snapshot()
    assert facts_of(Request("x", [1])) == {"priority": 0, "arrival": 0.0}
    with pytest.raises(InvalidInput, match="facts"):
        request_of({"request": "x", "prompt": [1], "facts": {"colour": 1}})


def test_a_restored_request_replays():
    bench = Bench().submit(make_request("a", max_tokens=9))
    for _ in range(4):
        bench.step()
    saved = bench.scheduler.get("a").snapshot()
    other = Bench()
    tape = Tape(other.scheduler)
    other.submit(Request.restore(saved)).run()
    events = tape.events()
    assert events[1]["facts"]["branches"]
    assert replay(events, model=True).difference is None
