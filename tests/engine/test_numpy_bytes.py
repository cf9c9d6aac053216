"""`numpy` with real weights: the same tokens outside near ties and logprobs within 1e-4, whatever runs beside.

A BLAS chooses kernels by shape, so the bytes may differ; this is how little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_harness import assert_idle

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM

pytestmark = pytest.mark.weights

MODEL = "smollm2-135m-instruct"
TOLERANCE = 1e-4
SYSTEM = "You are a careful librarian. Answer every question in one short sentence, and name the shelf. " * 2
QUESTIONS = ["Where are the atlases?", "Who wrote Emma?", "Is there a book on bread, please?"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)


def make(**options: Any) -> LLM:
    return LLM(
        MODEL, backend="numpy", max_seq_len=256, kv_memory="128MiB", audit=True, say=lambda line: None, **options
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield make(max_prefill_chunk=24, max_batched_tokens=48, page_size=4)


def compare(got: Any, expected: Any) -> None:
    """Equal token by token; where two tokens lie closer than the tolerance the comparison of a choice ends."""
    for token, other in zip(got.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
        (_, first), (_, second) = other.top
        if token.token_id != other.token_id:
            assert first - second < TOLERANCE, "not a near tie"
            return
        assert abs(token.logprob - other.logprob) < TOLERANCE
        for (_, a), (_, b) in zip(token.top, other.top, strict=True):
            assert abs(a - b) < TOLERANCE


def test_alone_whole_and_fresh_or_batched_chunked_and_cached(llm: LLM) -> None:
    prompts = [SYSTEM + question for question in QUESTIONS]
    fresh = make(max_prefill_chunk=256, prefix_cache=False)  # whole prompts, one by one
    alone = [fresh.generate(prompt, PARAMS)[0] for prompt in prompts]
    together = llm.generate(prompts, PARAMS)
    again = llm.generate(prompts[::-1], PARAMS)[::-1]
    assert all(output.num_cached_tokens > 20 for output in again)
    for one, two, three in zip(alone, together, again, strict=True):
        compare(two, one)
        compare(three, one)
    assert_idle(llm.loaded.core)


def test_a_shared_prefix_is_computed_once_for_32_requests(llm: LLM) -> None:
    core = llm.loaded.core
    core.kv.flush_prefix_cache()
    before = core.metrics.scheduled_tokens
    params = SamplingParams(temperature=0.0, max_tokens=1)
    outputs = llm.generate([f"{SYSTEM} Question {i}?" for i in range(32)], params)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    computed = core.metrics.scheduled_tokens - before
    assert computed < lengths[0] + 32 * 12  # the prefix once, and the few tokens of each question
    assert sum(lengths) > 4 * computed
    assert_idle(core)
