"""Jump-forward: what a grammar forces takes no forward pass of its own, and all bytes are what they are without."""

import itertools

import pytest
from engine_harness import Collector, make_core, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends import available_backends
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.speculation import Speculator
from octavo.decoding.speculation.ngram import NgramProposer
from octavo.engine.stats import engine_stats

PATTERNS = ["(the cat|a dog) sat on (a|the) mat[!?]", "abcdef[0-9]{1,3}", "[a-e]{3}", "(ab){1,4}c", "x"]
BACKENDS = [name for name in available_backends() if name not in ("null", "cost", "numpy")]  # which promise equal bytes


def outcome(backend, requests, *, jumps, guesses=False, patience=10.0, **scheduling):
    core = make_core(backend=backend, page_size=16 if backend == "native" else 4, **scheduling)
    core.forcing.patience = patience
    if not jumps:
        core.forcing = None
    if guesses:
        core.speculator = Speculator(NgramProposer(2, 4), 4)
    collector, steps = Collector(), 0
    for name, prompt, params in requests:
        core.submit(make_request(name, prompt, params), 0.0)
    while core.has_work:
        collector.take(core.step(0.0))
        steps += 1
        assert steps < (500 if patience else 500_000)
    return collector.choices, steps, core


@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_fall_by_the_forced_share(backend):
    """One request: a pass for each token less those that are forced, and the end token's."""
    params = SamplingParams(max_tokens=40, seed=3, grammar=Grammar("regex", PATTERNS[0]), logprobs=1)
    requests = [("r", [1, 9, 31], params)]
    with_jumps, few, core = outcome(backend, requests, jumps=True)
    without, many, _ = outcome(backend, requests, jumps=False)
    assert with_jumps == without and with_jumps["r", 0].finish_reason == "stop"
    tokens, forced = len(with_jumps["r", 0].tokens), core.forcing.num_forced
    assert forced >= 10 and (few, many) == (many - forced, many) and many >= tokens


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(PATTERNS), st.integers(0, 99), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(BACKENDS),
    st.booleans(),
    st.integers(2, 9),
    st.integers(24, 60),
    st.sampled_from([0.0, 10.0]),
)
def test_the_bytes_are_the_same_whatever_goes_on(drawn, backend, guesses, chunk, pages, patience):
    requests = [
        (f"r{i}", [1, 9 + i, 31], SamplingParams(
            max_tokens=30, seed=seed, n=1 + (seed % 2), presence_penalty=0.3 * wants, min_tokens=seed % 3,
            logprobs=1 if wants else None, grammar=Grammar("regex", pattern),
        ))
        for i, (pattern, seed, wants) in enumerate(drawn)
    ]  # fmt: skip
    plain, _, _ = outcome(backend, requests, jumps=False)
    tight = {"max_batched_tokens": 2 * chunk, "max_prefill_chunk": chunk, "num_pages": pages}
    found, _, core = outcome(backend, requests, jumps=True, guesses=guesses, patience=patience, **tight)
    assert told(found) == told(plain)
    core.forcing.drafts(core.scheduler.get, lambda others: {})
    assert not (core.forcing._asked or core.forcing._jobs or core.forcing._followed._masks)


def told(choices):
    """How far a choice was when another one of its request failed is no promise."""
    return {key: choice.error or choice for key, choice in choices.items()}


def test_what_grammars_took_and_spared_is_counted():
    params = SamplingParams(max_tokens=40, seed=3, grammar=Grammar("regex", PATTERNS[0]))
    core, ticks = make_core(), itertools.count()
    core.grammars._clock = lambda: next(ticks)
    for name in "abc":
        core.compile(params)
        core.submit(make_request(name, [1, 9, 31], params if name < "c" else SamplingParams(max_tokens=1)), 0.0)
    while core.has_work:
        core.step(0.0)
    told = engine_stats(core)
    assert (told["grammar_queries"], told["grammar_misses"], told["grammar_compile_seconds"]) == (2, 1, 1)
    assert told["grammar_forced_tokens"] == core.forcing.num_forced >= 20


def test_a_fault_ends_its_own_request():
    """A grammar that this vocabulary cannot say to the end: its request fails with words, others go on."""
    dead = SamplingParams(max_tokens=9, grammar=Grammar("regex", "ab(é|cdé)"))
    fine = SamplingParams(max_tokens=9, seed=1, grammar=Grammar("regex", "abc[de]"))
    alone = outcome("reference", [("fine", [1, 5], fine)], jumps=True)[0]
    both, _, _ = outcome("reference", [("dead", [1, 4], dead), ("fine", [1, 5], fine)], jumps=True)
    assert both["fine", 0] == alone["fine", 0]
    assert both["dead", 0].finish_reason == "error" and "grammar cannot be followed" in both["dead", 0].error


def test_what_a_request_follows_is_kept_until_it_ends_and_no_longer():
    """Other grammars come meanwhile, more than are kept; one of two requests is preempted, too."""
    new = SamplingParams(grammar=Grammar("regex", "new"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.decoding.grammar.compiler.MAX_KEPT", 2)
        core, others = make_core(num_pages=13, max_seq_len=48), 0
        for i in range(2):
            params = SamplingParams(max_tokens=24, seed=i, grammar=Grammar("regex", f"[a-e]{{20}}{i}"))
            assert not core.is_ready_for(params) and core.compile(params) and core.is_ready_for(params)
            core.submit(make_request(f"r{i}", [1, 9, *range(i + 12)], params), 0.0)
        assert core.compile(new) and core.knows(new) and not core.is_ready_for(new)
        while core.has_work:
            others += core.compile(SamplingParams(grammar=Grammar("regex", f"b{{{others + 1}}}")))
            core.step(0.0)
        assert core.grammars.num_compiled == 3 + others and engine_stats(core)["preemptions"] > 0
        assert core.compile(new) and core.is_ready_for(new) and core.grammars.num_held == 0
