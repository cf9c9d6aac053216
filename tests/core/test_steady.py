"""Rows that plainly decode travel as columns: the same steps and tokens as one by one, whatever else is going on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import PLANS, Plan, Run, World, worlds

from octavo.core.batch import SAMPLES, DrawnRows, RowResult, ScheduledRow, StepResult, StepRows

CALM = {"max_preemptions": 3, "stall_steps": 16, "max_batched_tokens": 64}  # nearly every decode is a steady one


def calm(world, **config):
    return replace(world, budget=64, config=world.config | CALM | config)


def one_by_one(bench):
    """Have the planner serve everybody singly."""
    bench.scheduler._planner.steady.choose = lambda draft, budget: ([], [])


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_random_runs_of_steady_rows(world, plans):
    run = Run(calm(world), plans)
    run.model.always_draws = True
    run.play()


def signature(decision, page_size):
    """A step, but for which pages were taken, and when a full one gave way to an equal one that the tree has."""
    rows = [replace(row, page_deltas=places(row, row.start // page_size)) for row in decision.rows]
    return sorted(rows, key=lambda row: (row.request_id, row.choice)), len(decision.copies), decision.num_waiting


def places(row, full):
    """Where pages were put into a row's tables: the first time all, later those behind its full ones."""
    first = 0 if row.init is not None else full
    found = {
        (delta.group, at) for delta in row.page_deltas for at in range(delta.first, delta.first + len(delta.pages))
    }
    return tuple(sorted((group, at) for group, at in found if at >= first))


ALONE = {"max_tokens": None, "n": 1, "seed": 0, "logprobs": None, "prompt_logprobs": None, "ignore_eos": False}


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6))
@example(  # the second one's pages are the first one's, when they are published
    World(
        20, 1, (0,), {"max_running_requests": 1, "max_prefill_chunk": 1, "max_seq_len": 20, "policy": "fcfs"}, 1, True
    ),
    [Plan([1], {**ALONE, "stop_token_ids": []}, 0, False, [], 0, None, None)] * 2,
)
@settings(max_examples=50, deadline=None)
def test_steps_are_those_of_serving_one_by_one(world, plans):
    world = replace(calm(world), num_pages=400)
    runs = [Run(world, plans), Run(world, plans)]
    one_by_one(runs[1].bench)
    runs[0].model.always_draws = True
    for run in runs:
        run.play()
    columns, single = ([signature(decision, world.page_size) for decision in run.model.decisions] for run in runs)
    assert columns == single
    assert not any(isinstance(decision.rows, StepRows) for decision in runs[1].model.decisions)


def test_all_that_decode_are_columns_and_the_others_follow():
    bench = Bench(max_prefill_chunk=4)
    bench.submit(make_request("a", [1, 2], max_tokens=9), make_request("b", [3], max_tokens=9, logprobs=0)).step()
    bench.submit(make_request("c", range(1, 9)))
    rows = bench.step().rows
    assert rows.request_ids == ["a"]
    assert [(row.request_id, row.num_scheduled_tokens) for row in rows.others] == [("b", 1), ("c", 4)]
    assert [row.request_id for row in rows] == ["a", "b", "c"]
    assert rows[0] == ScheduledRow("a", 0, 0, 2, (null_tokens([1, 2], 1, 7)[0],), 3, 1, SAMPLES, reason="decode")


def test_nobody_is_steady_while_somebody_is_in_want():
    def steps(**config):
        bench = Bench(**config)
        bench.submit(make_request("a", max_tokens=9), make_request("b", max_tokens=9)).step()
        return isinstance(bench.step().rows, StepRows)

    assert steps()
    assert not steps(stall_steps=1)
    assert not steps(max_preemptions=0)
    assert not steps(max_batched_tokens=1)


def test_a_row_that_goes_on_inside_a_shared_page_copies_it_first():
    bench = Bench()
    bench.submit(make_request("a", [1, 2, 3, 4, 5], max_tokens=12)).step()
    bench.submit(make_request("b", [1, 2], max_tokens=6)).step()  # all of it is cached, in the middle of a page
    copies = [bench.step().copies for _ in range(2)]
    assert list(map(len, copies)) == [1, 0]
    bench.run()
    assert bench.tokens("b") == null_tokens([1, 2], 6, 7)


@pytest.mark.parametrize("drawn", [DrawnRows([VOCAB]), DrawnRows([-1]), DrawnRows([], [RowResult()])])
def test_drawn_tokens_that_do_not_fit_are_charged_to_their_row(drawn):
    bench = Bench().submit(make_request(max_tokens=9))
    bench.step()
    decision = bench.scheduler.plan()
    assert isinstance(decision.rows, StepRows)
    events = bench.scheduler.commit(StepResult(decision.step, drawn))
    assert [event.finish_reason for event in events] == ["error", "error"]


def test_columns_read_as_rows():
    rows = StepRows(["a", "b"], [0, 1], [4, 5], [7, 8], [1, 2], [3, 4], {}, (ScheduledRow("c", 0, 6, 0, (9,), 1, 0),))
    assert (len(rows), rows[-1].slot, [row.slot for row in rows[1:]]) == (3, 6, [5, 6])
    assert rows == tuple(rows) and rows != tuple(rows)[1:] and rows != 3
    with pytest.raises(IndexError):
        rows[3]
    results = DrawnRows([1], [RowResult((2,))])
    assert [result.token_ids for result in results] == [(1,), (2,)]


def test_a_prefix_that_a_steady_row_completes_is_waited_for():
    bench = Bench(make_kv(page_size=2))
    bench.submit(make_request("a", [1, 2, 3], max_tokens=8)).step()
    said = null_tokens([1, 2, 3], 8, 7)
    bench.submit(make_request("b", [1, 2, 3, *said[:3]], max_tokens=1))
    bench.run()
    assert bench.end("b").num_cached_tokens >= 4


def steady_bench():
    """Six steps of a request whose full pages (eight tokens of its nine) nobody has asked for yet."""
    bench = Bench(make_kv(page_size=2))
    bench.model.always_draws = True
    bench.submit(make_request("a", [1, 2, 3], max_tokens=12))
    for _ in range(6):
        bench.step()
    return bench, null_tokens([1, 2, 3], 12, 7)


def test_the_full_pages_of_a_steady_row_are_there_for_the_next_to_come():
    bench, said = steady_bench()
    row = next(
        row for row in bench.submit(make_request("b", [1, 2, 3, *said[:5]])).step().rows if row.request_id == "b"
    )
    assert row.start == 7


def test_the_full_pages_of_a_steady_row_outlive_its_preemption():
    bench, said = steady_bench()
    bench.scheduler._roster.preempt(bench.scheduler.get("a").branches[0], 0.0, "test")
    assert bench.step().rows[0].start == 8
    assert bench.run().tokens("a") == said


def test_who_is_held_is_left_out_of_one_plan_wherever_it_stands():
    """Running beside others and alone, with and without drafts, and in the queue."""
    bench = Bench(make_kv(64, 4), max_running_requests=2)
    for name in "abc":
        bench.submit(make_request(name, [1, 2, 3], max_tokens=20))
    bench.step()
    bench.step()
    for held, drafted, served in (("a", "", "b"), ("b", "ab", "a"), ("ab", "", ""), ("", "", "ab"), ("c", "", "ab")):
        bench.scheduler.propose({(name, 0): [1] for name in drafted})
        bench.scheduler.hold([(name, 0) for name in held])
        assert sorted(row.request_id for row in bench.step().rows) == list(served)
    bench.scheduler.cancel("a")
    bench.scheduler.hold([("c", 0)])
    assert [row.request_id for row in bench.step().rows] == ["b"]
    assert {row.request_id for row in bench.step().rows} == {"b", "c"}
