"""Promise 2, nothing leaks, nothing is lost: errors inside the model fail or retry only what they belong to."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_harness import (
    MODELS,
    Collector,
    alone,
    assert_idle,
    inject,
    make_core,
    make_request,
    run_to_end,
    tiny_parts,
)

from octavo.core.errors import RowError
from octavo.core.params import SamplingParams

PROMPTS = [(1, 9, 31, 44, 12), (1, 9, 31, 7), (5, 6, 7, 8, 9, 10, 11), (20, 3)]
PARAMS = SamplingParams(temperature=0.9, max_tokens=6, seed=4, logprobs=1)


class Breaking:
    """A model whose op fails on one request's token: the fault sits inside the forward pass."""

    def __init__(self, ops: Any, poison: int, op: str, times: int) -> None:
        self._ops, self._poison, self._op, self._left = ops, poison, op, times

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._ops, name)
        if name != self._op:
            return real

        def broken(*arguments: Any, **options: Any) -> Any:
            batch = next((a for a in arguments if hasattr(a, "token_ids")), None)
            tokens = batch.token_ids if batch is not None else arguments[0]
            if self._poison in tokens and self._left:
                self._left -= 1
                raise FloatingPointError(f"{name} failed")
            return real(*arguments, **options)

        return broken


def run_with(model: str, op: str, poison: int, times: int) -> tuple[Any, Collector]:
    core, collector = make_core(model, page_size=2, max_prefill_chunk=3), Collector()
    runner = core.executor.__self__  # type: ignore[attr-defined]
    runner.backend = Breaking(runner.backend, poison, op, times)
    for i, prompt in enumerate(PROMPTS):
        core.submit(make_request(f"r{i}", prompt, PARAMS, model), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    return core, collector


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("op", ["embed", "write_kv", "attention", "rope"])
def test_a_fault_that_stays_fails_its_own_request_only(model: str, op: str) -> None:
    core, collector = run_with(model, op, poison=10, times=10**9)
    for i, prompt in enumerate(PROMPTS):
        got = collector.choices[f"r{i}", 0]
        expected = alone(model, prompt, PARAMS)[0]
        if 10 in prompt:
            assert got.finish_reason == "error"
            assert "failed" in (got.error or "")
        elif 10 in expected.tokens:  # it sampled the poison itself
            assert got.tokens == expected.tokens[: len(got.tokens)]
        else:
            assert got == expected
    assert core.metrics.num_failed_steps > 1  # it was looked for by halves
    follow = Collector()
    core.submit(make_request("afterwards", PROMPTS[3], PARAMS, model), 0.0)
    run_to_end(core, follow)
    if 10 not in alone(model, PROMPTS[3], PARAMS)[0].tokens:
        assert follow.choices["afterwards", 0] == alone(model, PROMPTS[3], PARAMS)[0]


@pytest.mark.parametrize("op", ["embed", "write_kv", "attention"])
def test_a_fault_that_passes_fails_nobody(op: str) -> None:
    core, collector = run_with("llama", op, poison=10, times=1)
    for i, prompt in enumerate(PROMPTS):
        assert collector.choices[f"r{i}", 0] == alone("llama", prompt, PARAMS)[0]
    assert core.metrics.num_failed_steps == 1


def test_a_row_error_is_charged_at_once() -> None:
    core, collector = make_core(), Collector()
    for i, prompt in enumerate(PROMPTS):
        core.submit(make_request(f"r{i}", prompt, PARAMS), 0.0)

    def fail(decision: Any) -> Exception | None:
        rows = [i for i, row in enumerate(decision.rows) if row.request_id == "r2"]
        return RowError(rows, "this row cannot be computed") if rows else None

    inject(core, fail)
    run_to_end(core, collector)
    assert_idle(core)
    assert core.metrics.num_failed_steps == 1
    assert collector.choices["r2", 0].finish_reason == "error"
    assert "cannot be computed" in (collector.choices["r2", 0].error or "")
    for i in (0, 1, 3):
        assert collector.choices[f"r{i}", 0] == alone("llama", PROMPTS[i], PARAMS)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_the_row_s_own_error(value: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=5, seed=1, logprobs=1)
    core, collector = make_core(), Collector()
    runner = core.executor.__self__  # type: ignore[attr-defined]
    model = runner.model

    class Spoiled:
        def forward(self, ops: Any, weights: Any, batch: Any) -> Any:
            logits = model.forward(ops, weights, batch)
            owner = [batch.request_ids[row] for row in range(len(batch.seq_lens))]
            return [[value] * len(row) if owner[i] == "r1" else row for i, row in enumerate(logits)]

    runner.model = Spoiled()
    for i, prompt in enumerate(PROMPTS[:3]):
        core.submit(make_request(f"r{i}", prompt, params), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    assert collector.choices["r1", 0].finish_reason == "error"
    assert collector.choices["r1", 0].tokens == []
    for i in (0, 2):
        assert collector.choices[f"r{i}", 0] == alone("llama", PROMPTS[i], params)[0]


def test_a_wrong_answer_of_the_runner_is_an_error_of_its_row() -> None:
    core, collector = make_core(), Collector()
    execute = core.executor

    def forgetful(decision: Any) -> Any:
        from dataclasses import replace

        result = execute(decision)
        rows = [
            replace(out, token_ids=()) if row.request_id == "r0" else out
            for row, out in zip(decision.rows, result.rows, strict=True)
        ]
        return replace(result, rows=tuple(rows))

    core.executor = forgetful
    for i in range(2):
        core.submit(make_request(f"r{i}", PROMPTS[i], PARAMS), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    assert collector.choices["r0", 0].finish_reason == "error"
    assert collector.choices["r1", 0] == alone("llama", PROMPTS[1], PARAMS)[0]


def test_pages_of_a_failed_step_are_never_reused_while_named() -> None:
    """The fault comes after the model has written; the retry must not see what it wrote in somebody else's page."""
    core, collector = make_core(num_pages=14, max_prefill_chunk=2), Collector()
    failures = iter([None, OSError("late"), None, OSError("late"), OSError("late")])
    inject(core, lambda decision: next(failures, None) if len(decision.rows) > 2 else None, after=True)
    for i, prompt in enumerate(PROMPTS):
        core.submit(make_request(f"r{i}", prompt, PARAMS), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    for i, prompt in enumerate(PROMPTS):
        assert collector.choices[f"r{i}", 0] == alone("llama", prompt, PARAMS)[0]
    assert tiny_parts("llama").backend.access_log is None
