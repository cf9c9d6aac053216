"""SmolLM2 and Gemma 3 on the native backend against `transformers`: every token in fp32, outside near ties in bf16."""

from __future__ import annotations

import numpy as np
import pytest
from test_real_goldens import MODELS, NUM_TOKENS, Golden, read_golden

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM

STRIDE = 3  # every third prompt: long and short ones
NEAR = 0.25  # logits: what bf16 weights, operands and pages may move the distance of the two best tokens


def answers(golden: Golden, model: str, kind: str, kv_dtype: str) -> list[list[int]]:
    longest = max(len(prompt["prompt_token_ids"]) for prompt in golden.prompts) + NUM_TOKENS
    llm = LLM(
        MODELS[model],
        backend="native",
        format=kind,
        kv_dtype=kv_dtype,
        max_seq_len=longest,
        max_running_requests=len(golden.prompts),
        audit=True,
        say=lambda line: None,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([prompt["prompt_token_ids"] for prompt in golden.prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def some(golden: Golden) -> Golden:
    """The same goldens of fewer prompts."""
    arrays = {key: values[::STRIDE] for key, values in golden.arrays.items()}
    return Golden(golden.prompts[::STRIDE], golden.steps, arrays)


@pytest.mark.weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_in_fp32(model: str) -> None:
    golden = some(read_golden(model))
    assert answers(golden, model, "fp32", "fp32") == [prompt["output_token_ids"] for prompt in golden.prompts]


@pytest.mark.weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_in_bf16_outside_near_ties(model: str) -> None:
    golden, wrong = some(read_golden(model)), []
    for i, got in enumerate(answers(golden, model, "bf16", "bf16")):
        want = golden.prompts[i]["output_token_ids"]
        leaves = [step for step in range(NUM_TOKENS) if got[step] != want[step]][:1]
        wrong += [(i, step) for step in leaves if golden.arrays["gap"][i, step] > NEAR]
    assert not wrong, [(i, step, float(np.float32(golden.arrays["gap"][i, step]))) for i, step in wrong]
