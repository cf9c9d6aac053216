"""Drafts: more tokens a step, the same tokens; and nothing of a wrong one stays."""

from __future__ import annotations

import io

import pytest
from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import given
from hypothesis import strategies as st
from lying_trees import lying_tree
from null_model import NullModel, null_tokens

from octavo.core.batch import RowResult, StepResult
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidInput
from octavo.core.facts import scheduler_facts
from octavo.core.history import history_of
from octavo.core.recording import MAGIC, FrameWriter, RecordingReader
from octavo.core.replay import Replayer, scheduler_for
from octavo.decoding.speculation import NgramProposer, Speculator

PROMPT = (1, 2, 3)


def told(count, prompt=PROMPT):
    """What the null model says."""
    return null_tokens(prompt, count, 7, 0, VOCAB)


def drafted(bench, drafts, request="r"):
    """One step with drafts; its row of the request."""
    bench.scheduler.propose({(request, 0): drafts})
    decision = bench.step()
    return next(row for row in decision.rows if row.request_id == request)


def test_a_step_yields_the_drafts_that_are_right_and_one_more():
    bench = Bench().submit(make_request(max_tokens=20))
    bench.step()
    row = drafted(bench, told(4)[1:])
    assert (row.num_drafts, row.drafts, row.reason) == (3, tuple(told(4)[1:]), "decode with 3 drafts")
    assert bench.tokens() == told(5)
    assert drafted(bench, [told(6)[5], 96, 96]).num_drafts == 3
    assert bench.tokens() == told(7)
    drafted(bench, [95, 95])
    assert bench.run().tokens() == told(20)


def test_a_tree_of_drafts_goes_along_what_is_drawn():
    bench = Bench(make_kv(64, 2), max_prefill_chunk=7).submit(make_request(max_tokens=20))
    bench.step()
    said = told(12)
    tree = DraftTree((90, said[1], 91, 92, said[2], 93, said[3]), (-1, -1, 0, 1, 1, 4, 4))
    row = drafted(bench, tree)
    assert (row.num_drafts, row.reason) == (6, "decode with 6 drafts in a tree")  # a chunk takes no more
    assert row.parent_rows == (-1, 0, 0, 1, 2, 2, 5)
    assert bench.tokens() == said[:4]
    assert drafted(bench, DraftTree((said[4], 90), (-1, -1))).parent_rows == (-1, 0, 0)
    assert drafted(bench, DraftTree((said[6], said[7], 9), (-1, 0, 0)).first(2)).parent_rows == range(-1, 2)
    assert bench.tokens() == said[:9]
    assert bench.run().tokens() == told(20)


@pytest.mark.parametrize("end", [1, 2, 3])
def test_what_ends_a_choice_ends_it_inside_a_run_of_drafts(end):
    said = told(6)
    stops = Bench().submit(make_request(max_tokens=6, stop_token_ids=[said[end]], min_tokens=0))
    late = Bench().submit(make_request(max_tokens=6, stop_token_ids=[said[1], said[end]], min_tokens=end))
    short = Bench().submit(make_request(max_tokens=end + 1))
    for bench, reason in ((stops, "stop"), (late, "stop"), (short, "length")):
        bench.step()
        drafted(bench, said[1:5])
        assert bench.tokens() == said[: end + 1]
        assert (bench.reason(), bench.end().num_output_tokens) == (reason, end + 1)
        assert not bench.scheduler.has_work
        bench.kv.flush_prefix_cache()
        assert bench.kv.audit().free == bench.kv.allocator.num_pages


def test_pages_of_wrong_drafts_are_given_back_and_not_published():
    bench = Bench(make_kv(16, 2)).submit(make_request(max_tokens=20))
    bench.step()
    drafted(bench, [90] * 8)
    [branch] = bench.scheduler.get("r").branches
    assert (branch.num_tokens, branch.num_resident_tokens, branch.kv_blocks) == (5, 4, 2)
    assert bench.kv.match_length("", [*PROMPT, told(1)[0], *[90] * 8]) == 4


def test_drafts_take_what_is_left_and_nobody_yields_to_them():
    bench = Bench(max_batched_tokens=6, max_prefill_chunk=4).submit(make_request(max_tokens=9))
    bench.step()
    bench.submit(make_request("other", [5] * 9))
    assert drafted(bench, told(4)[1:]).num_drafts == 1  # one token, four of the prompt, and one draft
    full = Bench(make_kv(2, 4)).submit(make_request(max_tokens=6))
    full.step()
    assert drafted(full, told(6)[1:]).num_drafts == 4  # up to one before the limit: that token is drawn
    tight = Bench(make_kv(3, 2)).submit(make_request(max_tokens=4), make_request("b", [8], max_tokens=2))
    tight.step()
    tight.scheduler.propose({("r", 0): told(3)[1:], ("b", 0): [1, 1]})
    assert [row.num_drafts for row in tight.step().rows] == [0, 0]
    assert not tight.run().scheduler.has_work


def test_drafts_are_no_way_past_the_bound_on_gaps():
    bench = Bench(max_token_gap_ms=10).submit(make_request(max_tokens=40))
    scheduler = bench.scheduler
    bench.step()
    scheduler.step_model.coefficients = (0.001, 0.001, 0.0, 0.0, 0.001, 0.0, 0.0)  # a millisecond a token
    assert drafted(bench, told(20)[1:]).num_drafts < 8


def test_a_model_that_takes_a_wrong_draft_for_drawn_is_found_out():
    for tokens in ((90, 90), (90, told(3)[1]), (), told(5)[1:]):
        bench = Bench().submit(make_request(max_tokens=9))
        bench.step()
        bench.scheduler.propose({("r", 0): [told(2)[1], 91]})
        decision = bench.scheduler.plan()
        events = bench.scheduler.commit(StepResult(decision.step, [RowResult(tuple(tokens))]))
        assert events[0].finish_reason == "error"
    for tokens, is_wrong in (((7, 9), False), ((5, 9), True), ((8, 7, 1), True), ((7, 8, 1), False)):
        bench = Bench().submit(make_request(max_tokens=9))
        bench.step()
        bench.scheduler.propose({("r", 0): DraftTree((8, 7, 5, 8), (-1, -1, 0, 1))})
        events = bench.scheduler.commit(StepResult(bench.scheduler.plan().step, [RowResult(tokens)]))
        assert (events[0].finish_reason == "error") == is_wrong, tokens


def test_what_is_no_token_is_no_draft():
    bench = Bench()
    for token in (-1, VOCAB):
        with pytest.raises(InvalidInput, match="drafts"):
            bench.scheduler.propose({("r", 0): [token]})
    bench.scheduler.propose({("nobody", 0): [1]})
    assert not bench.scheduler.plan().rows


def test_nothing_is_remembered_of_more_than_run():
    bench = Bench(policy="priority", max_running_requests=2)
    bench.submit(make_request(max_tokens=9, priority=1), make_request("b", [8], max_tokens=9))
    speculator, scheduler = Speculator(NgramProposer(1, 2), 3), bench.scheduler
    bench.step()
    speculator.drafts(scheduler.running())
    assert list(speculator._branches) == list(speculator.proposer._branches) == [("b", 0), ("r", 0)]
    scheduler._roster.preempt(scheduler.get("r").branches[0], 0.0, "")
    bench.submit(make_request("c", [9], max_tokens=9))
    bench.step()
    speculator.drafts(scheduler.running())
    assert list(speculator._branches) == list(speculator.proposer._branches) == [("b", 0), ("c", 0)]
    while scheduler.has_work:
        scheduler.propose(speculator.drafts(scheduler.running()))
        bench.step()
    assert bench.tokens() == told(9)


class Trees(NgramProposer):
    """What will be said, with a wrong token before each right one."""

    def propose(self, branch_key, token_ids, most):
        right = null_tokens(token_ids, 2, 7, 0, VOCAB)
        return DraftTree((90, right[0], 90, right[1]), (-1, -1, 1, 1))


def test_drafts_beside_the_path_say_nothing_against_those_on_it():
    bench = Bench().submit(make_request(max_tokens=25))
    bench.step()
    speculator = Speculator(Trees(1, 2), 4)
    for _ in range(7):
        bench.scheduler.propose(speculator.drafts(bench.scheduler.running()))
        decision = bench.scheduler.plan()
        result = bench.model(decision)
        bench.scheduler.commit(result)
        speculator.committed(decision.rows, result.rows, 1e-3)
    [(_, taken)] = speculator._branches.values()
    assert taken.chance > 0.9 and speculator.stats.accepted == 14 and speculator.stats.drafted == 28


@given(st.lists(st.integers(0, 7), min_size=3, max_size=12), st.booleans(), st.randoms(use_true_random=False))
def test_a_recording_holds_the_drafts_and_all_that_came_of_them(lies, model, rng):
    bench = Bench().submit(make_request(max_tokens=30, logprobs=0), make_request("b", [4], max_tokens=25))
    out = io.BytesIO()
    writer = FrameWriter(out.write)
    writer.add("start", 0.0, {"process": "t", "epoch": 0, "facts": scheduler_facts(bench.scheduler)})
    writer.add(
        "arrive",
        0.0,
        {
            "request": "r",
            "prompt": PROMPT,
            "facts": {"params": {"max_tokens": 30, "seed": 7, "logprobs": 0}, "seed": 7},
        },
    )
    writer.add(
        "arrive", 0.0, {"request": "b", "prompt": (4,), "facts": {"params": {"max_tokens": 25, "seed": 7}, "seed": 7}}
    )
    bench.scheduler.timeline.listen(writer.add)
    for lie in lies:
        known = bench.scheduler.get("r").branches[0].num_output_tokens if bench.scheduler.get("r") else 30
        right = told(known + 6)[known:]
        guess = right[:lie] + [90] * (5 - lie)
        if rng.random() < 0.5:
            guess = lying_tree(right, 6, lie, rng.randrange, lambda path: range(VOCAB))
        bench.scheduler.propose({("r", 0): guess})
        bench.step()
    bench.run()
    writer.flush()
    events = list(RecordingReader(io.BytesIO(MAGIC + out.getvalue()).read))
    scheduler = scheduler_for(events[0]["facts"])
    replayer = Replayer(scheduler, NullModel(scheduler.kv, VOCAB) if model else None)
    assert all(replayer.feed(event) for event in events[1:]), replayer.difference
    assert replayer.num_tokens == 55
    lives = history_of(events).lives
    assert {name: life.outputs for name, life in lives.items()} == {"r": 30, "b": 25}
    assert lives["r"].steps + lives["r"].accepted == 29 and lives["r"].drafted >= lives["r"].accepted
    assert lives["b"].drafted == 0
