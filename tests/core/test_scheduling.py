"""The scheduler's rules, one by one, on the null model: whoever breaks one breaks tokens or an assertion here."""

from contextlib import contextmanager

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from null_model import null_tokens

from octavo.core.errors import InvalidInput, OutOfPages
from octavo.core.events import EventKind
from octavo.core.pages import Owner, OwnerKind
from octavo.core.request import RequestState, WaitingReason
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
        ("allowed_token_ids", {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
        (
            "allowed_token_ids",
            {"allowed_token_ids": [5, 6], "banned_token_ids": [6], "eos_token_ids": [5], "min_tokens": 1},
        ),
        ("banned_token_ids", {"banned_token_ids": range(1, VOCAB), "eos_token_ids": [0], "min_tokens": 1}),
        ("logprob_token_ids[0]", {"logprob_token_ids": [VOCAB]}),
    ],
)
def test_refused_at_submit(field, values):
    bench = Bench(max_seq_len=20)
    with pytest.raises(InvalidInput) as caught:
        bench.submit(make_request(**values))
    assert caught.value.field == field
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("values", [{"ignore_eos": True}, {"allowed_token_ids": [5, 6]}, {"min_tokens": 0}])
def test_an_allowed_end_is_refused_only_where_nothing_else_is_left(values):
    bench = Bench().submit(make_request(**{"allowed_token_ids": [5], "eos_token_ids": [5], "min_tokens": 1, **values}))
    assert bench.scheduler.has_work


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
        SchedulerConfig(policy="fairly")
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
    bench = Bench(make_kv(5, 4))
    bench.submit(make_request("a", [1] * 6, max_tokens=9), make_request("b", [2] * 6, max_tokens=9))
    reasons = []
    while bench.scheduler.has_work:
        reasons += [row.reason for row in bench.step().rows if row.request_id == "b"]
    assert any(reason.startswith("recompute 4..") for reason in reasons)
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


def test_who_starves_for_pages_leaves_the_budget_to_those_that_have_them():
    """Found by simulation: b, which starves, was granted every token and had no page to use them; a had to wait."""
    bench = Bench(make_kv(6, 4, (16, 0)), max_batched_tokens=2, stall_steps=1, policy="priority")
    bench.submit(make_request("a", max_tokens=6), make_request("b", [5] * 6, priority=1)).run()
    assert bench.tokens("a") == null_tokens(PROMPT, 6, 7) and bench.tokens("b") == null_tokens([5] * 6, 3, 7)


def test_prefills_are_kept_out_only_for_one_that_comes_in():
    """Found by simulation: a's prefill stood still for b, which there was no room for."""
    bench = Bench(make_kv(4, 4), max_preemptions=0, max_prefill_chunk=2, policy="fair")
    bench.submit(make_request("a", range(1, 13), max_tokens=1, tenant="a")).step()
    bench.submit(make_request("b", [5, 6], max_tokens=9, tenant="b"))
    while bench.scheduler.has_work:
        assert bench.step().rows
    assert bench.tokens("b") == null_tokens([5, 6], 9, 7)


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
    preempted = []
    while bench.scheduler.has_work:
        preempted += [preemption.request_id for preemption in bench.step().preemptions]
    assert sorted(set(preempted)) == sorted(preempted)
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
        for _ in range(20):
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
