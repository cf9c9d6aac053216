"""The timeline: in order, bounded, readable as JSON lines."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.timeline import Timeline


@given(capacity=st.integers(0, 5), count=st.integers(0, 9))
def test_keeps_the_last_and_counts_the_rest(capacity, count):
    timeline = Timeline(capacity)
    for i in range(count):
        timeline.record("token", i / 2, request="r", token=i)
    kept = [json.loads(line) for line in timeline.to_jsonl().splitlines()]
    assert kept == list(timeline)
    assert [event["n"] for event in kept] == list(range(count))[max(0, count - capacity) :]
    for n, event in ((event["n"], event) for event in kept):
        assert event == {"v": 1, "n": n, "t": n / 2, "kind": "token", "request": "r", "token": n}
    assert timeline.num_dropped == count - len(timeline)


def test_refuses_a_negative_capacity():
    with pytest.raises(InvalidInput, match="capacity"):
        Timeline(-1)
