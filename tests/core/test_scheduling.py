"""The scheduler's rules, one by one, on the null model: whoever breaks one breaks tokens or an assertion here."""

import json
from contextlib import contextmanager

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from null_model import null_tokens, prefix_hashes, prompt_logprob

from octavo.core.errors import InvalidInput, InvariantBroken, OutOfPages
from octavo.core.events import EventKind
from octavo.core.pages import Owner, OwnerKind
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request, RequestState, WaitingReason
from octavo.core.roster import REMEMBERED_IDS
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig

PROMPT = [1, 2, 3]


def rows(decision):
    return [(row.request_id, row.choice, row.num_scheduled_tokens) for row in decision.rows]


def ask(scheduler, name):
    return scheduler.get(name).branches[0]


# -- what is refused


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt_token_ids", {"prompt": []}),
        ("prompt_token_ids[1]", {"prompt": [1, VOCAB]}),
        ("prompt_token_ids", {"prompt": [1] * 20}),
        ("prompt_token_ids", {"prompt": [1] * 21, "max_tokens": 0}),
        ("logit_bias[0]", {"logit_bias": {VOCAB: 1}}),
        ("allowed_token_ids[0]", {"allowed_token_ids": [VOCAB]}),
        ("banned_token_ids", {"banned_token_ids": range(VOCAB)}),
        ("banned_token_ids[1]", {"banned_token_ids": [1, VOCAB]}),
        ("stop_token_ids[0]", {"stop_token_ids": [VOCAB]}),
        ("logprob_token_ids[0]", {"logprob_token_ids": [VOCAB]}),
    ],
)
def test_refused_at_submit(field, values):
    bench = Bench(max_seq_len=20)
    with pytest.raises(InvalidInput) as caught:
        bench.submit(make_request(**values))
    assert caught.value.field == field
    assert not bench.scheduler.has_work


def test_prompts_up_to_the_context_are_served():
    bench = Bench(max_seq_len=20).submit(
        make_request("a", [1] * 19, max_tokens=9), make_request("b", [1] * 20, max_tokens=0)
    )
    bench.run()
    assert (len(bench.tokens("a")), bench.reason("a")) == (1, "length")
    assert (bench.tokens("b"), bench.reason("b")) == ([], "length")


@pytest.mark.parametrize(
    ("field", "values"),
    [("prompt_token_ids", {"prompt": [1] * 13}), ("max_tokens", {"prompt": [1] * 4, "max_tokens": 10})],
)
def test_what_the_pool_can_never_hold_is_refused(field, values):
    bench = Bench(make_kv(3, 4))
    with pytest.raises(InvalidInput, match="the pool holds 12") as caught:
        bench.submit(make_request(**values))
    assert caught.value.field == field


def test_exactly_what_the_pool_holds_is_served():
    """12 slots: 4 prompt tokens and 9 output tokens, of which the last needs no K/V."""
    bench = Bench(make_kv(3, 4)).submit(make_request(prompt=[1] * 4, max_tokens=9)).run()
    assert bench.tokens() == null_tokens([1] * 4, 9, 7)
    unlimited = Bench(make_kv(3, 4)).submit(make_request(prompt=[1] * 4, max_tokens=None)).run()
    assert (unlimited.tokens(), unlimited.reason()) == (bench.tokens(), "length")


def test_ids_are_used_once():
    bench = Bench().submit(make_request("a"))
    for _ in range(2):  # in the inbox, then live
        with pytest.raises(InvalidInput, match="not used before"):
            bench.submit(make_request("a"))
        bench.step()
    bench.run()
    with pytest.raises(InvalidInput, match="not used before"):
        bench.submit(make_request("a"))


def test_ended_ids_are_forgotten_in_the_end():
    bench = Bench().submit(make_request("a")).run()
    for i in range(REMEMBERED_IDS - 1):
        bench.scheduler._roster._ended[f"x{i}"] = None
    bench.submit(make_request("b")).run()
    assert len(bench.scheduler._roster._ended) == REMEMBERED_IDS
    bench.submit(make_request("a")).run()


def test_only_fresh_requests_are_taken():
    bench = Bench()
    ended = make_request()
    ended.transition(RequestState.CANCELLED)
    half = make_request()
    half.transition(RequestState.ADMITTED)
    for wrong in (ended, half, "r"):
        with pytest.raises(InvalidInput, match="request"):
            bench.scheduler.submit(wrong)


def test_budgets_are_positive_integers():
    bench = Bench()
    for budget in (0, -1, True, 1.5):
        for call in (bench.scheduler.step, lambda budget: bench.scheduler.plan(0.0, budget)):
            with pytest.raises(ValueError, match="budget_tokens"):
                call(budget)


def test_step_needs_an_executor():
    with pytest.raises(InvalidInput, match="executor"):
        ContinuousBatchScheduler(make_kv()).step(1)


def test_config_is_checked():
    for name in ("max_batched_tokens", "max_running_requests", "max_prefill_chunk", "max_seq_len", "bypass_limit"):
        with pytest.raises(InvalidInput, match=name):
            SchedulerConfig(**{name: 0})
    assert SchedulerConfig(prefix_wait_steps=0, max_preemptions=0).prefix_wait_steps == 0
    with pytest.raises(InvalidInput, match="policy"):
        SchedulerConfig(policy="fair")
    assert all(item.metadata["help"] for item in SchedulerConfig.__dataclass_fields__.values())


# -- budgets


def test_decodes_first_then_running_prefills_then_waiting():
    bench = Bench(max_prefill_chunk=4, prefix_wait_steps=0)
    bench.submit(make_request("long", range(1, 12)), make_request("short", [50])).step()
    bench.submit(make_request("new", [60] * 9))
    assert rows(bench.step(9)) == [("short", 0, 1), ("long", 0, 4), ("new", 0, 4)]
    assert rows(bench.step(6)) == [("short", 0, 1), ("long", 0, 3), ("new", 0, 2)]
    assert rows(bench.step(1)) == [("long", 0, 1)]
    bench.run()
    assert bench.tokens("new") == null_tokens([60] * 9, 3, 7)


def test_sequences_are_bounded():
    bench = Bench(max_running_requests=2).submit(*(make_request(f"r{i}", [i + 1]) for i in range(5)))
    while bench.scheduler.has_work:
        assert len(bench.step().rows) <= 2
    assert all(bench.tokens(f"r{i}") == null_tokens([i + 1], 3, 7) for i in range(5))


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_every_running_sequence_is_served_within_the_stated_steps(budget):
    """Far more decodes than budget, and a prefill that would come after all of them for ever."""
    bound = 4 + 6 - 1
    bench = Bench(make_kv(200), max_running_requests=6, stall_steps=4, max_prefill_chunk=2, prefix_wait_steps=0)
    bench.submit(*(make_request(f"d{i}", [i + 1], max_tokens=60) for i in range(5)))
    bench.step()
    bench.submit(make_request("p", range(10, 30), max_tokens=40))
    bench.step()
    last = {}
    for step in range(200):
        served = {row.request_id for row in bench.step(budget).rows}
        for branch in bench.scheduler._roster.running:
            name = branch.request.request_id
            last[name] = step if name in served else last.get(name, step)
            assert step - last[name] <= bound
    bench.run()
    assert bench.tokens("p") == null_tokens(range(10, 30), 40, 7)


# -- waiting in order


def test_a_low_priority_request_is_passed_at_most_bypass_limit_times():
    bench = Bench(policy="priority", max_running_requests=1, bypass_limit=5, prefix_wait_steps=0)
    bench.submit(make_request("first", [9], priority=0), make_request("low", [1], priority=10, max_tokens=1)).step()
    names = []
    for i in range(20):
        bench.submit(make_request(f"h{i}", [2 + i], priority=-1, max_tokens=1))
    while bench.scheduler.has_work:
        names += [row.request_id for row in bench.step().rows if row.init]
    assert names.index("low") == 5
    assert len(names) == 21


def test_several_admissions_in_one_step_respect_the_limit():
    bench = Bench(policy="priority", max_running_requests=8, bypass_limit=2)
    bench.submit(make_request("low", [1], priority=10), *(make_request(f"h{i}", [2 + i]) for i in range(7)))
    assert [row.request_id for row in bench.step().rows] == ["h0", "h1"]
    assert [row.request_id for row in bench.step().rows if row.init] == ["low", "h2", "h3", "h4", "h5", "h6"]


def test_a_request_that_does_not_fit_holds_up_those_behind_it():
    bench = Bench(make_kv(4, 4, enable_prefix_cache=False))
    bench.submit(make_request("a", [1] * 8, max_tokens=5), make_request("big", [2] * 8), make_request("small", [3]))
    bench.step()
    assert rows(bench.step()) == [("a", 0, 1)]
    assert ask(bench.scheduler, "big").waiting_reason is WaitingReason.KV
    assert ask(bench.scheduler, "small").waiting_reason is WaitingReason.NONE
    bench.run()
    ends = [event.request_id for event in bench.events if event.kind is EventKind.REQUEST_END]
    assert ends[0] == "a"


# -- pages run out


def test_the_youngest_of_the_lowest_priority_is_preempted():
    bench = Bench(make_kv(6, 4, enable_prefix_cache=False), policy="priority")
    priorities = {"a": 1, "b": 0, "c": 1}
    for name, priority in priorities.items():
        bench.submit(make_request(name, [ord(name) % 90] * 7, priority=priority, max_tokens=9))
    preempted = []
    while bench.scheduler.has_work:
        decision = bench.step()
        preempted += [(p.request_id, p.kind, p.reason) for p in decision.preemptions]
    assert preempted[0] == ("c", "recompute", "pages for b/0")
    for name in priorities:
        assert bench.tokens(name) == null_tokens([ord(name) % 90] * 7, 9, 7)
    assert all(event["choice"] == 0 for event in bench.scheduler.timeline if event["kind"] == "preempt")


def test_a_recomputed_branch_says_so_and_repeats_nothing():
    bench = Bench(make_kv(4, 4, enable_prefix_cache=False))
    bench.submit(make_request("a", [1] * 6, max_tokens=9), make_request("b", [2] * 6, max_tokens=9))
    reasons = []
    while bench.scheduler.has_work:
        reasons += [row.reason for row in bench.step().rows if row.request_id == "b"]
    assert any(reason.startswith("recompute 0..") for reason in reasons)
    assert bench.tokens("b") == null_tokens([2] * 6, 9, 7)
    assert bench.end("b").num_cached_tokens == 0


@pytest.mark.parametrize("most", [0, 1, 2])
def test_nobody_is_preempted_more_often_than_the_limit(most):
    bench = Bench(make_kv(8, 1, enable_prefix_cache=False), max_preemptions=most, max_running_requests=4)
    bench.submit(*(make_request(f"r{i}", [i + 1], max_tokens=8) for i in range(4)))
    preempted = {}
    while bench.scheduler.has_work:
        for preemption in bench.step().preemptions:
            preempted[preemption.request_id] = preempted.get(preemption.request_id, 0) + 1
    assert max(preempted.values(), default=0) <= most
    assert all(bench.tokens(f"r{i}") == null_tokens([i + 1], 8, 7) for i in range(4))


def test_a_running_branch_without_pages_waits_for_the_protected():
    """Both protected ones find their pages; the unprotected one in between waits in its slot."""
    bench = Bench(make_kv(9, 1, enable_prefix_cache=False), max_preemptions=1, max_running_requests=3)
    bench.submit(*(make_request(f"r{i}", [i + 1], max_tokens=8) for i in range(3)))
    blocked = 0
    while bench.scheduler.has_work:
        bench.step()
        blocked += any(b.waiting_reason is WaitingReason.KV for b in bench.scheduler._roster.running)
    assert blocked
    assert all(bench.reason(f"r{i}") == "length" for i in range(3))


def test_alone_with_a_shared_page_in_the_way():
    """The pool has one page, the cached one: the continuation of its prompt must give it up to write on."""
    bench = Bench(make_kv(1, 4)).submit(make_request("a", [1, 2, 3], max_tokens=1)).run()
    bench.submit(make_request("b", [1, 2, 3], max_tokens=2)).run()
    assert bench.tokens("b") == null_tokens([1, 2, 3], 2, 7)
    assert bench.reason("b") == "length"


def test_a_claim_keeps_two_from_waiting_for_each_other():
    """r1 is protected and the older r0 wants its last page: without the claim both would wait for ever."""
    sizes = {"r0": (3, 2), "r1": (1, 5), "r2": (2, 6), "r3": (1, 4)}
    bench = Bench(make_kv(8, 1, enable_prefix_cache=False), max_preemptions=1)
    for i, (name, (prompt, most)) in enumerate(sizes.items()):
        bench.submit(make_request(name, [i + 1] * prompt, max_tokens=most))
    bench.run(100)
    for i, (name, (prompt, most)) in enumerate(sizes.items()):
        assert bench.tokens(name) == null_tokens([i + 1] * prompt, most, 7)


@contextmanager
def leased(kv, num_pages):
    """Pages taken away behind the scheduler's back."""
    owner = Owner(OwnerKind.LEASE, "x")
    pages = kv.allocator.take(num_pages, owner)
    yield
    for page in pages:
        kv.allocator.drop_owner(page, owner)


def test_out_of_memory_ends_a_request_that_runs_alone():
    """It fitted when it was submitted; then a lease took the pages. No wait that nothing could end."""
    bench = Bench(make_kv(3, 4)).submit(make_request("r", [1] * 4, max_tokens=9))
    bench.step()
    with leased(bench.kv, bench.kv.allocator.num_free):
        while bench.scheduler.has_work:
            bench.scheduler.step(64)
    bench.events = bench.scheduler.drain_events()
    assert bench.reason() == "out_of_memory" and "more pages than the pool" in bench.end().error


def test_out_of_memory_ends_a_request_that_waits_alone():
    bench = Bench(make_kv(3, 4)).submit(make_request("r"), make_request("later", [2]))
    with leased(bench.kv, 3):
        bench.scheduler.step(64)
        bench.events += bench.scheduler.drain_events()
    assert bench.reason("r") == "out_of_memory"
    bench.run()
    assert bench.tokens("later") == null_tokens([2], 3, 7)


def test_alone_a_request_is_served_without_its_prefix_rather_than_not_at_all():
    bench = Bench(make_kv(3, 4)).submit(make_request("r", [1] * 4, max_tokens=1)).run()
    begin, reserve, used = bench.kv.begin, bench.kv.reserve, []

    def noting_begin(*args, use_prefix=True, **kwargs):
        used.append(use_prefix)
        return begin(*args, use_prefix=use_prefix, **kwargs)

    def reserve_without_prefix(*args):
        if used[-1]:
            raise OutOfPages("in the way")
        return reserve(*args)

    bench.kv.begin, bench.kv.reserve = noting_begin, reserve_without_prefix
    bench.submit(make_request("s", [1] * 9)).run()
    assert used == [True, False]
    assert bench.tokens("s") == null_tokens([1] * 9, 3, 7)


def test_a_failed_attach_leaves_the_request_waiting():
    bench = Bench(make_kv(8, 4)).submit(make_request("a", [1], max_tokens=9))
    bench.step()
    begin = bench.kv.begin
    bench.kv.begin = lambda *args, **kwargs: (_ for _ in ()).throw(OutOfPages("not now"))
    bench.submit(make_request("b", [2])).step()
    assert ask(bench.scheduler, "b").waiting_reason is WaitingReason.KV
    bench.kv.begin = begin
    bench.run()
    assert bench.tokens("b") == null_tokens([2], 3, 7)


def test_a_chunk_shrinks_to_the_pages_there_are():
    """Two pages; the cached one is copied from, and is free for the rest of the prompt one step later."""
    bench = Bench(make_kv(2, 4)).submit(make_request("a", [1, 2, 3], max_tokens=1)).run()
    bench.submit(make_request("b", [1, 2, 9, 9, 9, 9], max_tokens=1))
    assert rows(bench.step()) == [("b", 0, 2)]
    assert rows(bench.step()) == [("b", 0, 2)]
    assert bench.tokens("b") == null_tokens([1, 2, 9, 9, 9, 9], 1, 7)


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
        assert event.num_cached_tokens == 0
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
    assert kinds == ["submit", "decision", "token", "finish"]


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
