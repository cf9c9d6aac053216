"""Steps that draw as they compute, from arrays that are kept: the same tokens as logits first and draws after them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_harness import Choice, Collector, Oracle, assert_idle, make_core, make_request, run_to_end

from octavo.backends.native_steps import StepArrays
from octavo.backends.ops import SamplingRow
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.runner import ModelRunner

PLAIN = {"max_tokens": 20, "ignore_eos": True}
ASKS: list[dict[str, Any]] = [
    PLAIN,
    {**PLAIN, "temperature": 0.8, "top_p": 0.95, "n": 2},
    {**PLAIN, "temperature": 1.0, "min_tokens": 7, "ignore_eos": False, "logit_bias": {2: 4.0}},
    {**PLAIN, "temperature": 1.0, "frequency_penalty": 0.5},
    {**PLAIN, "temperature": 0.7, "logprobs": 2},
]


def run(asks: list[dict[str, Any]], **settings: Any) -> tuple[dict[tuple[str, int], Choice], EngineCore]:
    speculator = settings.pop("speculator", None)
    core, collector = make_core(page_size=16, backend="native", **settings), Collector()
    core.speculator = speculator
    for index, ask in enumerate(asks):
        params = SamplingParams(**{"temperature": 0.0, "seed": index, **ask})
        core.submit(make_request(f"r{index}", range(4, 14 + 3 * index), params), 0.0)
        collector.take(core.step(0.0))
    run_to_end(core, collector)
    assert_idle(core)
    return collector.choices, core


@pytest.mark.parametrize("asks", [ASKS[:2], ASKS[:3], ASKS, ASKS[3:]])
@pytest.mark.parametrize("chunk", [4, 64])
def test_draws_within_the_step_are_those_made_after_it(
    asks: list[dict[str, Any]], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, _ = run(asks, max_prefill_chunk=chunk)
    monkeypatch.setattr("octavo.engine.runner.ModelRunner._draw", lambda runner, rows: None)
    assert drawn == run(asks, max_prefill_chunk=chunk)[0]


@pytest.mark.parametrize("seed", range(12))
def test_any_step_may_go_the_general_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do in which a prompt's logprobs are asked for: what a slot is told of must not depend on it."""
    wanted, rng, draw = run(ASKS)[0], random.Random(seed), ModelRunner._draw
    share = rng.choice([0.1, 0.5, 0.9])
    monkeypatch.setattr(ModelRunner, "_draw", lambda *args: None if rng.random() < share else draw(*args))
    assert run(ASKS, max_prefill_chunk=rng.choice([4, 64]))[0] == wanted


@pytest.mark.parametrize(("most", "lies", "chunk"), [(1, 0, 64), (3, 1, 64), (7, 3, 5), (15, 1, 64), (6, 8, 64)])
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_change_no_token_and_no_logprob(
    most: int, lies: int, chunk: int, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified rows beside plain ones, each with counts, bans and logprobs of its own, in one call and without."""
    harsh = {**PLAIN, "frequency_penalty": 2.0, "repetition_penalty": 1.8}
    late = {**PLAIN, "temperature": 1.0, "min_tokens": 7, "stop_token_ids": tuple(range(0, 50, 2))}
    formed = {"max_tokens": 20, "temperature": 1.0, "grammar": Grammar("regex", "([a-e]{2}(no|yes|[0-9]{1,4}))+")}
    asks = [*ASKS, harsh, late, formed, {**harsh, "temperature": 1.2, "top_k": 20, "logprobs": 1, "n": 2}]
    wanted, draw, rng = run(asks)[0], ModelRunner._draw, random.Random(most)
    for way in (draw, lambda runner, rows: None, lambda *args: None if rng.random() < 0.5 else draw(*args)):
        monkeypatch.setattr(ModelRunner, "_draw", way)
        oracle = Oracle(lambda *key: wanted[key].tokens, most, lies, trees=trees)
        assert run(asks, max_prefill_chunk=chunk, speculator=oracle)[0] == wanted
        assert oracle.accepted > 0 or lies == 8


def test_a_draw_that_fails_is_made_again_from_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, core = run(ASKS[:2])
    model = core.executor.__self__.model  # type: ignore[attr-defined]
    draw, failures = model.draw, iter(range(10**6))
    monkeypatch.setattr(model, "draw", lambda batch: [-1 if next(failures) % 7 == 3 else i for i in draw(batch)])
    assert run(ASKS[:2])[0] == wanted
    assert next(failures) > 30


def test_arrays_are_kept_while_the_sequences_stay_and_made_anew_when_they_change() -> None:
    arrays, kv = StepArrays(1), object()
    for slot in (3, 70):
        arrays.enter(slot, SamplingRow(SamplingParams(temperature=0.5, top_k=slot), seed=slot, choice=slot))
    first = arrays.decodes([3, 70], [5, 6], [8, 9], [1, 2], kv)  # type: ignore[arg-type]
    assert arrays.decodes([3, 70], [7, 8], [9, 10], [2, 3], kv) is first  # type: ignore[arg-type]
    assert (first.token_ids.tolist(), first.positions.tolist(), first.seq_lens.tolist()) == ([7, 8], [9, 10], [10, 11])
    assert first.draws[["row", "top_k", "seed", "choice", "index"]].tolist() == [(0, 3, 3, 3, 2), (1, 70, 70, 70, 3)]
    fewer = arrays.decodes([70], [1], [11], [4], kv)  # type: ignore[arg-type]
    assert (fewer is first, fewer.draws["top_k"].tolist()) == (False, [70])
    arrays.enter(70, SamplingRow(SamplingParams(temperature=0.0), seed=1))
    assert arrays.decodes([70], [1], [0], [0], kv).draws["top_k"].tolist() == [0]  # type: ignore[arg-type]
    arrays.tables.place(70, 0, 0, np.arange(500))  # the tables have moved
    assert arrays.decodes([70], [1], [1], [1], kv).page_table is arrays.tables.array  # type: ignore[arg-type]
