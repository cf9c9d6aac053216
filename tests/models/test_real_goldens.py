"""SmolLM2-135M-Instruct and Gemma 3 270M against `transformers` on the same dequantized weights in float32.

The goldens say at every step how far apart the two best tokens were (`gap`) and how much float32 itself moves the
logits (`noise`: with against without a KV cache, in transformers). So equality of every token is no luck.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from model_harness import DATA, Loaded, batches, forward

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
TOLERANCE = 1e-3
NUM_TOKENS = 64


@dataclass(frozen=True)
class Golden:
    """What transformers answered: `prompts[i]` and row i of every array belong together."""

    prompts: list[dict[str, Any]]
    steps: list[int]
    arrays: dict[str, np.ndarray]


def read_golden(name: str) -> Golden:
    plain = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    with np.load(DATA / f"{name}.npz") as arrays:
        return Golden(plain["prompts"], plain["logit_steps"], dict(arrays))


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Golden, LLM]]:
    """A model and its goldens; one model in memory at a time."""
    golden = read_golden(request.param)
    longest = max(len(prompt["prompt_token_ids"]) for prompt in golden.prompts) + NUM_TOKENS
    options = {"backend": "numpy", "max_seq_len": longest, "max_running_requests": len(golden.prompts), "audit": True}
    yield golden, LLM(MODELS[request.param], say=lambda line: None, **options)


@pytest.mark.parametrize("name", MODELS)
def test_no_golden_token_is_a_near_tie(name: str) -> None:
    """The gap is more than ten times what float32 moves: another correct engine has to choose the same tokens."""
    golden = read_golden(name)
    assert len(golden.prompts) == 20
    assert all(len(prompt["output_token_ids"]) == NUM_TOKENS for prompt in golden.prompts)
    assert (golden.arrays["gap"] > 10 * golden.arrays["noise"]).all()
    assert golden.arrays["noise"][:, golden.steps].max() < TOLERANCE / 4


def test_gemma_goldens_reach_past_the_window() -> None:
    lengths = [len(prompt["prompt_token_ids"]) for prompt in read_golden("gemma3").prompts]
    assert sum(length > 512 for length in lengths) >= 2


@pytest.mark.timeout(900)  # on a busy machine BLAS threads wait for each other
@pytest.mark.weights
def test_greedy_tokens_equal_transformers(case: tuple[Golden, LLM]) -> None:
    """All twenty prompts at once through the engine: chunked, batched, paged."""
    golden, llm = case
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = llm.generate([prompt["prompt_token_ids"] for prompt in golden.prompts], params)
    differences = [
        difference(golden, i, answer.outputs[0].token_ids)
        for i, answer in enumerate(answers)
        if answer.outputs[0].token_ids != golden.prompts[i]["output_token_ids"]
    ]
    assert not differences


def difference(golden: Golden, i: int, got: list[int]) -> str:
    """Where an output leaves the golden one, and whether it was a near tie there."""
    want = golden.prompts[i]["output_token_ids"]
    step = next(s for s in range(NUM_TOKENS) if got[s : s + 1] != want[s : s + 1])
    gap, noise, second = (golden.arrays[key][i, step] for key in ("gap", "noise", "second_ids"))
    return (
        f"prompt {i}, step {step}: {got[step : step + 1]}, not {want[step]} (gap {gap}, noise {noise}, next {second})"
    )


@pytest.mark.timeout(900)  # on a busy machine BLAS threads wait for each other
@pytest.mark.weights
def test_logits_equal_transformers(case: tuple[Golden, LLM]) -> None:
    """Prompt and golden output in one pass: sampled ids, the twenty best in order, and the sum of all."""
    golden, llm = case
    parts, arrays = llm.loaded.parts, golden.arrays
    loaded = Loaded(parts.backend, parts.model, dict(parts.weights))
    prompts = [prompt["prompt_token_ids"] for prompt in golden.prompts]
    sequences = [ids + p["output_token_ids"][:-1] for ids, p in zip(prompts, golden.prompts, strict=True)]
    (batch, _), *rest = batches(loaded, sequences, [[len(ids)] for ids in sequences], page_size=16)
    assert not rest
    starts = batch.cu_seqlens_q[:-1]
    rows = [start + len(ids) - 1 + step for start, ids in zip(starts, prompts, strict=True) for step in golden.steps]
    logits = forward(loaded, replace(batch, logit_rows=np.array(rows)))
    logits = logits.reshape(len(prompts), len(golden.steps), -1)
    assert largest(logits[..., arrays["sampled_ids"]] - arrays["logits"]) < TOLERANCE
    assert largest(np.take_along_axis(logits, arrays["top_ids"], axis=-1) - arrays["top_logits"]) < TOLERANCE
    assert largest(logsumexp(logits) - arrays["logsumexp"]) < TOLERANCE
    best = logits.argmax(axis=-1)
    assert np.array_equal(best, arrays["top_ids"][..., 0])


def largest(differences: np.ndarray) -> float:
    return float(np.abs(differences).max())


def logsumexp(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=-1, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=-1, dtype=np.float64)) + top[..., 0]
