"""Whoever guesses tokens fails in a way that nobody thought of: all go on without drafts, with the same bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import Collector, alone, assert_idle, make_core, make_request, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from test_draft_model import GREEDY, MIXED, PROMPT, once, proposer_of

from octavo.core.explain import explain
from octavo.core.history import history_of
from octavo.decoding.speculation import NgramProposer, Proposer, Speculator
from octavo.engine.overlap import StepThread
from octavo.engine.stats import engine_stats

SHORT = replace(GREEDY, max_tokens=18)


class Failure(RuntimeError):
    """One that nothing else raises."""


def failing(do: Callable[..., Any], at: int) -> Callable[..., Any]:
    """It works so many times, and never again."""
    left = iter(range(at))

    def planted(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise Failure("planted")
        return do(*args, **kwargs)

    return planted


def said_of(name: str) -> list[Any]:
    """What a request comes to alone."""
    params = MIXED if name == "b" else SHORT
    return once(params)


def served(proposer: Proposer, overlap: bool = False) -> Any:
    """Three requests, one after the other and beside each other, and their bytes as without drafts."""
    core, collector = make_core(page_size=16), Collector()
    core._thread = StepThread(core.executor) if overlap else None
    core.speculator = Speculator(proposer, 3)
    for name in "ab":
        core.submit(make_request(name, PROMPT, MIXED if name == "b" else SHORT), 0.0)
    run_to_end(core, collector)
    core.flush_cache()
    core.submit(make_request("c", PROMPT, SHORT), 0.0)
    run_to_end(core, collector)
    for name in "abc":
        choices = [collector.choices[name, i] for i in range(2 if name == "b" else 1)]
        assert choices == said_of(name)
    assert_idle(core)
    core.close()
    return core


PLACES = ("model.forward", "backend.sample", "kv.reserve", "kv.begin", "kv.commit", "kv.give_back", "open", "observe")
PLACES += ("drop", "flush", "unread", "propose_all")


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(PLACES), st.integers(0, 9), st.booleans())
def test_a_draft_model_that_fails_is_left_alone_and_no_byte_changes(place: str, at: int, overlap: bool) -> None:
    proposer, owner = proposer_of("itself"), None
    *path, name = place.split(".")
    owner = getattr(proposer, path[0]) if path else proposer
    work = getattr(owner, name)
    try:
        setattr(owner, name, failing(work, at))
        core = served(proposer, overlap)
    finally:
        setattr(owner, name, work)  # the tiny model is everybody's
    assert core.speculator.fault in ("", "Failure: planted")
    assert engine_stats(core)["drafts_off"] == float(bool(core.speculator.fault))
    if at == 0 and name not in ("flush", "unread", "give_back"):
        assert core.speculator.fault


@pytest.mark.parametrize("answer", [[-1], [10**9], ["x"], 5, object()])
@pytest.mark.parametrize("is_for_all", [True, False])
def test_what_is_no_draft_ends_the_guessing_and_nothing_else(answer: Any, is_for_all: bool) -> None:
    proposer = NgramProposer(1, 3)
    proposer.propose_all = lambda asks: [answer] * len(asks) if is_for_all else answer  # type: ignore[method-assign]
    assert served(proposer).speculator.fault


def test_why_is_told_in_the_log_the_metrics_and_the_request(caplog: pytest.LogCaptureFixture) -> None:
    proposer = NgramProposer(1, 3)
    proposer.propose_all = failing(proposer.propose_all, 1)  # type: ignore[method-assign]
    ticks = iter(range(10**6))
    core = make_core(clock=lambda: float(next(ticks)))
    core.speculator = Speculator(proposer, 3)
    with caplog.at_level(logging.ERROR):
        for name in "abc":
            core.submit(make_request(name, PROMPT, SHORT), core.clock())
            while core.has_work:
                core.step(core.clock())
    assert [record.exc_info[0] for record in caplog.records] == [Failure]  # type: ignore[index]
    assert engine_stats(core)["drafts_off"] == 1.0
    events = list(core.scheduler.timeline)
    assert [event["reason"] for event in events if event["kind"] == "drafts_off"] == ["Failure: planted"]
    for name in "abc":
        [decode] = [cause for cause in explain(history_of(events), name).causes if cause.name == "decode"]
        assert decode.detail.endswith("drafts are off: Failure: planted")


def test_it_is_not_asked_again() -> None:
    calls: list[int] = []
    proposer = NgramProposer(1, 3)

    def fails(asks: Any) -> Any:
        calls.append(len(asks))
        raise Failure("planted")

    proposer.propose_all = fails  # type: ignore[method-assign]
    core = served(proposer)
    assert len(calls) == 1 and not core.speculator._branches


def test_an_interruption_is_no_failure() -> None:
    proposer, core = NgramProposer(1, 3), make_core()
    core.speculator = Speculator(proposer, 3)

    def interrupted(asks: Any) -> Any:
        raise KeyboardInterrupt

    proposer.propose_all = interrupted  # type: ignore[method-assign]
    core.submit(make_request("a", PROMPT, SHORT), 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(core, Collector())
    assert not core.speculator.fault
    assert alone("llama", PROMPT, SHORT) == once(SHORT)
