"""What if: a recorded load under other settings, in steps that cost what they cost then."""

import pytest
from builders import Bench, make_kv, make_request
from null_model import null_tokens
from test_replay import Tape

from octavo.core.errors import InvalidInput
from octavo.core.history import history_of
from octavo.core.what_if import Load, load_of, outcome_of, simulate


def cost(decision):
    return 0.010 + 0.001 * decision.num_scheduled_tokens


def recorded(num_pages=60, requests=18, every=0.02, act=lambda scheduler, step, events: None, **config):
    """A load of one tenant with long prompts and one with short ones, on steps of 10 ms and 1 ms a token."""
    bench = Bench(make_kv(num_pages), max_batched_tokens=32, max_running_requests=4, **config)
    tape, now, sent = Tape(bench.scheduler), 100.0, 0
    scheduler = bench.scheduler
    while scheduler.has_work or sent < requests:
        while sent < requests and 100.0 + sent * every <= now:
            long = sent % 3 < 2
            prompt = [sent + 1] * (40 if long else 4)
            about = {"tenant": "long" if long else "short", "priority": int(long), "arrival": 100.0 + sent * every}
            bench.submit(make_request(f"r{sent}", prompt, max_tokens=6, **about))
            sent += 1
        decision = scheduler.plan(now)
        if not decision.rows:
            now += 0.001
            continue
        now += cost(decision)
        events = scheduler.commit(bench.model(decision), now)
        scheduler.observe(cost(decision))
        act(scheduler, decision.step, events)
    return tape.events()


def test_the_same_settings_come_to_the_same():
    epoch = recorded()
    then, now = outcome_of(history_of(epoch), epoch), simulate(load_of(epoch))
    assert (now.finished, now.output_tokens, now.requests, now.dropped, now.made_up) == (18, 108, 18, 0, 0)
    assert then.output_tokens == 108 and then.steps == pytest.approx(now.steps, abs=3)
    for name in ("ttft_median", "ttft_p99", "gap_median", "seconds", "tokens_per_s"):
        assert getattr(now, name) == pytest.approx(getattr(then, name), rel=0.05), name


def test_a_policy_that_serves_the_short_first_shortens_the_median():
    load = load_of(recorded())
    assert simulate(load, policy="priority").ttft_median < 0.8 * simulate(load).ttft_median


def test_fewer_pages_cost_preemptions_and_refusals():
    load = load_of(recorded())
    small = simulate(load, num_pages=24)
    assert small.preemptions > simulate(load).preemptions == 0 and small.finished == 18
    tiny = simulate(load, num_pages=5)
    assert tiny.finished == 6 and tiny.dropped == 12, "the long ones do not fit"


def test_cancellations_and_stops_come_again():
    def act(scheduler, step, events):
        if step == 6:
            scheduler.cancel("r1")
        for event in events:
            if event.request_id == "r2" and event.index == 3:
                scheduler.stop("r2", 0, 2, "END")

    epoch = recorded(act=act)
    then, now = outcome_of(history_of(epoch), epoch), simulate(load_of(epoch))
    assert (then.finished, now.finished) == (17, 17)
    assert then.output_tokens - 4 <= now.output_tokens <= then.output_tokens + 4
    faster = simulate(load_of(epoch), max_batched_tokens=400, max_prefill_chunk=400)
    assert faster.made_up <= 6


def test_what_was_never_drawn_is_made_up_and_counted():
    load = load_of(recorded(requests=6))
    load.tokens = {key: dict(list(tokens.items())[:3]) for key, tokens in load.tokens.items()}
    assert simulate(load).made_up == 6 * 3


def test_tokens_are_those_recorded():
    load = load_of(recorded(requests=6))
    assert list(load.tokens["r3", 0].values()) == null_tokens([4] * 40, 6, 7)


def test_without_measurements_nothing_can_be_said():
    bench = Bench()
    tape = Tape(bench.scheduler)
    bench.submit(make_request()).run()
    with pytest.raises(InvalidInput, match="too few"):
        load_of(tape.events())


def test_what_does_not_replay_cannot_be_asked():
    epoch = recorded(requests=6)
    at = next(i for i, event in enumerate(epoch) if event["kind"] == "decision")
    epoch[at] = {**epoch[at], "free": 3}
    with pytest.raises(InvalidInput, match="does not replay"):
        load_of(epoch)


def test_an_empty_load_and_one_that_stands_still():
    epoch = recorded(requests=6)
    nothing = simulate(Load(epoch[0]["facts"]))
    assert (nothing.requests, nothing.tokens_per_s, nothing.ttft_median) == (0, 0.0, None)
    load = load_of(epoch)
    from octavo.core import what_if

    stuck = what_if._Simulation(load, None, {})
    stuck._naps = what_if._MOST_NAPS
    with pytest.raises(InvalidInput, match="no progress"):
        stuck._wait()
