"""Order of service and the hand-out of a step's tokens."""

import pytest
from builders import make_request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import build_batch
from octavo.core.errors import InvalidInput
from octavo.core.policies import POLICIES, Policy, count_bypass, make_policy, service_order
from octavo.core.policies.priority import PriorityFirst
from octavo.core.undo import UndoLog


def branch(arrival, priority=0, bypassed=0, choice=0):
    result = make_request(f"r{arrival}", priority=priority, n=choice + 1).branches[choice]
    result.arrival_index, result.bypassed = arrival, bypassed
    return result


def order(branches, policy, limit=64):
    return [b.arrival_index for b in service_order(branches, policy, limit)]


def test_orders():
    waiting = [branch(3, 5), branch(1, 9), branch(2, -1)]
    assert order(waiting, Policy()) == [1, 2, 3]
    assert order(waiting, PriorityFirst()) == [2, 3, 1]
    choices = [branch(1, choice=1), branch(1, choice=0)]
    assert [b.choice for b in service_order(choices, PriorityFirst(), 64)] == [0, 1]


def test_who_was_passed_too_often_goes_first():
    waiting = [branch(1, 9, bypassed=2), branch(2, 9, bypassed=3), branch(3, 9, bypassed=3), branch(4, -9)]
    assert order(waiting, PriorityFirst(), 3) == [2, 3, 4, 1]


def test_only_older_branches_are_passed():
    waiting = [branch(1), branch(2), branch(2, choice=1), branch(3)]
    undo = UndoLog()
    count_bypass(waiting, branch(2), undo)
    assert [b.bypassed for b in waiting] == [1, 0, 0, 0]
    undo.rollback()
    assert [b.bypassed for b in waiting] == [0, 0, 0, 0]


@given(
    arrivals=st.lists(st.integers(0, 1), min_size=1, max_size=120),
    limit=st.integers(1, 6),
    priorities=st.lists(st.integers(-3, 3), min_size=120, max_size=120),
)
def test_nobody_is_passed_more_often_than_the_limit(arrivals, limit, priorities):
    """Whatever arrives between admissions: the later arrivals admitted before anybody stay within the limit."""
    policy, waiting, count = PriorityFirst(), [branch(0, 99)], 0
    passed = {0: 0}
    for arrives, priority in zip(arrivals * 3, priorities * 3, strict=False):
        if arrives:
            count += 1
            waiting.append(branch(count, priority))
            passed[count] = 0
        elif waiting:
            admitted = service_order(waiting, policy, limit)[0]
            waiting.remove(admitted)
            count_bypass(waiting, admitted, UndoLog())
            for other in waiting:
                passed[other.arrival_index] += other.arrival_index < admitted.arrival_index
    assert max(passed.values()) <= limit


def test_make_policy():
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(InvalidInput, match="policy = 'fairly'"):
        make_policy("fairly")


SNAPSHOTS = st.lists(
    st.fixed_dictionaries(
        {"phase": st.sampled_from(["decode", "waiting", "prefill", "asleep"]), "prompt_left": st.integers(0, 9)}
    ),
    max_size=8,
)


@given(SNAPSHOTS, st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
def test_build_batch_keeps_its_budgets(snapshots, token_budget, max_sequences, chunk):
    requests = [{"id": i, **snapshot} for i, snapshot in enumerate(snapshots)]
    batch = build_batch(requests, token_budget, max_sequences, chunk)
    assert sum(tokens for _, _, tokens in batch) <= token_budget
    assert len(batch) <= max_sequences
    phases = [phase for _, phase, _ in batch]
    assert phases == sorted(phases, key=lambda phase: phase != "decode")
    for request_id, phase, tokens in batch:
        left = 1 if phase == "decode" else min(requests[request_id]["prompt_left"], chunk)
        assert phase == requests[request_id]["phase"] != "asleep"
        assert 1 <= tokens <= left
        assert tokens == left or (request_id, phase, tokens) == batch[-1]
    for group in (["decode"], ["waiting", "prefill"]):
        ids = [request_id for request_id, phase, _ in batch if phase in group]
        assert ids == sorted(ids)
    possible = sum(1 if r["phase"] == "decode" else r["prompt_left"] > 0 for r in requests if r["phase"] != "asleep")
    assert len(batch) == min(possible, max_sequences) or sum(t for _, _, t in batch) == token_budget


@pytest.mark.parametrize("budgets", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_build_batch_refuses_empty_budgets(budgets):
    with pytest.raises(ValueError, match="positive"):
        build_batch([], *budgets)


def test_build_batch_refuses_a_request_twice():
    with pytest.raises(ValueError, match="unique"):
        build_batch([{"id": 1, "phase": "decode"}, {"id": 1, "phase": "decode"}], 5, 5, 5)
