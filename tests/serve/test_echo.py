"""`echo` with logprobs: those of the prompt, then those of the output, whatever is cached and however it is told."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_http import COMPLETIONS, events, make_app, send

from octavo.core.params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.serve.logprobs import token_text

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
OPTIONS: dict[str, Any] = {"backend": "reference", "page_size": 4, "audit": True, "max_prefill_chunk": 5}
PROMPTS = st.sampled_from(["the quick", "the brown fox", "a"]).flatmap(
    lambda text: st.integers(1, len(text)).map(lambda length: text[:length])
)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    running = AsyncEngine.load(EngineConfig(TINY, **OPTIONS), say=lambda line: None)
    yield running
    running.shutdown()
    assert running.loaded.core.kv.usage().pages.referenced == 0


@pytest.fixture(scope="module")
def cold() -> LLM:
    return LLM(TINY, **OPTIONS, prefix_cache=False, say=lambda line: None)


def choices_of(engine: AsyncEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Text, end and logprobs of each choice; the pieces of a stream are joined."""
    answer = send(make_app(engine), "POST", COMPLETIONS, json=body)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    pieces = [event["choices"] for event in events(answer)] if body["stream"] else [answer.json()["choices"]]
    found: dict[int, dict[str, Any]] = {}
    for piece in (choice for choices in pieces for choice in choices):
        mine = found.setdefault(piece["index"], {"text": "", "finish_reason": None, "logprobs": {}})
        mine["text"] += piece["text"]
        mine["finish_reason"] = mine["finish_reason"] or piece["finish_reason"]
        for name, values in (piece.get("logprobs") or {}).items():
            mine["logprobs"].setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


def places(tokens: list[str]) -> list[int]:
    """Where each token stands in the text; no special token is shown in it."""
    return [0, *accumulate(0 if token.startswith("<") else len(token) for token in tokens)][:-1]


def expected(cold: LLM, prompt: str, params: SamplingParams, special: bool) -> list[dict[str, Any]]:
    """The same of prompt_logprobs and of the output's logprobs, from an engine that keeps nothing."""
    tokenizer = cold.tokenizer
    (output,) = cold.generate([tokenizer.encode(prompt, add_special_tokens=special)], params)
    found = []
    for choice in output.outputs:
        entries = [*(output.prompt_logprobs or ()), *choice.logprobs]
        tokens = [token_text(tokenizer, token) for token in [*output.prompt_token_ids, *choice.token_ids]]
        assert len(entries) == len(tokens) and entries[0] is None
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [
                entry and {token_text(tokenizer, t): v for t, v in (*entry.top, (entry.token_id, entry.logprob))}
                for entry in entries
            ],
            "text_offset": places(tokens),
        }
        found.append({"text": prompt + choice.text, "finish_reason": choice.finish_reason, "logprobs": logprobs})
    return found


@settings(max_examples=15)
@example("the", 4, 1, 0, 0, True, True, True)
@given(
    prompt=PROMPTS,
    most=st.sampled_from([0, 0, 1, 4]),
    choices=st.integers(1, 3),
    top=st.integers(0, 2),
    seed=st.integers(0, 3),
    special=st.booleans(),
    stream=st.booleans(),
    warm=st.booleans(),
)
def test_they_are_those_of_the_prompt_and_of_the_output(
    engine: AsyncEngine,
    cold: LLM,
    prompt: str,
    most: int,
    choices: int,
    top: int,
    seed: int,
    special: bool,
    stream: bool,
    warm: bool,
) -> None:
    asked = {"prompt": prompt, "max_tokens": most, "n": choices, "seed": seed, "add_special_tokens": special}
    if warm:  # all of it is cached then, and perhaps more
        before = {"prompt": prompt + " jumps", "max_tokens": 1, "add_special_tokens": special, "stream": False}
        choices_of(engine, before)
    found = choices_of(engine, {**asked, "echo": True, "logprobs": top, "stream": stream})
    params = SamplingParams(n=choices, seed=seed, max_tokens=most, logprobs=top, prompt_logprobs=top)
    assert found == expected(cold, prompt, params, special)


def test_of_a_list_every_prompt_is_echoed_with_its_own(engine: AsyncEngine, cold: LLM) -> None:
    prompts = ["the quick", "the brown fox", "the quick"]
    for most in (0, 2):
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": most, "seed": 5, "stream": False}
        params = SamplingParams(seed=5, max_tokens=most, logprobs=1, prompt_logprobs=1)
        alone = [choice for prompt in prompts for choice in expected(cold, prompt, params, True)]
        assert choices_of(engine, body) == alone


@settings(max_examples=40)
@given(st.text("aé✓😀", max_size=6), st.integers(1, 6), st.booleans(), st.booleans())
def test_a_token_has_the_place_of_its_character_in_the_text(prompt: str, most: int, echo: bool, stream: bool) -> None:
    """Bytes are tokens here, so most begin no character of their own."""
    body = {"prompt": "x" + prompt, "max_tokens": most, "logprobs": 0, "echo": echo, "stream": stream}
    (choice,) = choices_of(FakeEngine(), body)  # type: ignore[arg-type]
    output = choice["text"][len(prompt) + 1 if echo else 0 :]
    known = choice["logprobs"].get("text_offset", [])
    told = [] if not echo else place_of_bytes("x" + prompt, 0)
    assert known[: len(told)] == told
    start = len(prompt) + 1 if echo else 0
    assert known[len(told) :] == place_of_bytes(output, start)[:most]


def place_of_bytes(text: str, start: int) -> list[int]:
    return [start + index for index, character in enumerate(text) for _ in character.encode()]
