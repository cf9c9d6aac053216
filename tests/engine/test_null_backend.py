"""The null model answers what `null_tokens` says, whatever the engine does with pages, and notices foreign ones."""

from __future__ import annotations

import gc
import random
import re
from array import array
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.backends import available_backends, create_backend
from octavo.backends.null_backend import _allowed, null_tokens
from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.engine import metrics
from octavo.engine.llm import LLM

FIXTURES = Path(__file__).parents[2] / "fixtures"
TOKENS = st.integers(3, 55)


def llm(model: str = "tiny_model.json", **options: Any) -> LLM:
    options = {"backend": "null", "audit": True, "page_size": 4, **options}
    return LLM(str(FIXTURES / model), say=lambda line: None, **options)


@settings(max_examples=15, deadline=None)
@example([(0, [5, 6]), (0, [7]), (1, [8])], 30, 256, "1MiB", None, "trees")
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(TOKENS, min_size=1, max_size=20)), min_size=1, max_size=8),
    st.integers(1, 30),
    st.sampled_from((2, 7, 256)),
    st.sampled_from(("12KiB", "1MiB")),
    st.sampled_from((None, 5)),
    st.sampled_from(("", "chains", "trees")),
)
def test_every_token_is_foretold(
    asked: list[tuple[int, list[int]]], count: int, chunk: int, memory: str, seed: int | None, drafts: str
) -> None:
    """With shared beginnings, prompts in pieces, too few pages for all at once, and guesses of which some are wrong."""
    prompts = [[1, *[3 + prefix] * 9, *rest] for prefix, rest in asked]
    drawn = {"temperature": 0.0} if seed is None else {"seed": seed}
    params = SamplingParams(max_tokens=count, **drawn)
    engine = llm(max_prefill_chunk=chunk, kv_memory=memory, max_seq_len=64)
    told = [list(islice(null_tokens(prompt, 56, (2,), seed), count)) for prompt in prompts]
    if drafts:
        said = lambda request_id, choice: told[int(request_id.rpartition("-")[2]) - 1]  # noqa: E731
        engine.loaded.core.speculator = Oracle(said, 5, 3, trees=drafts == "trees")
    for right, output in zip(told, engine.generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == right


@pytest.mark.parametrize("model", ["tiny_model.json", "tiny_two_groups.json"])
def test_a_page_of_somebody_else_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = [1, *range(4, 30)], SamplingParams(max_tokens=9, temperature=0.0)
    right = llm(model).generate([prompt], params)[0].outputs[0]
    engine = llm(model)
    engine.generate([prompt], params)
    pool = engine.loaded.core.kv.store
    pool.hashes[:] = array("Q", [7]) * len(pool.hashes)  # the cache hands these out
    wrong = engine.generate([prompt], params)[0].outputs[0]
    assert wrong.error or wrong.token_ids != right.token_ids


def test_nobody_takes_it_for_a_model() -> None:
    said: list[str] = []
    LLM(str(FIXTURES / "tiny_model.json"), backend="null", say=said.append)
    assert any("no model runs" in line.lower() for line in said)
    assert "null" not in available_backends()
    with pytest.raises(InvalidInput, match="known: reference, numpy, native or auto"):
        create_backend("nul")


def test_what_has_been_served_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is kept of requests and steps is bounded: once it is full, the same load leaves as many objects."""
    monkeypatch.setattr(metrics, "_KEPT_STEPS", 50)
    monkeypatch.setattr(metrics, "_KEPT_REQUESTS", 50)
    engine, dice, counts = llm(page_size=4, kv_memory="64KiB", audit=False), random.Random(1), []
    engine.loaded.core.scheduler.timeline._events = deque(maxlen=200)
    for _ in range(4):
        for _ in range(8):
            prompts = [[1, *dice.choices(range(4, 40), k=dice.randrange(4, 60))] for _ in range(24)]
            engine.generate(prompts, SamplingParams(max_tokens=dice.randrange(1, 9), temperature=0.0))
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert max(counts[2:]) < counts[1] + 60, counts


@given(st.sets(st.integers(0, 60), min_size=1))
def test_each_id_that_a_mask_allows_can_be_drawn_and_no_other(ids: set[int]) -> None:
    mask = sum(1 << i for i in ids).to_bytes(8, "little")
    assert [_allowed(drawn, mask) for drawn in range(2 * len(ids))] == sorted(ids) * 2


@pytest.mark.parametrize("pattern", ["[ab]{3,9}c", "(ab|cd)+e", "abcde"])
@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {"seed": 5}])
def test_an_answer_follows_its_grammar(pattern: str, drawn: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=60, grammar=Grammar("regex", pattern), **drawn)
    choice = llm().generate([[1, 5]], params)[0].outputs[0]
    assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop", choice
