"""The pictures of a history: a trace that adds up, and a page that needs nothing from anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from engine_harness import make_core, make_request

from octavo.core.history import CAUSES, history_of
from octavo.core.params import SamplingParams
from octavo.engine.trace import page, page_data, trace_events

EVIL = "</script><script>alert(1)</script>&\u2028"


@pytest.fixture(scope="module")
def history():
    core = make_core(max_running_requests=2, num_pages=16)
    now = 100.0
    for i, name in enumerate(["a", "b", EVIL]):
        params = SamplingParams(temperature=0.0, max_tokens=4 + i)
        core.submit(make_request(name, [1, 5 + i, 9], params, arrival=now, tenant="t"), now)
    while core.has_work:
        core.step(now)
        now += 0.25
    return history_of(core.scheduler.timeline)


def test_the_trace_adds_up(history):
    events = trace_events(history)
    assert json.loads(json.dumps(events)) == events
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert list(names.values()) == ["a", "b", EVIL]
    for tid, name in names.items():
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["tid"] == tid]
        assert sum(e["dur"] for e in spans) == pytest.approx(1e6 * history.lives[name].wall)
        assert {e["name"] for e in spans} <= set(CAUSES) and min(e["ts"] for e in spans) >= 0
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["args"]["step"] for e in steps] == [step.number for step in history.steps]
    assert steps[0]["args"]["others"] == ["a: prefill 0..3 of 3", "b: prefill 0..3 of 3"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"sequences", "free pages", "tokens in the step"}


class Page(HTMLParser):
    """Elements, what points outside, labels."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.outside, self.scripts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.outside += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in ("meta", "input", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)


def test_the_page_stands_alone(history):
    text = page(history, "A <title> & more")
    found = Page(text)
    assert found.open == [] and found.outside == []
    assert "{{" not in text and not re.search(r"https?:|url\(|@import|\bfetch\(|import\(|eval\(", text)
    data, code = found.scripts
    assert json.loads(data) == json.loads(json.dumps(page_data(history, "A <title> & more")))
    assert "innerHTML" not in code and "document.write" not in code
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


def test_the_page_can_be_read_without_eyes_and_used_without_a_mouse(history):
    tags = Page(page(history, "t")).tags
    assert dict(tags)["html"]["lang"] == "en"
    for tag, attributes in tags:
        if tag == "canvas" and attributes["id"] == "steps":
            assert attributes["role"] == "img" and attributes["aria-labelledby"] and attributes["tabindex"] == "0"
    assert sum(tag == "table" and "aria-labelledby" in attributes for tag, attributes in tags) == 1
    assert [tag for tag, _ in tags if tag == "h1"] == ["h1"]


def test_the_page_holds_what_explain_says(history):
    data = page_data(history, "t")
    for life, shown in zip(history.lives.values(), data["lives"], strict=True):
        assert shown["request"] == life.request and shown["tenant"] == "t"
        assert sum(shown["sums"].values()) == pytest.approx(1e3 * life.wall, abs=0.01)
        assert sum(to - start for start, to, _ in shown["spans"]) == pytest.approx(shown["wall"], abs=0.01)
    assert len(data["steps"]) == len(history.steps) and all(len(step) == 10 for step in data["steps"])
    empty = page_data(history_of([]), "t")
    assert empty["lives"] == [] and "octavo" in page(history_of([]), "t").lower()
