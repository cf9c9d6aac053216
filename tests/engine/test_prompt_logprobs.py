"""Logprobs of prompts: those of a cold run, whatever is cached; gathered once for all choices of a request."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import Collector, alone, assert_idle, make_core, make_request, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.params import SamplingParams

PROMPT = tuple(range(3, 40))


def scoring(core: Any) -> list[int]:
    """Tokens of each row that scores a prompt; the list grows."""
    execute, scored = core.executor, []

    def run(decision: Any) -> Any:
        scored.extend(len(row.token_ids) for row in decision.rows if row.flags.prompt_logprobs >= 0)
        return execute(decision)

    core.executor = run
    return scored


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 37),
    choices=st.integers(1, 4),
    most=st.integers(0, 3),
    page_size=st.sampled_from([1, 4]),
    chunk=st.sampled_from([3, 64]),
    warm=st.booleans(),
    cache=st.booleans(),
    preempt=st.sampled_from([None, 0, 2, 3]),
)
def test_they_are_those_of_a_cold_run_and_gathered_once(
    length: int, choices: int, most: int, page_size: int, chunk: int, warm: bool, cache: bool, preempt: int | None
) -> None:
    params = SamplingParams(n=choices, seed=3, max_tokens=most, prompt_logprobs=1, logprobs=0, ignore_eos=True)
    core, collector = make_core(page_size=page_size, max_prefill_chunk=chunk, prefix_cache=cache), Collector()
    if warm:
        core.submit(make_request("before", PROMPT, SamplingParams(max_tokens=2)), 0.0)
        run_to_end(core, Collector())
    scored = scoring(core)
    core.submit(make_request("r", PROMPT[:length], params), 0.0)
    step = 0
    while core.has_work:
        if step == preempt and core.scheduler._roster.running:
            core.scheduler._roster.preempt(core.scheduler._roster.running[-1], 0.0, "forced")
        collector.take(core.step(0.0))
        step += 1
        assert step < 300, "no progress"
    assert_idle(core)
    cold = alone("llama", PROMPT[:length], params)
    assert [collector.choices["r", choice] for choice in range(choices)] == cold
    assert all(choice.prompt_logprobs == cold[0].prompt_logprobs for choice in cold)
    assert len(cold[0].prompt_logprobs) == length
    if preempt is None:
        assert length - 1 <= sum(scored) <= length


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_on_other_backends_too(backend: str) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=2, prompt_logprobs=2)
    found = []
    for warm in (False, True):
        core, collector = make_core(backend=backend, page_size=16, max_prefill_chunk=64), Collector()
        if warm:
            core.submit(make_request("before", PROMPT, SamplingParams(max_tokens=2)), 0.0)
            run_to_end(core, Collector())
        core.submit(make_request("r", PROMPT, params), 0.0)
        run_to_end(core, collector)
        found.append([collector.choices["r", choice] for choice in range(3)])
    assert found[0] == found[1]
