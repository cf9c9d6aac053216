"""Beams, candidates and choices over HTTP, with a tiny model behind it: as `LLM` has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_http import CHAT, COMPLETIONS, Client, check_error, events, make_app, post, send

from octavo.core.params import SamplingParams
from octavo.decoding.ranking import mean_logprob
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
OPTIONS: dict[str, Any] = {"backend": "reference", "page_size": 4, "audit": True, "say": lambda line: None}
BEAMS = {"prompt": "hello", "max_tokens": 5, "use_beam_search": True, "n": 3, "logprobs": 1, "return_token_ids": True}
RANKED = {"prompt": "hello", "max_tokens": 4, "n": 2, "best_of": 5, "seed": 9, "ignore_eos": True, "logprobs": 0}
TOLD = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    say = OPTIONS["say"]
    running = AsyncEngine.load(EngineConfig(TINY, **{k: v for k, v in OPTIONS.items() if k != "say"}), say=say)
    yield running
    running.shutdown()
    assert running.loaded.core.kv.usage().pages.referenced == 0


def ask(engine: AsyncEngine, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    answer = send(make_app(engine), "POST", path, json=body)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(engine: AsyncEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events(send(make_app(engine), "POST", COMPLETIONS, json={**body, **TOLD}))  # type: ignore[arg-type]


def offline(**values: Any) -> Any:
    return LLM(TINY, **OPTIONS).generate("hello", SamplingParams(**values))[0]


def said(answer: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(c["text"], c["finish_reason"], c["logprobs"]["token_logprobs"]) for c in answer["choices"]]


def expected(output: Any) -> list[tuple[str, Any, Any]]:
    return [(c.text, c.finish_reason, [entry.logprob for entry in c.logprobs]) for c in output.outputs]


# ---- beams


@pytest.mark.parametrize("width", [3, 5])
def test_beams_come_best_first_and_in_a_stream_only_at_the_end(engine: AsyncEngine, width: int) -> None:
    body = {**BEAMS, "best_of": width}
    whole, output = ask(engine, body), offline(max_tokens=5, use_beam_search=True, n=3, best_of=width, logprobs=1)
    assert said(whole) == expected(output) and len(whole["choices"]) == 3
    assert whole["usage"]["completion_tokens"] == output.usage["completion_tokens"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) for choice in whole["choices"]]
    assert sums == sorted(sums, reverse=True)
    *pieces, last = streamed(engine, body)
    assert [piece["choices"][0]["index"] for piece in pieces] == [0, 1, 2]
    assert [piece["choices"][0]["text"] for piece in pieces] == [choice["text"] for choice in whole["choices"]]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_more_beams_find_what_fewer_miss_or_nothing_better(engine: AsyncEngine) -> None:
    def best(width: int) -> float:
        choice = ask(engine, {**BEAMS, "n": 1, "best_of": width, "length_penalty": 0.0, "ignore_eos": True})
        return sum(choice["choices"][0]["logprobs"]["token_logprobs"])

    assert best(1) < best(6)


def test_a_chat_has_beams_as_well(engine: AsyncEngine) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "use_beam_search": True, "n": 2}
    answer = ask(engine, body, CHAT)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None  # they ranked, and nobody asked for them
    *pieces, _ = events(send(make_app(engine), "POST", CHAT, json={**body, **TOLD}))  # type: ignore[arg-type]
    for choice in answer["choices"]:
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["delta"].get("content", "") for piece in mine) == choice["message"]["content"]


def test_a_stop_string_cuts_the_texts_that_were_found(engine: AsyncEngine) -> None:
    body = {**BEAMS, "max_tokens": 8, "ignore_eos": True}
    whole = ask(engine, body)["choices"]
    stop = whole[0]["text"][2]
    for choice, cut in zip(whole, ask(engine, {**body, "stop": stop})["choices"], strict=True):
        assert cut["text"] == choice["text"].partition(stop)[0]
        assert cut["token_ids"] == choice["token_ids"][: len(cut["token_ids"])]
        assert (cut["finish_reason"] == "stop") == (stop in choice["text"])
        assert cut["stop_reason"] == (stop if stop in choice["text"] else None)


# ---- candidates


def test_the_candidates_with_the_best_mean_logprob_are_returned(engine: AsyncEngine) -> None:
    answer = ask(engine, RANKED)
    everyone = offline(max_tokens=4, n=5, seed=9, ignore_eos=True, logprobs=0)
    ranked = sorted(everyone.outputs, key=lambda choice: -mean_logprob(choice.logprobs))
    assert [text for text, _, _ in said(answer)] == [choice.text for choice in ranked[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 5 * 4  # all that were generated
    output = offline(max_tokens=4, n=2, best_of=5, seed=9, ignore_eos=True, logprobs=0)
    assert expected(output) == said(answer) and output.usage["completion_tokens"] == 20
    quiet = offline(max_tokens=4, n=2, best_of=5, seed=9, ignore_eos=True)
    assert [c.text for c in quiet.outputs] == [c.text for c in output.outputs] and not quiet.outputs[0].logprobs


def test_several_prompts_have_candidates_each(engine: AsyncEngine) -> None:
    together = ask(engine, {**RANKED, "prompt": ["hello", "help"]})
    alone = [ask(engine, {**RANKED, "prompt": prompt}) for prompt in ("hello", "help")]
    assert said(together) == [choice for answer in alone for choice in said(answer)]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert together["usage"]["completion_tokens"] == 40


def test_what_cannot_be_is_refused_by_name() -> None:
    check_error(post(COMPLETIONS, {**RANKED, "stream": True}), 400, "best_of")
    check_error(post(COMPLETIONS, {**RANKED, "best_of": 1}), 400, "best_of")
    check_error(post(COMPLETIONS, {**RANKED, "best_of": 65}), 400, "best_of")
    check_error(post(COMPLETIONS, {**BEAMS, "temperature": 0.5}), 400, "temperature")
    check_error(post(COMPLETIONS, {**BEAMS, "echo": True}), 400, "echo")
    check_error(post(COMPLETIONS, {"prompt": "a", "length_penalty": 2.0}), 400, "length_penalty")
    check_error(post(COMPLETIONS, {"prompt": ["a"] * 30, "best_of": 5}), 400, "n")


# ---- choices


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
def test_a_stop_string_ends_one_choice_and_leaves_the_others(engine: AsyncEngine, more: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "n": 4, "seed": 2, "ignore_eos": True, "frequency_penalty": 0.3, **more}
    free = ask(engine, body)["choices"]
    texts = [choice["text"].removeprefix("hello" if "echo" in more else "") for choice in free]
    stop = next(text[i] for text in texts for i in range(1, len(text)) if sum(text[i] in t for t in texts) < 4)
    for choice, text, before in zip(ask(engine, {**body, "stop": stop})["choices"], texts, free, strict=True):
        kept = text.partition(stop)[0]
        assert choice["text"] == ("hello" if "echo" in more else "") + kept
        ending = ("stop", stop) if stop in text else ("length", None)
        assert (choice["finish_reason"], choice["stop_reason"]) == ending
        if more:
            count = len(choice["logprobs"]["token_logprobs"])
            assert choice["logprobs"]["token_logprobs"] == before["logprobs"]["token_logprobs"][:count]


def test_choices_are_those_of_their_seeds_whatever_else_is_asked(engine: AsyncEngine) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "n": 3, "seed": 4, "repetition_penalty": 1.3, "ignore_eos": True}
    three, five = ask(engine, body)["choices"], ask(engine, {**body, "n": 5, "logprobs": 3})["choices"]
    assert [choice["text"] for choice in three] == [choice["text"] for choice in five[:3]]
    assert len({choice["text"] for choice in five}) > 1


@pytest.mark.parametrize("asked", [BEAMS, RANKED])
def test_a_client_that_leaves_ends_all_candidates(engine: AsyncEngine, asked: dict[str, Any]) -> None:
    async def body() -> None:
        client = Client(make_app(engine), COMPLETIONS, {**asked, "max_tokens": 60, "stream": False})  # type: ignore[arg-type]
        task = asyncio.ensure_future(client.run())
        while not engine.loaded.core.scheduler.num_running:
            await asyncio.sleep(0.001)
        client.leave()
        await task
        while engine.loaded.core.has_work:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(body(), 30))
    assert engine.loaded.core.kv.usage().pages.referenced == 0
