"""The transaction under random arrivals, cancels, stops, failures and tiny pools: nothing leaks, nothing is lost.

The invariants are those of the reliability plan: one terminal event per choice, last (I8); no token after a cancel
(I9); contiguous indices, count = usage = logprobs (I10); limits (I11); bounded waiting and preemption, progress (I17 to
I19); and the pages are audited after every step (I1).
"""

from __future__ import annotations

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import PLANS, Run, worlds

from octavo.core.batch import RowResult, StepResult
from octavo.core.errors import InvalidInput, RowError
from octavo.core.events import EventKind
from octavo.core.request import Branch


@given(worlds(), st.lists(PLANS, min_size=1, max_size=7))
@settings(max_examples=150, deadline=None)
def test_random_runs(world, plans):
    Run(world, plans).play()


@st.composite
def fault_scripts(draw):
    """Which steps fail and how: a RowError of some rows, an error nobody owns, rows that report an error."""
    return draw(st.dictionaries(st.integers(1, 25), st.tuples(st.sampled_from("orp"), st.integers(0, 5)), max_size=8))


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), fault_scripts())
@settings(max_examples=120, deadline=None)
def test_random_failures_hit_only_their_own(world, plans, script):
    run = Run(world, plans)

    def fault(decision):
        kind, pick = script.pop(decision.step, ("", 0))
        row = pick % max(1, len(decision.rows))
        if not kind:
            return None
        if kind == "o":
            if len(decision.rows) == 1:
                run.blamed.add(decision.rows[0].request_id)
            return RuntimeError("boom")
        run.blamed.add(decision.rows[row].request_id)
        return RowError([row], "row") if kind == "r" else {row: "row"}

    run.model.fault = fault
    run.play()


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_the_culprit_of_an_unowned_error_is_found(world, plans, pick):
    run = Run(world, plans)
    culprit = f"r{pick % len(plans)}"
    run.blamed = {culprit}
    run.model.fault = lambda decision: (
        ValueError("nan") if any(row.request_id == culprit for row in decision.rows) else None
    )
    run.play()
    assert not [e for e in run.bench.events if e.request_id == culprit and e.kind is EventKind.TOKEN]


def test_a_failure_that_needs_two_blames_nobody():
    bench = Bench().submit(*(make_request(f"r{i}", [i + 1]) for i in range(4)))
    bench.model.fault = lambda d: RuntimeError() if {"r0", "r3"} <= {row.request_id for row in d.rows} else None
    for _ in range(3):
        bench.step()
    bench.model.fault = None
    bench.run()
    assert all(bench.tokens(f"r{i}") == null_tokens([i + 1], 3, 7) for i in range(4))


def test_an_error_is_halved_until_the_culprit_stands_alone():
    bench = Bench().submit(*(make_request(f"r{i}", [i + 1], max_tokens=2) for i in range(4)))
    bench.model.fault = lambda d: RuntimeError() if any(row.request_id == "r2" for row in d.rows) else None
    bench.run()
    tried = [[row.request_id for row in decision.rows] for decision in bench.model.decisions]
    assert tried == [["r0", "r1", "r2", "r3"], ["r0", "r1"], ["r2", "r3"], ["r2"], ["r3"], ["r0", "r1", "r3"]]
    assert [bench.reason(f"r{i}") for i in range(4)] == ["length", "length", "error", "length"]
    assert "RuntimeError" in bench.end("r2").error


def test_the_search_for_a_culprit_ends_with_its_suspects():
    bench = Bench().submit(make_request("a", n=2))
    bench.step()
    bench.model.fault = lambda decision: RuntimeError()
    bench.run()
    assert bench.reason("a") == "error" and not bench.scheduler._isolation.is_active


def test_a_slot_filled_by_a_failed_step_is_reported_as_freed():
    bench = Bench(prefix_wait_steps=0).submit(make_request("a"), make_request("b", [4]))
    bench.scheduler.plan()
    bench.scheduler.rollback(RowError([0], "a fails"))
    assert sorted(bench.step().freed_slots) == [0, 1]
    bench.run()
    assert bench.tokens("b") == null_tokens([4], 3, 7)


def picture(scheduler):
    """All that a plan may change and a rollback must give back."""
    branches = [b for request in scheduler._roster.requests.values() for b in request.branches]
    tables = [scheduler.kv.page_table(b.key) for b in branches if scheduler.kv.has_branch(b.key)]
    queues = [sorted(b.key for b in queue) for queue in (scheduler._roster.waiting, scheduler._roster.running)]
    fields = [{name: getattr(b, name) for name in Branch.__slots__} for b in branches]
    return fields, tables, queues, scheduler.kv.audit()


@pytest.mark.parametrize("windows", [(0,), (3, 0)])
def test_rollback_leaves_no_trace(windows):
    bench = Bench(make_kv(40, 4, windows), max_prefill_chunk=3)
    scheduler = bench.scheduler
    bench.submit(make_request("a", range(1, 8), n=3), make_request("b", [9, 1, 2, 3, 4], n=2)).step()
    rolled_back = 0
    while scheduler.has_work:
        before = picture(scheduler)
        decision = scheduler.plan()
        if len(decision.rows) > 1:
            assert picture(scheduler) != before
            scheduler.rollback(RowError([99], "nobody's row"))
            assert picture(scheduler) == before
            scheduler._isolation.__init__()
            rolled_back += 1
            bench.step()
        else:
            bench.events += scheduler.commit(bench.model(decision))
    assert rolled_back > 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: RowResult(()), "0 tokens"),
        (lambda row: RowResult((1, 2)), "2 tokens"),
        (lambda row: RowResult((VOCAB,)), "outside the vocabulary"),
        (lambda row: RowResult((-1,)), "outside the vocabulary"),
        (lambda row: RowResult(row.token_ids), "0 logprobs"),
        (lambda row: RowResult(row.token_ids, row.logprobs), "0 prompt logprobs for 1"),
    ],
)
def test_a_row_without_a_proper_answer_fails_alone(damage, message):
    bench = Bench().submit(make_request("bad", [1, 3], logprobs=0, prompt_logprobs=0), make_request("good", [2]))
    scheduler = bench.scheduler
    result = bench.model(scheduler.plan())
    bench.events += scheduler.commit(StepResult(result.step, (damage(result.rows[0]), result.rows[1])))
    bench.run()
    assert bench.reason("bad") == "error" and message in bench.end("bad").error and not bench.tokens("bad")
    assert bench.tokens("good") == null_tokens([2], 3, 7)


def test_results_must_answer_the_step_in_flight():
    bench = Bench().submit(make_request())
    scheduler = bench.scheduler
    with pytest.raises(InvalidInput, match="plan a step first"):
        scheduler.commit(StepResult(1, (RowResult(),)))
    with pytest.raises(InvalidInput, match="plan a step first"):
        scheduler.rollback(RuntimeError())
    decision = scheduler.plan()
    result = bench.model(decision)
    for wrong in (StepResult(decision.step + 1, result.rows), StepResult(decision.step, ())):
        with pytest.raises(InvalidInput, match=r"result\."):
            scheduler.commit(wrong)
    with pytest.raises(InvalidInput, match="in flight"):
        scheduler.plan()
    scheduler.commit(result)
    scheduler.audit()
    bench.run()


def test_a_wrong_result_of_the_executor_is_charged_like_an_error():
    bench = Bench().submit(make_request())
    bench.scheduler.executor = lambda decision: StepResult(decision.step + 1, ())
    bench.run()
    assert bench.reason() == "error"
