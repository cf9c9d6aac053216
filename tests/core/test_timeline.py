"""The timeline: in order, bounded, by the table of events, readable as JSON lines."""

import json
from pathlib import Path

import pytest
import timeline_examples
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.event_table import BY_CODE, BY_NAME, KINDS, TYPES
from octavo.core.timeline import Timeline


@given(capacity=st.integers(0, 5), count=st.integers(0, 9))
def test_keeps_the_last_and_counts_the_rest(capacity, count):
    timeline = Timeline(capacity, process="p", epoch=3)
    for i in range(count):
        timeline.record("delivered", i / 2, spent=i)
    kept = [json.loads(line) for line in timeline.to_jsonl().splitlines()]
    assert kept == list(timeline)
    assert [event["n"] for event in kept] == list(range(count))[max(0, count - capacity) :]
    head = {"v": 2, "process": "p", "epoch": 3}
    for n, event in ((event["n"], event) for event in kept):
        assert event == {**head, "n": n, "t": n / 2, "kind": "delivered", "spent": n}
    assert (timeline.num_dropped, timeline.num_recorded) == (count - len(timeline), count)
    assert timeline.now == max(0, count - 1) / 2


def test_refuses_a_negative_capacity():
    with pytest.raises(InvalidInput, match="capacity"):
        Timeline(-1)


def test_listeners_hear_everything_until_they_stop():
    timeline, heard = Timeline(1), []
    assert not timeline.has_listeners
    stop = timeline.listen(lambda kind, t, values: heard.append((kind, t, dict(values))))
    assert timeline.has_listeners
    timeline.record("read", 1.0, request="a")
    timeline.tell("read", 2.0, request="b")
    stop()
    timeline.record("read", 3.0, request="c")
    assert heard == [("read", 1.0, {"request": "a"}), ("read", 2.0, {"request": "b"})]
    assert [event["request"] for event in timeline] == ["c"]


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [("party", {}, "kind"), ("read", {}, "request"), ("read", {"request": "a", "guest": 1}, "guest")],
)
def test_an_event_that_is_not_in_the_table_cannot_be_read(kind, values, field):
    timeline = Timeline()
    timeline.record(kind, 0.0, **values)
    with pytest.raises(InvalidInput, match=field):
        list(timeline)


def test_the_table_is_sound():
    assert len(BY_CODE) == len(BY_NAME) == len(KINDS)
    for kind in KINDS:
        assert 0 < kind.code < 64, "two bytes would do, one is better"
        assert {field.type for field in kind.fields} <= set(TYPES)
        optional = [field.optional for field in kind.fields]
        assert optional == sorted(optional), "optional fields come last, so that more can follow"


PAGE = (Path(__file__).parents[2] / "docs" / "timeline.md").read_text(encoding="utf-8")


def test_the_page_explains_every_event_by_an_example_of_the_real_code():
    for text in timeline_examples.sections():
        assert text in PAGE
    found = timeline_examples.events_by_kind()
    assert {kind.name for kind in KINDS} - set(found) == set(timeline_examples.RESERVED)


def test_the_page_explains_requests_as_the_engine_does():
    assert timeline_examples.causes() in PAGE
    for name in "ABC":
        assert timeline_examples.explanation(name) in PAGE
