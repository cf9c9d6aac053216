"""Proposers over a real forward pass: fewer steps, the same choices, and an account of it."""

from __future__ import annotations

import pytest
from engine_harness import Collector, alone, assert_idle, make_core, make_request, run_to_end

from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.decoding.speculation import METHODS, make_speculator
from octavo.engine.config import EngineConfig
from octavo.engine.stats import engine_stats

PROMPT = (4, 9, 31, 4, 9, 31, 4, 9)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adapts", [True, False])
def test_fewer_steps_and_the_same_choices(method: str, adapts: bool) -> None:
    core, collector, ends = make_core("llama"), Collector(), {}
    core.speculator = make_speculator(method, 4, 1, 3, adapts=adapts)
    ticks = iter(range(10**6))
    core.clock = lambda: next(ticks) * 1e-3
    for name in ("a", "b"):
        core.submit(make_request(name, PROMPT, PARAMS), 0.0)
        while core.has_work:
            events = list(core.step(0.0))
            collector.take(events)
            ends.update({e.request_id: e.spent for e in events if e.kind is EventKind.REQUEST_END})
    assert_idle(core)
    for name in ("a", "b"):
        assert [collector.choices[name, 0]] == alone("llama", PROMPT, PARAMS)
    stats = engine_stats(core)
    drafted, accepted = stats["draft_tokens"], stats["accepted_draft_tokens"]
    assert 0 < accepted <= drafted and stats["draft_steps"] > 0 and stats["draft_seconds/propose"] > 0
    assert core.metrics.num_steps == 2 * 40 - accepted  # each step yields one token and what was accepted
    assert sum(end[2] for end in ends.values()) == drafted and sum(end[3] for end in ends.values()) == accepted
    assert not core.speculator._branches and not core.speculator._requests


def test_what_is_asked_for_is_named_when_it_cannot_be() -> None:
    assert make_speculator("", 8) is None and EngineConfig().speculator() is None
    for values in ({"speculative": "eagle"}, {"num_speculative_tokens": 0}, {"prompt_lookup_max": 1}):
        with pytest.raises(InvalidInput):
            EngineConfig(**{"speculative": "ngram", **values})


def test_a_config_in_the_spelling_of_vllm() -> None:
    asked = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}').speculator()
    assert asked is not None and asked.most == 3
    for text in (
        "[]",
        "{",
        '{"method": "eagle"}',
        '{"model": "x"}',
        '{"method": "ngram", "num_speculative_tokens": "3"}',
    ):
        with pytest.raises(InvalidInput):
            EngineConfig(speculative_config=text)
    with pytest.raises(InvalidInput, match="at odds"):
        EngineConfig(speculative="suffix", speculative_config='{"method": "ngram"}')


def test_gangs_and_vectors_have_no_drafts() -> None:
    core, collector = make_core("llama"), Collector()
    core.speculator = make_speculator("ngram", 4, 1, 3, adapts=False)
    core.submit(make_request("v", PROMPT, SamplingParams(max_tokens=0, pooling="mean")), 0.0)
    run_to_end(core, collector)
    assert core.speculator.stats.drafted == 0
