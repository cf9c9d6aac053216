"""Gangs: branches that go on from each other, and are admitted, preempted and drawn together."""

from __future__ import annotations

import json

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import given
from hypothesis import strategies as st
from null_model import NullModel, null_gang, null_score

from octavo.core.batch import GangEnding, GangMove, StepResult
from octavo.core.errors import InvalidInput
from octavo.core.event_table import VERSION
from octavo.core.facts import scheduler_facts
from octavo.core.replay import Replayer, scheduler_for
from octavo.core.request import Request, RequestState
from octavo.core.timeline import plain
from octavo.core.undo import UndoLog
from octavo.core.what_if import load_of, simulate

PROMPT = (1, 2, 3, 4, 5)


def beams(name: str = "g", width: int = 3, prompt=PROMPT, **values) -> Request:
    return make_request(name, prompt, n=width, gang=True, **{"max_tokens": 6, **values})


def said(bench: Bench, name: str = "g", width: int = 3) -> list[list[int | None]]:
    return [bench.tokens(name, choice) for choice in range(width)]


def rows_of(decision, name: str = "g") -> list[int]:
    return [row.choice for row in decision.rows if row.request_id == name]


def recorded(bench: Bench) -> list[dict]:
    """Hears every event as a recording has it; the list grows."""
    events = [{"kind": "start", "n": 0, "facts": json.loads(json.dumps(scheduler_facts(bench.scheduler)))}]

    def hear(kind: str, t: float, values) -> None:
        events.append({"kind": kind, "t": t, "v": VERSION, "n": len(events), **plain(kind, values)})

    bench.scheduler.timeline.listen(hear)
    return events


# ---- what a gang says


@given(
    width=st.integers(1, 4),
    size=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from([(0,), (0,), (5, 0)]),
    extra=st.integers(0, 20),
    chunk=st.sampled_from([1, 3, 64]),
    budget=st.sampled_from([4, 7, 64]),
    host=st.sampled_from([0, 30]),
    others=st.integers(0, 3),
    forced=st.lists(st.integers(0, 3), max_size=8),
    seed=st.integers(0, 50),
)
def test_tokens_are_those_of_the_definition_however_it_is_scheduled(
    width, size, windows, extra, chunk, budget, host, others, forced, seed
):
    kv = make_kv(width * len(windows) * -(-16 // size) + extra, size, windows, host_pages=host)
    bench = Bench(kv, max_prefill_chunk=chunk, max_running_requests=4, max_batched_tokens=budget, max_preemptions=3)
    bench.submit(beams(width=width, seed=seed, max_tokens=10))
    for number in range(others):
        bench.submit(make_request(f"r{number}", (*PROMPT[:number], 9, 9), max_tokens=4))
    while bench.scheduler.has_work:
        bench.step()
        running = bench.scheduler._roster.running
        if forced and running and bench.steps_left % 2:
            victim = running[forced.pop() % len(running)]
            if victim.num_preemptions < 2:
                bench.scheduler._roster.preempt(victim, 0.0, "forced")
    outputs, _ = null_gang(PROMPT, seed, width, 10, VOCAB)
    assert said(bench, width=width) == outputs
    kv.flush_prefix_cache()
    assert kv.audit().free == kv.allocator.num_pages


def test_the_prompt_is_computed_once_and_nobody_is_told_before_the_end():
    bench = Bench().submit(beams(width=4, seed=3))
    first = bench.step()
    assert rows_of(first) == [0] and first.num_scheduled_tokens == len(PROMPT)
    second = bench.step()
    assert rows_of(second) == [0, 1, 2, 3] and not bench.events
    bench.run()
    assert [event.kind.value for event in bench.events if event.choice == 3][-1] == "choice_end"
    assert bench.events[-1].num_output_tokens == sum(len(output) for output in said(bench, width=4))


def test_logprobs_are_those_that_the_driver_gave():
    bench = Bench().submit(beams(logprobs=0, seed=7)).run()
    for event in bench.events:
        if event.token_id is not None:
            assert event.logprobs == null_score(event.token_id, 7)


# ---- together


def test_it_enters_only_where_there_are_slots_for_all():
    bench = Bench(max_running_requests=4).submit(make_request("a", max_tokens=3), make_request("b", max_tokens=9))
    bench.submit(beams(max_tokens=2))
    while bench.scheduler.get("a") is not None:
        assert rows_of(bench.step()) == []
    assert rows_of(bench.step()) == [0]
    assert bench.scheduler.num_running == 4


def test_it_draws_only_where_there_are_tokens_for_all():
    bench = Bench(max_batched_tokens=4).submit(beams(width=3, seed=3, max_tokens=4))
    while bench.scheduler.get("g").branches[0].num_output_tokens == 0:
        bench.step()
    assert rows_of(bench.step(budget=2)) == []
    assert rows_of(bench.step(budget=3)) == [0, 1, 2]


@pytest.mark.parametrize("host_pages", [0, 40])
def test_it_is_preempted_and_comes_back_as_one(host_pages):
    bench = Bench(make_kv(40, 4, host_pages=host_pages), preemption="swap" if host_pages else "recompute")
    bench.submit(beams(seed=3, max_tokens=8))
    for _ in range(5):
        bench.step()
    roster, gang = bench.scheduler._roster, bench.scheduler.get("g").branches
    lost = roster.preempt(roster.running[1], 0.0, "forced")
    assert [each.choice for each in lost] == [0, 1, 2]
    state = RequestState.SWAPPED if host_pages else RequestState.RECOMPUTE
    assert {branch.state for branch in gang} == {state} and bench.scheduler.num_running == 0
    drawn = [rows_of(bench.step()) for _ in range(3)]
    assert [0, 1, 2] in drawn
    bench.run()
    assert said(bench) == null_gang(PROMPT, 3, 3, 8, VOCAB)[0]


def test_a_cancelled_gang_leaves_nothing_and_tells_no_token():
    bench = Bench().submit(beams(seed=3, max_tokens=8))
    for _ in range(4):
        bench.step()
    bench.scheduler.cancel("g")
    bench.run()
    assert said(bench) == [[], [], []] and [bench.reason("g", choice) for choice in range(3)] == ["cancelled"] * 3
    assert bench.events[-1].num_output_tokens == 0
    assert bench.kv.audit().referenced == 0


def test_a_text_that_nobody_was_told_of_is_not_stopped():
    bench = Bench().submit(beams(seed=3))
    bench.step()
    bench.scheduler.stop("g", 1, 0, "END")
    bench.run()
    assert said(bench) == null_gang(PROMPT, 3, 3, 6, VOCAB)[0]


def test_a_snapshot_goes_on_elsewhere():
    bench = Bench().submit(beams(seed=3, max_tokens=8))
    for _ in range(4):
        bench.step()
    saved = json.loads(json.dumps(bench.scheduler.get("g").snapshot()))
    other = Bench().submit(Request.restore(saved)).run()
    assert said(other) == null_gang(PROMPT, 3, 3, 8, VOCAB)[0]
    saved["branches"][1]["output_token_ids"].pop()
    with pytest.raises(InvalidInput, match="as many tokens each"):
        Bench().submit(Request.restore(saved))


@pytest.mark.parametrize(
    ("field", "values", "config"),
    [
        ("n", {"width": 5}, {"max_running_requests": 4}),
        ("n", {"width": 5}, {"max_batched_tokens": 4}),
        ("max_tokens", {"max_tokens": 0}, {}),
        ("prompt_logprobs", {"prompt_logprobs": 0}, {}),
        ("max_tokens", {"width": 8, "max_tokens": 200}, {}),
    ],
)
def test_what_no_step_could_draw_is_refused(field, values, config):
    with pytest.raises(InvalidInput) as raised:
        Bench(**config).submit(beams(**values))
    assert raised.value.field == field


def test_without_a_limit_it_is_bounded_by_the_pages_for_all():
    bench = Bench(make_kv(15, 4)).submit(beams(width=3, max_tokens=None, seed=1))
    assert bench.scheduler.get("g").token_limit == 21  # the last token needs no K/V
    bench.run()
    assert said(bench) == null_gang(PROMPT, 1, 3, 16, VOCAB)[0]


# ---- the driver


@pytest.mark.parametrize(
    "move",
    [
        None,
        GangMove("g", (0, 0), (1, 2)),
        GangMove("g", (0, 0, 3), (1, 2, 3)),
        GangMove("g", (0, 0, 1), (1, 2, 3)),  # has drawn nothing yet
        GangMove("g", (0, 0, 0), (1, 2, VOCAB)),
        GangMove("g", endings=(GangEnding((1,)),)),
        GangMove("g", endings=(GangEnding((1,)), GangEnding(()), GangEnding((1,)))),
        GangMove("g", endings=(GangEnding((1,)), GangEnding((-1,)), GangEnding((1,)))),
        GangMove("g", endings=(GangEnding((1,)), GangEnding((1,) * 7), GangEnding((1,)))),
    ],
)
def test_a_move_that_makes_no_sense_fails_its_request_alone(move):
    bench = Bench()

    class Driven(NullModel):
        def __call__(self, decision) -> StepResult:
            result = bench.model(decision)
            return StepResult(result.step, result.rows, () if move is None else (move,))

    bench.scheduler.executor = Driven(bench.kv)
    bench.submit(beams(), make_request("a")).run()
    assert {bench.reason("g", choice) for choice in range(3)} == {"error"} and said(bench) == [[], [], []]
    assert bench.reason("a") == "length"


# ---- pages


@given(
    size=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    late=st.integers(0, 2),
    data=st.data(),
)
def test_a_reorder_shares_pages_and_is_taken_back_whole(size, lengths, late, data):
    kv = make_kv(60, size, data.draw(st.sampled_from([(0,), (3, 0)])))
    for choice, length in enumerate(lengths):
        units, undo = [choice, *range(length)], UndoLog()
        kv.begin(("g", choice), "", units, 0.0, undo)
        kv.reserve(("g", choice), length, undo)
        kv.take_copies()
        kv.start_step(choice)
        kv.commit(("g", choice), units, length, 0.0)
        kv.end_step(choice)
    keys = [("g", choice) for choice in range(len(lengths) + late)]
    parents = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=len(keys), max_size=len(keys)))
    before = [kv.page_table(key) for key in keys[: len(lengths)]]
    owners = [kv.allocator.owners(page) for page in range(60)]
    counts, undo = kv.audit(), UndoLog()
    ticket = kv.reorder(keys, parents, undo)
    kv.audit()
    assert [kv.page_table(key) for key in keys] == [before[parent] for parent in parents]
    if data.draw(st.booleans()):
        undo.rollback()
        assert [kv.page_table(key) for key in keys[: len(lengths)]] == before
        assert [kv.has_branch(key) for key in keys[len(lengths) :]] == [False] * late
        assert [kv.allocator.owners(page) for page in range(60)] == owners
    kv.allocator.retire(ticket)
    after = kv.audit()
    assert after.ticketed == 0 and after.referenced <= counts.referenced
    for key in keys:
        kv.release_branch(key)
    assert kv.audit().referenced == 0


def test_a_move_that_fails_half_way_changes_nothing(monkeypatch):
    bench = Bench().submit(beams(seed=3, max_tokens=8))
    for _ in range(3):
        bench.step()
    gang = bench.scheduler.get("g").branches
    tables, known = [bench.kv.page_table(b.key) for b in gang], [list(b.token_ids) for b in gang]
    decision = bench.scheduler.plan()
    result, append = bench.model(decision), type(gang[2]).append

    def fail(branch, *values) -> None:
        if branch is gang[2]:
            raise MemoryError
        append(branch, *values)

    monkeypatch.setattr(type(gang[2]), "append", fail)
    with pytest.raises(MemoryError):
        bench.scheduler.commit(result)
    assert [len(bench.kv.page_table(b.key)[0]) for b in gang] == [len(decision_table) for [decision_table] in tables]
    assert [list(b.token_ids) for b in gang] == known


# ---- recordings


def test_a_recorded_gang_replays_and_answers_what_if():
    bench = Bench(make_kv(200, 4))
    events = recorded(bench)
    for number in range(12):
        bench.submit(beams(f"g{number}", seed=number, max_tokens=8, logprobs=0 if number % 2 else None))
        for _ in range(3):
            bench.step()
            bench.scheduler.observe(0.01)
    while bench.scheduler.has_work:
        bench.step()
        bench.scheduler.observe(0.01)
    assert sum(event["kind"] == "gang" for event in events) > 30
    replayer = Replayer(scheduler_for(events[0]["facts"]))
    assert all(replayer.feed(event) for event in events[1:]) and replayer.num_steps > 20

    again = Bench(make_kv(200, 4))
    with_model = Replayer(again.scheduler, again.model)
    assert all(with_model.feed(event) for event in events[1:])
    at = next(i for i, event in enumerate(events) if event["kind"] == "gang" and len(event["parents"]) == 3)
    events[at] = {**events[at], "tokens": [(events[at]["tokens"][0] + 1) % VOCAB, *events[at]["tokens"][1:]]}
    other = Bench(make_kv(200, 4))
    lying = Replayer(other.scheduler, other.model)
    assert not all(lying.feed(event) for event in events[1:])
    assert "gang" in str(lying.difference)


def test_what_if_moves_gangs_as_they_moved():
    bench = Bench(make_kv(200, 4, enable_prefix_cache=False), max_prefill_chunk=2)
    events = recorded(bench)
    for number in range(40):
        bench.submit(beams(f"g{number}", seed=number, max_tokens=8))
        for _ in range(3):
            bench.step()
            bench.scheduler.observe(0.01)
    while bench.scheduler.has_work:
        bench.step()
        bench.scheduler.observe(0.01)
    outcome = simulate(load_of(events), max_running_requests=6)
    assert outcome.finished == outcome.requests == 40 and outcome.made_up == 0
