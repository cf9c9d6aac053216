"""The life of a request: prefixes, endings, cancels, late stops, the inbox, slots, snapshots, the audit."""

import json

import pytest
from builders import Bench, make_kv, make_request
from null_model import null_tokens, prefix_hashes, prompt_logprob

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request, RequestState, WaitingReason

PROMPT = [1, 2, 3]


def rows(decision):
    return [(row.request_id, row.choice, row.num_scheduled_tokens) for row in decision.rows]


def ask(scheduler, name):
    return scheduler.get(name).branches[0]


# -- prefixes


def test_simultaneous_requests_compute_a_shared_prefix_once():
    shared = list(range(1, 41))
    bench = Bench(make_kv(200, 4), max_prefill_chunk=7, max_batched_tokens=64)
    bench.submit(*(make_request(f"r{i}", [*shared, 50 + i]) for i in range(32))).run()
    assert bench.model.rows_computed <= 41 + 31 + 32 * 2
    for i in range(32):
        assert bench.tokens(f"r{i}") == null_tokens([*shared, 50 + i], 3, 7)
    assert bench.end("r5").num_cached_tokens == 40 and bench.end("r0").num_cached_tokens == 0


def test_choices_share_the_prompt():
    bench = Bench().submit(make_request(prompt=range(1, 10), n=4)).run()
    assert bench.model.rows_computed == 9 + 3 * 1 + 4 * 2
    assert [bench.tokens(choice=i) for i in range(4)] == [null_tokens(range(1, 10), 3, 7, i) for i in range(4)]
    assert len({tuple(bench.tokens(choice=i)) for i in range(4)}) == 4


@pytest.mark.parametrize("patience", [0, 2])
def test_waiting_for_a_prefix_is_bounded(patience):
    bench = Bench(max_prefill_chunk=1, prefix_wait_steps=patience)
    bench.submit(make_request("a", range(1, 20)), make_request("b", range(1, 20)))
    for _ in range(patience):
        assert rows(bench.step()) == [("a", 0, 1)]
        assert ask(bench.scheduler, "b").waiting_reason is WaitingReason.PREFIX
    assert ("b", 0, 1) in rows(bench.step())
    bench.run()
    assert bench.tokens("b") == null_tokens(range(1, 20), 3, 7)


def test_a_whole_hit_computes_one_row_and_writes_nothing():
    bench = Bench().submit(make_request("a", range(1, 10), max_tokens=1)).run()
    bench.submit(make_request("b", range(1, 10), max_tokens=1))
    [row] = bench.step().rows
    assert (row.start, row.num_scheduled_tokens, row.flags.no_write) == (8, 1, True)
    assert row.reason == "prefill 8..9 of 9, 8 from the prefix cache"
    assert bench.tokens("b") == bench.tokens("a")


def test_prompt_logprobs_compute_every_row_of_the_prompt():
    prompt = list(range(1, 10))
    bench = Bench(max_prefill_chunk=4).submit(make_request("a", prompt)).run()
    bench.submit(
        make_request("b", prompt, prompt_logprobs=0, n=2), make_request("c", prompt, prompt_logprobs=1, max_tokens=0)
    )
    bench.submit(make_request("d", [5], prompt_logprobs=1)).run()
    hashes = prefix_hashes(prompt)
    wanted = (None, *(prompt_logprob(hashes[i - 1], prompt[i]) for i in range(1, 9)))
    for name, choice, kind in (("b", 0, EventKind.TOKEN), ("b", 1, EventKind.TOKEN), ("c", 0, EventKind.CHOICE_END)):
        [event] = [e for e in bench.events if e.prompt_logprobs and (e.request_id, e.choice) == (name, choice)]
        assert (event.kind, event.prompt_logprobs) == (kind, wanted)
        assert event.num_cached_tokens == 8 * choice  # the second choice waits for the first
    [single] = [e for e in bench.events if e.request_id == "d" and e.prompt_logprobs]
    assert single.prompt_logprobs == (None,)


def test_prompt_logprobs_survive_preemption():
    bench = Bench(make_kv(4, 4), max_prefill_chunk=2)
    prompt = list(range(1, 10))
    bench.submit(make_request("a", [60] * 3, max_tokens=9), make_request("b", prompt, prompt_logprobs=0, max_tokens=2))
    bench.run()
    [event] = [e for e in bench.events if e.prompt_logprobs]
    assert [entry.token_id for entry in event.prompt_logprobs[1:]] == prompt[1:]


# -- endings


def test_eos_stop_ids_and_limits():
    out = null_tokens(PROMPT, 6, 7)
    cases = {
        "eos": ({"eos_token_ids": [out[2]]}, 3, "stop", None),
        "id": ({"stop_token_ids": [out[1]]}, 2, "stop", out[1]),
        "both": ({"eos_token_ids": [out[1]], "stop_token_ids": [out[1]]}, 2, "stop", None),
        "ignored": ({"eos_token_ids": [out[1]], "ignore_eos": True}, 6, "length", None),
        "ignored, but a stop id": (
            {"eos_token_ids": [out[1]], "stop_token_ids": [out[1]], "ignore_eos": True},
            2,
            "stop",
            out[1],
        ),
        "too early": ({"eos_token_ids": [out[1]], "min_tokens": 2}, 6, "length", None),
        "early enough": ({"eos_token_ids": [out[1]], "min_tokens": 1}, 2, "stop", None),
        "last": ({"eos_token_ids": [out[5]]}, 6, "stop", None),
        "none": ({"max_tokens": 0}, 0, "length", None),
    }
    bench = Bench()
    for name, (values, *_) in cases.items():
        bench.submit(make_request(name, PROMPT, **{"max_tokens": 6, **values}))
    bench.run()
    for name, (_, count, reason, stop_reason) in cases.items():
        end = bench.end(name)
        assert bench.tokens(name) == out[:count], name
        assert (end.finish_reason, end.stop_reason, end.num_output_tokens) == (reason, stop_reason, count), name


def test_events_of_a_request_in_order():
    bench = Bench().submit(make_request(n=2, max_tokens=1)).run()
    assert [(event.kind.value, event.choice) for event in bench.events] == [
        ("token", 0), ("choice_end", 0), ("token", 1), ("choice_end", 1), ("request_end", 0),
    ]  # fmt: skip
    assert bench.events[-1].num_output_tokens == 2


def reach(bench, state):
    """A request brought to a state by the scheduler itself."""
    scheduler = bench.scheduler
    bench.submit(make_request("r", range(1, 9), max_tokens=9))
    if state in ("prefilling", "decoding"):
        bench.step(3 if state == "prefilling" else 64)
    if state == "recompute":
        bench.step()
        scheduler._roster.preempt(scheduler._roster.running[0], 0.0, "test")
    if state == "waiting":
        scheduler._apply_inbox(0.0)
    assert scheduler.get("r").state == state


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "recompute"])
def test_cancel_in_every_state(state, in_flight):
    bench = Bench()
    reach(bench, state)
    told = len(bench.tokens())
    decision = bench.scheduler.plan() if in_flight else None
    for _ in range(2):
        bench.scheduler.cancel("r", FinishReason.TIMEOUT)
    if decision:
        bench.events += bench.scheduler.commit(bench.model(decision))
    bench.run()
    bench.scheduler.cancel("r")
    bench.run()
    assert (bench.reason(), len(bench.tokens())) == ("timeout", told)
    assert bench.kv.audit().referenced == 0
    assert [event.kind.value for event in bench.events[-2:]] == ["choice_end", "request_end"]


def test_cancel_before_it_was_ever_planned():
    bench = Bench().submit(make_request())
    bench.scheduler.cancel("r")
    assert bench.scheduler.has_work
    assert not bench.step().rows
    assert (bench.reason(), bench.tokens(), bench.scheduler.has_work) == ("cancelled", [], False)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", ["prefilling", "decoding", "recompute"])
def test_a_stop_found_late_truncates(state, in_flight):
    bench = Bench()
    reach(bench, state)
    decision = bench.scheduler.plan() if in_flight else None
    for _ in range(2):
        bench.scheduler.stop("r", 0, 0, "END")
    if decision:
        bench.events += bench.scheduler.commit(bench.model(decision))
    bench.run()
    end = bench.end()
    assert (end.finish_reason, end.stop_reason, end.num_output_tokens) == ("stop", "END", 0)
    bench.scheduler.stop("r", 0, 0, "END")
    bench.scheduler.stop("nobody", 0, 0, "END")
    bench.submit(make_request("other"))
    bench.scheduler.stop("other", 7, 0, "END")
    bench.run()
    assert len(bench.tokens("other")) == 3
    assert bench.kv.audit().referenced == 0


def test_a_stop_ends_one_choice_only():
    bench = Bench().submit(make_request(n=2))
    bench.step()
    bench.scheduler.stop("r", 0, 1, "END")
    bench.run()
    assert [bench.reason(choice=i) for i in range(2)] == ["stop", "length"]
    assert bench.tokens(choice=1) == null_tokens(PROMPT, 3, 7, 1)
    assert bench.events[-1].num_output_tokens == 1 + 3


# -- inbox, slots, seeds, snapshots


def test_only_plan_and_commit_change_anything():
    bench = Bench().submit(make_request("a"))
    scheduler = bench.scheduler
    decision = scheduler.plan()
    scheduler.submit(make_request("b"))
    scheduler.cancel("a")
    assert (scheduler.get("a").state, scheduler.get("b").state) == ("prefilling", "waiting")
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.events) == (1, 0, [])
    bench.events += scheduler.commit(bench.model(decision))
    assert (scheduler.get("a"), scheduler.num_waiting) == (None, 1)
    bench.run()
    assert bench.tokens("a") == [] and len(bench.tokens("b")) == 3


def test_slots_are_stable_and_told_once():
    bench = Bench(max_running_requests=3, prefix_wait_steps=0)
    bench.submit(*(make_request(f"r{i}", [i + 1], max_tokens=2 + i) for i in range(3)), make_request("late", [9]))
    slots, inits, freed = {}, [], []
    while bench.scheduler.has_work:
        decision = bench.step()
        freed += decision.freed_slots
        for row in decision.rows:
            assert slots.setdefault(row.request_id, row.slot) == row.slot
            inits += [row.request_id] if row.init else []
    assert slots == {"r0": 0, "r1": 1, "r2": 2, "late": 0}
    assert inits == ["r0", "r1", "r2", "late"]
    assert freed[0] == 0


def test_init_holds_all_that_a_slot_needs():
    bench = Bench().submit(make_request(eos_token_ids=[9], seed=-1))
    init = bench.step().rows[0].init
    assert (init.token_ids, init.num_prompt_tokens, init.seed, init.eos_token_ids) == ((1, 2, 3), 3, 2**64 - 1, (9,))


def test_seeds_come_from_the_source_or_the_id():
    bench = (
        Bench(seed_source=iter([5, 6]).__next__).submit(make_request("a", seed=None), make_request("b", seed=3)).run()
    )
    assert bench.tokens("a") == null_tokens(PROMPT, 3, 5)
    assert bench.tokens("b") == null_tokens(PROMPT, 3, 3)
    first, again, other = (Bench().submit(make_request(name, seed=None)).run() for name in ("a", "a", "b"))
    assert first.tokens("a") == again.tokens("a") != other.tokens("b")


@pytest.mark.parametrize("steps", range(8))
def test_snapshot_and_restore_anywhere_goes_on_with_the_same_tokens(steps):
    """Killed after any step: what was told before and what is told after join to the plain run, without repetition."""
    values = {"prompt": range(1, 12), "n": 2, "max_tokens": 4, "logprobs": 0, "prompt_logprobs": 0}
    first = Bench(max_prefill_chunk=4).submit(make_request(**values))
    for _ in range(steps):
        first.step()
    request = first.scheduler.get("r")
    second = Bench(make_kv(page_size=2), max_prefill_chunk=3)
    if request is not None:
        second.submit(Request.restore(json.loads(json.dumps(request.snapshot())))).run()
    whole = Bench().submit(make_request(**values)).run()
    for choice in range(2):
        joined = [e for e in first.events + second.events if e.choice == choice and e.kind is not EventKind.REQUEST_END]
        plain = [e for e in whole.events if e.choice == choice and e.kind is not EventKind.REQUEST_END]
        for name in ("kind", "index", "token_id", "logprobs", "prompt_logprobs", "finish_reason", "num_output_tokens"):
            assert [getattr(e, name) for e in joined] == [getattr(e, name) for e in plain]


def test_a_snapshot_at_its_limit_is_refused():
    bench = Bench(max_seq_len=20).submit(make_request(max_tokens=9))
    for _ in range(4):
        bench.step()
    saved = bench.scheduler.get("r").snapshot()
    with pytest.raises(InvalidInput, match="output_token_ids"):
        Bench(max_seq_len=7).submit(Request.restore(saved))
    Bench(max_seq_len=8).submit(Request.restore(saved)).run()


def test_flags_ask_for_what_the_parameters_say():
    bench = Bench(max_prefill_chunk=2)
    bench.submit(make_request(logprob_token_ids=[4], max_tokens=2))
    flags = [row.flags for _ in range(3) for row in bench.step().rows]
    assert [(f.sample, f.logprobs, f.logprob_ids, f.prompt_logprobs) for f in flags] == [
        (False, -1, (), -1),
        (True, 0, (4,), -1),
        (True, 0, (4,), -1),
    ]


def test_timeline_tells_the_life_of_a_request():
    bench = Bench().submit(make_request(max_tokens=1)).run()
    kinds = [json.loads(line)["kind"] for line in bench.scheduler.timeline.to_jsonl().splitlines()]
    assert kinds == ["submit", "admit", "decision", "tokens", "finish"]


def test_a_bug_after_the_step_is_not_swallowed():
    bench = Bench().submit(make_request())
    bench.kv.commit = lambda *args, **kwargs: (_ for _ in ()).throw(InvariantBroken("bug"))
    with pytest.raises(InvariantBroken):
        bench.scheduler.step(5)


# -- the audit is alive


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s._roster._free_slots.append(0),
        lambda s: s._roster.waiting.pop(),
        lambda s: s._roster.running.append(s._roster.waiting.pop()),
        lambda s: setattr(s._roster.running[0], "kv_blocks", 9),
        lambda s: setattr(s._roster.running[0], "num_resident_tokens", 99),
        lambda s: setattr(s._roster.waiting[0], "kv_blocks", 1),
        lambda s: setattr(s._roster.waiting[0], "num_resident_tokens", 1),
        lambda s: setattr(s._roster.running[0], "state", RequestState.RECOMPUTE),
        lambda s: s._roster.requests.update(x=_ended()),
    ],
)
def test_audit_finds(damage):
    bench = Bench(max_running_requests=1).submit(make_request("a"), make_request("b"))
    bench.step()
    damage(bench.scheduler)
    with pytest.raises(InvariantBroken):
        bench.scheduler.audit()


def _ended():
    request = Request("x", [1], SamplingParams())
    request.branches[0].finish(FinishReason.STOP)
    return request
