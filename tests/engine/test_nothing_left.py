"""Where a grammar, bans and ends together leave no token, a request ends with that reason, and the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.output import NOTHING_LEFT, OutputDelta
from octavo.serve.errors import ApiError
from octavo.serve.generate import Job, _checked

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
CASES: list[dict[str, Any]] = [
    {"allowed_token_ids": [5, 6], "no_repeat_ngram_size": 1},
    {"grammar": Grammar("choice", '["yes"]'), "min_tokens": 9},
    {"grammar": Grammar("choice", '["yes"]'), "allowed_token_ids": [7]},
]


@pytest.mark.parametrize("backend", ["reference", "numpy", "native"])
def test_a_request_without_a_token_left_ends_with_that_reason(backend: str) -> None:
    llm = LLM(TINY, backend=backend, say=lambda line: None, audit=True)
    (alone,) = llm.generate("hello", SamplingParams(max_tokens=9, seed=1))
    params = [SamplingParams(max_tokens=9, seed=1), *(SamplingParams(max_tokens=9, **case) for case in CASES)]
    plain, *ended = llm.generate(["hello"] * len(params), params)
    assert plain.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [NOTHING_LEFT in (output.outputs[0].error or "") for output in ended] == [True] * len(CASES)


def test_a_client_that_asked_for_nothing_is_told_so() -> None:
    with pytest.raises(ApiError) as refusal:
        job = Job("r", [], SamplingParams(), timeout=9.0)
        _checked(job, OutputDelta("r", 0, "", (), finish_reason="error", error=f"RowError: {NOTHING_LEFT}"))
    assert refusal.value.status == 400 and refusal.value.code == "nothing_left"
