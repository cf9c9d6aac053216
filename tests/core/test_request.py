"""Requests: the table of states, resources at the end, counters, snapshots."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.core.request import (
    ALLOWED,
    QUEUED,
    RUNNING,
    TERMINAL,
    FinishReason,
    Request,
    RequestState,
    apply_transition,
)

STATES = list(RequestState)
SEED_EDGES = {
    "waiting": {"admitted", "cancelled", "failed"},
    "admitted": {"prefilling", "cancelled", "failed"},
    "prefilling": {"decoding", "cancelled", "failed"},
    "decoding": {"finished", "cancelled", "failed"},
}


def test_table_is_the_seeds_plus_preemption():
    for state, targets in SEED_EDGES.items():
        extra = {"recompute", "swapped"} if state in ("prefilling", "decoding") else set()
        assert ALLOWED[state] == targets | extra
    for state in ("recompute", "swapped"):
        assert ALLOWED[state] == {"admitted", "cancelled", "failed"}
    assert {"finished", "cancelled", "failed"} == TERMINAL
    assert not TERMINAL & set(ALLOWED)


def test_every_state_is_queued_running_or_terminal():
    assert sorted([*QUEUED, *RUNNING, *TERMINAL]) == sorted(STATES)


@given(st.sampled_from(STATES), st.sampled_from(STATES), st.integers(0, 9))
def test_apply_transition_is_total(state, target, blocks):
    if target in ALLOWED.get(state, ()):
        expected = 0 if target in TERMINAL or target == "recompute" else blocks
        assert apply_transition(state, target, blocks) == (target, expected)
    else:
        with pytest.raises(ValueError, match="illegal transition"):
            apply_transition(state, target, blocks)


@pytest.mark.parametrize("blocks", [-1, 1.0, None, "1"])
def test_apply_transition_refuses_what_is_no_count(blocks):
    with pytest.raises(ValueError, match="kv_blocks"):
        apply_transition("waiting", "admitted", blocks)


def test_seed_facade():
    request = Request("r0")
    with pytest.raises(ValueError):
        request.reserve_blocks(1)
    request.transition(RequestState.ADMITTED)
    request.reserve_blocks(2)
    for count in (0, -1, 1.5, True):
        with pytest.raises(ValueError):
            request.reserve_blocks(count)
    request.transition("prefilling")
    request.transition(RequestState.DECODING)
    assert request.kv_blocks == 2
    request.computed_tokens = 8
    request.transition(RequestState.FINISHED)
    assert (request.kv_blocks, request.computed_tokens, request.state) == (0, 8, "finished")
    for call in (lambda: request.transition(RequestState.DECODING), lambda: request.reserve_blocks(1)):
        with pytest.raises(ValueError):
            call()


def test_computed_tokens_never_fall():
    request = Request("r0")
    request.computed_tokens = 3
    with pytest.raises(InvalidInput, match="computed_tokens"):
        request.computed_tokens = 2
    with pytest.raises(InvalidInput, match="each branch"):
        Request("r1", [1], SamplingParams(n=2)).computed_tokens = 1


def test_request_transition_is_all_or_nothing():
    request = Request("r", [1], SamplingParams(n=2))
    request.branches[0].transition(RequestState.ADMITTED)
    with pytest.raises(InvalidInput):
        request.transition(RequestState.ADMITTED)
    assert [branch.state for branch in request.branches] == ["admitted", "waiting"]


def test_state_of_several_branches():
    request = Request("r", [1], SamplingParams(n=3))
    first, second, third = request.branches
    first.transition(RequestState.ADMITTED)
    assert request.state == "admitted"
    for branch in (first, second):
        branch.finish(FinishReason.STOP)
    assert request.state == "waiting"
    third.abandon(RequestState.CANCELLED, FinishReason.CANCELLED)
    assert request.state == "cancelled"
    assert Request("r", [1]).state == "waiting"


@pytest.mark.parametrize(
    "path", [[], ["admitted"], ["admitted", "prefilling"], ["admitted", "prefilling", "recompute"]]
)
def test_finish_walks_legal_edges_from_every_live_state(path):
    branch = Request("r", [1]).branches[0]
    for state in path:
        branch.transition(RequestState(state))
    branch.finish(FinishReason.STOP, "x")
    assert (branch.state, branch.finish_reason, branch.stop_reason) == ("finished", "stop", "x")
    for end in (
        lambda: branch.finish(FinishReason.STOP),
        lambda: branch.abandon(RequestState.FAILED, FinishReason.ERROR),
    ):
        with pytest.raises(InvalidInput):
            end()
    assert branch.finish_reason == "stop"


def test_preemption_gives_up_everything_but_history():
    branch = Request("r", [1, 2, 3]).branches[0]
    branch.transition(RequestState.ADMITTED)
    branch.reserve_blocks(2)
    branch.transition(RequestState.PREFILLING)
    branch.slot, branch.num_resident_tokens, branch.num_computed_tokens = 4, 2, 2
    branch.transition(RequestState.RECOMPUTE)
    assert (branch.kv_blocks, branch.slot, branch.num_resident_tokens, branch.num_computed_tokens) == (0, None, 0, 2)
    assert branch.num_missing_tokens == 3


def test_truncate_is_idempotent():
    branch = Request("r", [1]).branches[0]
    for token in (5, 6, 7):
        branch.append(token, None)
    branch.num_resident_tokens = branch.num_delivered_tokens = 3
    for _ in range(2):
        branch.truncate_at(1)
        assert (branch.output_token_ids, branch.logprobs) == ([5], [])
        assert (branch.num_resident_tokens, branch.num_delivered_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 257}),
        ("request_id", {"request_id": 3}),
        ("params", {"params": {"n": 1}}),
        ("prompt_token_ids[1]", {"prompt_token_ids": [1, -1]}),
        ("prompt_token_ids[0]", {"prompt_token_ids": [True]}),
        ("prompt_token_ids", {"prompt_token_ids": "abc"}),
        ("priority", {"priority": 1.5}),
        ("deadline", {"deadline": float("nan")}),
        ("arrival", {"arrival": float("inf")}),
        ("eos_token_ids[0]", {"eos_token_ids": [-2]}),
    ],
)
def test_bad_fields_are_named(field, values):
    with pytest.raises(InvalidInput) as caught:
        Request(**{"request_id": "r", "prompt_token_ids": [1], **values})
    assert caught.value.field == field


floats = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.one_of(
    st.none(),
    st.builds(
        TokenLogprobs,
        st.integers(0, 99),
        floats,
        st.integers(1, 99),
        st.lists(st.tuples(st.integers(0, 99), floats), max_size=2).map(tuple),
        st.lists(st.tuples(st.integers(0, 99), floats), max_size=2).map(tuple),
    ),
)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    n=st.integers(1, 3),
    outputs=st.lists(st.tuples(st.integers(0, 99), logprobs), max_size=4),
    ended=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_snapshot_survives_json(prompt, n, outputs, ended, seed):
    params = SamplingParams(n=n, logit_bias={7: 1.5}, stop=("x",), seed=seed)
    request = Request("r", prompt, params, tenant="t", priority=-2, deadline=3.5, namespace="ns", eos_token_ids=[9])
    branch = request.branches[-1]
    for token, entry in outputs:
        branch.append(token, entry)
    branch.num_delivered_tokens, branch.num_computed_tokens = len(outputs), len(outputs) + len(prompt)
    branch.num_cached_tokens, branch.num_preemptions = 1, 2
    branch.prompt_logprobs = [TokenLogprobs(1, -0.5, 1)]
    if ended:
        branch.finish(FinishReason.STOP, 7)
    else:
        branch.transition(RequestState.ADMITTED)
        branch.transition(RequestState.PREFILLING)
        branch.slot, branch.num_resident_tokens = 3, 1
    saved = json.loads(json.dumps(request.snapshot()))
    again = Request.restore(saved)
    twin = again.branches[-1]
    assert (twin.output_token_ids, twin.logprobs, twin.prompt_logprobs) == (
        branch.output_token_ids,
        branch.logprobs,
        branch.prompt_logprobs,
    )
    assert (twin.state, twin.slot, twin.num_resident_tokens) == ("finished" if ended else "waiting", None, 0)
    assert again.branches[0].seed == seed and again.params == params and again.prompt_token_ids == tuple(prompt)
    if ended:
        assert again.snapshot() == saved
    else:
        assert twin.num_computed_tokens == branch.num_computed_tokens


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.pop("branches"),
        lambda saved: saved.update(version=2),
        lambda saved: saved.update(branches=[]),
        lambda saved: saved.update(branches=[3]),
        lambda saved: saved["branches"][0].update(state="asleep"),
        lambda saved: saved["branches"][0].update(num_computed_tokens=-1),
        lambda saved: saved["branches"][0].update(logprobs=[[1]]),
        lambda saved: saved.update(params={"temperatur": 1}),
    ],
)
def test_damaged_snapshots_are_refused(damage):
    saved = Request("r", [1]).snapshot()
    damage(saved)
    with pytest.raises(InvalidInput):
        Request.restore(saved)


def test_repr_tells_where_things_stand():
    request = Request("r", [1, 2])
    assert "waiting" in repr(request) and "0/2" in repr(request.branches[0])
