"""Beam search of 50 prompts on real weights: the tokens and scores of ``transformers`` (`make_beam_golden.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM

GOLDEN = json.loads((Path(__file__).parent / "data" / "beam_smollm2.json").read_text())
SOME = range(0, 50, 7)  # 8 of them, with every setting; all: `make test-beams`


@pytest.mark.weights
def test_prompts_are_continued_as_transformers_continues_them() -> None:
    """Tokens in their order, and scores within 1e-3."""
    asked = range(50) if os.environ.get("OCTAVO_BEAMS") == "all" else SOME
    cases = [GOLDEN["cases"][index] for index in asked]
    llm = LLM("smollm2-135m-instruct", format="fp32", kv_dtype="fp32", max_seq_len=128, say=lambda line: None)
    outputs = llm.generate([case["prompt"] for case in cases], [_params_of(case) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == case["tokens"]
        scores = [_score(choice, case["length_penalty"]) for choice in output.outputs]
        assert scores == pytest.approx(case["scores"], abs=1e-3)


def _params_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        n=case["num_beams"],
        use_beam_search=True,
        max_tokens=GOLDEN["max_new_tokens"],
        min_tokens=case.get("min_new_tokens", 0),
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        logprobs=0,
    )


def _score(choice: Any, penalty: float) -> float:
    assert choice.cumulative_logprob is not None
    return float(choice.cumulative_logprob / len(choice.token_ids) ** penalty)
