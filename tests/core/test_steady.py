"""Rows that plainly decode travel as columns: the same steps and tokens as one by one, whatever else is going on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import PLANS, Run, worlds

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


def signature(decision):
    """A step, but for the pages that were taken and in which order."""
    places = [[(delta.group, delta.first, len(delta.pages)) for delta in row.page_deltas] for row in decision.rows]
    rows = [replace(row, page_deltas=tuple(place)) for row, place in zip(decision.rows, places, strict=True)]
    return sorted(rows, key=lambda row: (row.request_id, row.choice)), len(decision.copies), decision.num_waiting


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_steps_are_those_of_serving_one_by_one(world, plans):
    world = replace(calm(world), num_pages=400)
    runs = [Run(world, plans), Run(world, plans)]
    one_by_one(runs[1].bench)
    runs[0].model.always_draws = True
    for run in runs:
        run.play()
    columns, single = ([signature(decision) for decision in run.model.decisions] for run in runs)
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
