"""Proposers over a real forward pass: fewer steps, the same choices, and an account of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from engine_harness import Collector, alone, assert_idle, make_core, make_request, run_to_end, tiny_parts

from octavo.backends import available_backends
from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.core.speculative_config import METHODS
from octavo.decoding.speculation import make_speculator
from octavo.decoding.speculation.suffix import SuffixTreeProposer
from octavo.engine.config import EngineConfig
from octavo.engine.stats import engine_stats

PROMPT = (4, 9, 31, 4, 9, 31, 4, 9)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(("method", "tree"), [*((method, False) for method in METHODS), ("suffix", True)])
@pytest.mark.parametrize("adapts", [True, False])
def test_fewer_steps_and_the_same_choices(method: str, tree: bool, adapts: bool) -> None:
    core, collector, ends = make_core("llama"), Collector(), {}
    core.speculator = make_speculator(method, 4, 1, 3, adapts=adapts, tree=tree)
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
        '{"method": "draft_model"}',
        '{"method": "ngram", "num_speculative_tokens": "3"}',
    ):
        with pytest.raises(InvalidInput):
            EngineConfig(speculative_config=text)
    asked = EngineConfig(speculative="suffix", speculative_config='{"tree": true}').speculator()
    assert asked is not None and isinstance(asked.proposer, SuffixTreeProposer)
    for text in ('{"method": "ngram", "tree": true}', '{"method": "suffix", "tree": 1}', '{"tree": true}'):
        with pytest.raises(InvalidInput, match="tree"):
            EngineConfig(speculative_config=text)
    with pytest.raises(InvalidInput, match="at odds"):
        EngineConfig(speculative="suffix", speculative_config='{"method": "ngram"}')


def test_gangs_and_vectors_have_no_drafts() -> None:
    core, collector = make_core("llama"), Collector()
    core.speculator = make_speculator("ngram", 4, 1, 3, adapts=False)
    core.submit(make_request("v", PROMPT, SamplingParams(max_tokens=0, pooling="mean")), 0.0)
    run_to_end(core, collector)
    assert core.speculator.stats.drafted == 0


LOOKUP = (1, 3)
BIAS = {4: 2.0, 9: 2.0, 31: 2.0}  # so that guesses are right
DRAWN = SamplingParams(
    temperature=0.4, max_tokens=16, seed=5, ignore_eos=True, logprobs=1, n=2, frequency_penalty=0.05, logit_bias=BIAS
)
STEPS = (
    {"num_pages": 5, "max_prefill_chunk": 3, "max_batched_tokens": 9, "preemption": "swap", "host_pages": 20},
    {"num_pages": 6, "max_prefill_chunk": 16, "max_batched_tokens": 30, "preemption": "recompute"},
    {"num_pages": 90, "max_prefill_chunk": 5, "max_batched_tokens": 64},
)


@pytest.mark.parametrize("backend", [name for name in ("reference", "native") if name in available_backends()])
def test_the_residual_verifier_gives_the_same_bytes_in_any_steps(backend: str) -> None:
    """Each token has its guess, whether or not drafts were computed behind it: company and cuts change nothing."""
    plain = alone("llama", PROMPT, DRAWN, backend=backend, lookup=LOOKUP)
    assert [c.tokens for c in plain] != [c.tokens for c in alone("llama", PROMPT, DRAWN, backend=backend)]
    accepted = 0
    for most, options in enumerate(STEPS, 3):
        core, collector = make_core(backend=backend, page_size=16, lookup=LOOKUP, **options), Collector()
        core.speculator = make_speculator("ngram", most, *LOOKUP, adapts=False)
        for name in "ab":
            core.submit(make_request(name, PROMPT, DRAWN), 0.0)
        run_to_end(core, collector)
        accepted += core.speculator.stats.accepted
        for name in "ab":
            assert [collector.choices[name, choice] for choice in range(2)] == plain
    assert accepted > 0


def test_what_the_residual_verifier_draws_follows_the_law() -> None:
    """The three tokens of many seeds against their probabilities: chi-square at p > 0.001."""
    core, collector = make_core(backend="numpy", lookup=(1, 2), num_pages=900, max_batched_tokens=512), Collector()
    core.audits, core.speculator = False, make_speculator("ngram", 2, 1, 2, adapts=False)
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, logprobs=3, n=16)
    for seed in range(50):
        core.submit(make_request(str(seed), PROMPT, replace(params, seed=seed)), 0.0)
    run_to_end(core, collector)
    seen = Counter(tuple(choice.tokens) for choice in collector.choices.values())
    laws = {tuple(c.tokens[:i]): law_of(c.logprobs[i]) for c in collector.choices.values() for i in range(3)}
    expected = {(): 800.0}
    for _ in range(3):
        expected = {(*text, x): want * p for text, want in expected.items() for x, p in laws[text].items()}
    away = sum((seen[text] - want) ** 2 / want for text, want in expected.items())
    assert set(seen) <= set(expected) and len(expected) == 27
    assert away < 54.1, away  # 26 degrees of freedom
    assert core.speculator.stats.accepted > 20


@pytest.mark.parametrize("backend", [name for name in ("reference", "native") if name in available_backends()])
def test_a_request_chooses_its_verifier(backend: str) -> None:
    """Both beside each other in one step, on engines that guess otherwise or not at all: the bytes of each alone."""
    exact, residual = (replace(DRAWN, speculative_verifier=name) for name in ("exact", "residual"))
    plain = {None: DRAWN, "exact": exact, "residual": residual}
    said = {name: alone("llama", PROMPT, params, backend=backend) for name, params in plain.items()}
    assert said["exact"] == said[None] != said["residual"]
    assert said["residual"] == alone("llama", PROMPT, DRAWN, backend=backend, lookup=(2, 6))
    assert said["exact"] == alone("llama", PROMPT, exact, backend=backend, lookup=LOOKUP)
    for method, chunk in (("", 3), ("suffix", 16), ("ngram", 5)):
        core, collector = make_core(backend=backend, page_size=16, max_prefill_chunk=chunk), Collector()
        core.speculator = make_speculator(method, 3, 1, 3, adapts=False)
        for name in ("exact", "residual"):
            core.submit(make_request(name, PROMPT, plain[name]), 0.0)
        run_to_end(core, collector)
        for name in ("exact", "residual"):
            assert [collector.choices[name, choice] for choice in range(2)] == said[name]
        assert core.speculator is None or core.speculator.stats.accepted > 0
        core.submit(make_request("after", PROMPT, DRAWN), 0.0)  # in a slot that the other verifier had
        run_to_end(core, collector)
        assert [collector.choices["after", choice] for choice in range(2)] == said[None]


@pytest.mark.parametrize("backend", [name for name in ("reference", "native") if name in available_backends()])
def test_the_first_token_is_drawn_by_the_verifier_asked_for(backend: str) -> None:
    """Of a prompt that is read in one step as of one in three."""
    core, collector = make_core(backend=backend, page_size=16, max_prefill_chunk=3, prefix_cache=False), Collector()
    asked = SamplingParams(temperature=1.5, max_tokens=1, ignore_eos=True, speculative_verifier="residual")
    for seed in range(6):
        core.submit(make_request(str(seed), PROMPT, replace(asked, seed=seed)), 0.0)
    run_to_end(core, collector)
    for seed in range(6):
        assert [collector.choices[str(seed), 0]] == alone("llama", PROMPT, replace(asked, seed=seed), backend=backend)


def test_a_greedy_request_is_the_same_by_either_verifier() -> None:
    greedy = replace(PARAMS, max_tokens=12)
    assert alone("llama", PROMPT, greedy) == alone("llama", PROMPT, replace(greedy, speculative_verifier="residual"))


def test_what_cannot_be_drawn_is_blamed_on_its_row_under_either_verifier() -> None:
    """A row without a finite logit fails alone; those beside it, of the other verifier, go on."""
    core, collector = make_core("llama", prefix_cache=False), Collector()
    forward = core.executor.__self__.model.forward  # type: ignore[attr-defined]

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(tiny_parts("llama").model, name)

        def forward(self, ops: object, w: object, batch: object) -> object:
            rows = forward(ops, w, batch)
            return [[math.nan] * len(row) if i in bad else row for i, row in enumerate(rows)]

    core.executor.__self__.model = Broken()  # type: ignore[attr-defined]
    verifiers = ("residual", None, "residual", None)
    for i, verifier in enumerate(verifiers):
        core.submit(make_request(str(i), PROMPT, replace(PARAMS, n=1, speculative_verifier=verifier)), 0.0)
    bad: set[int] = {0, 3}
    collector.take(core.step(0.0))
    bad.clear()
    run_to_end(core, collector)
    reasons = [collector.choices[str(i), 0].finish_reason for i in range(4)]
    assert reasons == ["error", "length", "length", "error"]


def law_of(logprobs: TokenLogprobs) -> dict[int, float]:
    """Of the tokens that may be drawn."""
    total = sum(math.exp(logprob) for _, logprob in logprobs.top)
    return {token: math.exp(logprob) / total for token, logprob in logprobs.top}


def test_what_the_residual_verifier_cannot_do_is_refused_by_name() -> None:
    asked = {"method": "ngram", "verifier": "residual", "prompt_lookup_min": 1}
    assert EngineConfig(speculative_config=json.dumps(asked)).lookup == (1, 6)
    assert EngineConfig(speculative="ngram", speculative_config='{"verifier": "residual"}').lookup == (2, 6)
    assert EngineConfig(speculative_config='{"method": "ngram", "verifier": "exact"}').lookup is None
    for wrong in ({"method": "suffix"}, {"method": ""}, {"verifier": "typical"}):
        with pytest.raises(InvalidInput, match="verifier"):
            EngineConfig(speculative_config=json.dumps({**asked, **wrong}))
    core = make_core(lookup=LOOKUP)
    with pytest.raises(InvalidInput, match="use_beam_search"):
        core.submit(make_request("beams", PROMPT, SamplingParams(use_beam_search=True, n=2, max_tokens=3)), 0.0)
    assert not core.has_work
    parts = tiny_parts("llama")
    assert len({replace(parts, lookup=lookup).numerics_id for lookup in (None, (1, 3), (2, 3))}) == 3
