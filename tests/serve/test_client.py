"""Official clients against a real server with the real model: `openai`, and what they have in common with others."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest
from live_server import LiveServer, live_server, metric, wait_idle

pytestmark = pytest.mark.weights

MODEL = "smollm2-135m-instruct"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(MODEL, "--kv-memory", "512MiB", "--max-seq-len", "1024", "--seed", "7") as running:
        yield running
        assert wait_idle(running.url)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_the_plan_is_printed_and_the_model_listed(server: LiveServer, client: openai.OpenAI) -> None:
    printed = "".join(server.output)
    assert "memory plan" in printed and "KV cache" in printed and server.url in printed
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_answer_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert "Paris" in (choice.message.content or "") and choice.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(delta.delta.content or "" for delta in deltas) == choice.message.content
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_comes_with_arguments_that_fit(client: openai.OpenAI, choice: Any) -> None:
    function = {"name": "weather", "description": "The weather in a city.", "parameters": WEATHER, "strict": True}
    turns: Any = [{"role": "user", "content": "How warm is it in Paris?"}]
    asked: Any = {"model": MODEL, "messages": turns, "temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
    asked |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    with client.chat.completions.stream(**asked) as stream:
        fragments = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or ()
    assert final.finish_reason == "tool_calls" and call.function.name == "weather" and call.id
    assert "".join(fragments) == call.function.arguments and len(fragments) > 2
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    whole = client.chat.completions.create(**asked).choices[0].message
    assert [each.function.arguments for each in whole.tool_calls or ()] == [call.function.arguments]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    turns = [*turns, whole.model_dump(exclude_none=True), result]
    assert (
        client.chat.completions.create(**asked | {"messages": turns, "tool_choice": "none"}).choices[0].message.content
    )


def test_responses_are_kept_and_gone_on_with(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(input=FRANCE[0]["content"], **asked)
    assert "Paris" in first.output_text and client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **asked)
    turns = [*FRANCE, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And of Italy?"}]
    made = client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=16)
    assert second.output_text == made.choices[0].message.content
    with client.responses.stream(input=FRANCE[0]["content"], **asked) as stream:
        assert stream.until_done().get_final_response().output_text == first.output_text


def test_anthropics_client_gets_the_same_answer(server: LiveServer, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 16, "extra_body": {"temperature": 0}}
    text = client.chat.completions.create(**asked).choices[0].message.content
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120) as other:
        whole = other.messages.create(**asked)
        with other.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        counted = other.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens
    assert [block.text for block in whole.content] == [text] == ["".join(pieces)]
    assert (
        whole.stop_reason == final.stop_reason == "end_turn" and whole.usage.output_tokens == final.usage.output_tokens
    )
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_ollamas_client_gets_the_same_answer(server: LiveServer, client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=16)
    other = ollama.Client(server.url, timeout=120)
    options = {"temperature": 0, "num_predict": 16}
    whole = other.chat(model=MODEL, messages=FRANCE, options=options)
    parts = list(other.chat(model=MODEL, messages=FRANCE, options=options, stream=True))
    turn = other.generate(model=MODEL, prompt=FRANCE[0]["content"], options=options)
    text = made.choices[0].message.content
    assert text == whole.message.content == "".join(part.message.content or "" for part in parts) == turn.response
    assert made.usage is not None and whole.done_reason == parts[-1].done_reason == "stop"
    for end in (whole, parts[-1], turn):
        assert (end.prompt_eval_count, end.eval_count) == (made.usage.prompt_tokens, made.usage.completion_tokens)
    assert [model.model for model in other.list().models] == [MODEL]


def test_vectors_by_the_openai_and_the_ollama_client(server: LiveServer, client: openai.OpenAI) -> None:
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose again."]
    packed = client.embeddings.create(model=MODEL, input=texts)  # base64 underneath
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float", dimensions=64)
    vectors = [item.embedding for item in packed.data]
    assert [item.index for item in packed.data] == [0, 1, 2] and {len(v) for v in vectors} == {576}
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 15
    for short, whole in zip(plain.data, vectors, strict=True):
        scale = math.hypot(*whole[:64])
        assert short.embedding == pytest.approx([value / scale for value in whole[:64]], rel=1e-5)
        assert math.hypot(*short.embedding) == pytest.approx(1.0, abs=1e-6)
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": texts[0]}, timeout=30).json()["tokens"]
    assert client.embeddings.create(model=MODEL, input=[ids]).data[0].embedding == vectors[0]
    other = ollama.Client(server.url, timeout=120)
    assert [list(v) for v in other.embed(model=MODEL, input=texts).embeddings] == vectors
    old = list(other.embeddings(model=MODEL, prompt=texts[0]).embedding)
    assert [value / math.hypot(*old) for value in old] == pytest.approx(vectors[0], rel=1e-5)
    asked = {"query": texts[0], "documents": texts[1:], "pooling": "mean"}
    ranked = httpx.post(f"{server.url}/v1/rerank", json=asked, timeout=60).json()["results"]
    assert [result["index"] for result in ranked] == [0, 1]


def test_a_request_is_explained_by_causes_that_add_up(server: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=4, n=2, extra_body={"request_id": "why"}, temperature=0
    )
    asked = {"headers": {"authorization": "Bearer unused"}, "timeout": 30}
    (one,) = httpx.get(f"{server.url}/v1/requests/why/explain", **asked).json()["requests"]
    assert one["ended"] and one["finish_reason"] == "length" and one["output_tokens"] == 8
    assert sum(cause["seconds"] for cause in one["causes"]) == pytest.approx(one["wall_s"], rel=0.02)
    assert {"prefill", "decode"} <= {cause["name"] for cause in one["causes"]}
    assert httpx.get(f"{server.url}/v1/requests/why/explain", timeout=30).status_code == 404  # of another key
    assert httpx.get(f"{server.url}/v1/requests/wh/explain", **asked).status_code == 404


def test_a_seed_decides_every_choice(client: openai.OpenAI) -> None:
    def answers(seed: int) -> list[str]:
        made = client.completions.create(
            model=MODEL, prompt="Once upon a time", n=2, seed=seed, temperature=1.0, max_tokens=8
        )
        return [choice.text for choice in sorted(made.choices, key=lambda choice: choice.index)]

    first = answers(5)
    assert answers(5) == first and len(first) == 2
    assert first[0] != first[1] and answers(6) != first


def test_logprobs_of_a_greedy_answer(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs, usage = made.choices[0].logprobs, made.usage
    assert logprobs is not None and logprobs.content is not None and usage is not None
    assert len(logprobs.content) == usage.completion_tokens
    for entry in logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    assert "".join(entry.token for entry in logprobs.content).startswith(made.choices[0].message.content or "?")


def test_a_stop_string_is_not_shown(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 16, "stop": [" of Fra", "zzz"]}
    for stream in (False, True):
        made = client.chat.completions.create(**asked, stream=stream)
        if stream:
            pieces = [chunk.choices[0] for chunk in made if chunk.choices]
            text, end = "".join(piece.delta.content or "" for piece in pieces), pieces[-1]
        else:
            text, end = made.choices[0].message.content, made.choices[0]
        assert text == "The capital" and end.finish_reason == "stop" and end.stop_reason == " of Fra"


def test_token_ids_are_a_prompt_too(server: LiveServer, client: openai.OpenAI) -> None:
    text = "The sky is"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=30).json()["tokens"]
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    made = client.completions.create(prompt=[ids, ids], extra_body={"return_token_ids": True}, **asked)
    alone = client.completions.create(prompt=text, echo=True, logprobs=1, **asked)
    assert {text + choice.text for choice in made.choices} == {alone.choices[0].text}
    assert made.choices[0].prompt_token_ids == ids and len(made.choices[1].token_ids) == 4
    assert alone.choices[0].logprobs is not None
    assert (alone.choices[0].logprobs.tokens or [])[: len(ids)] == ["The", " sky", " is"]


def test_refusals_reach_the_client_as_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong_model:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert MODEL in str(wrong_model.value)
    with pytest.raises(openai.BadRequestError) as wrong_value:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=-1)
    assert wrong_value.value.param == "temperature"
    made = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=1, extra_body={"tempurature": 1})
    assert "temperature" in made.warnings[0]["message"]


def test_a_prefix_shared_by_32_is_computed_once(server: LiveServer) -> None:
    prefix = "You are a helpful assistant of a large library. " * 10

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            prompts = [prefix + f"Visitor {number} asks" for number in range(32)]
            asked = (client.completions.create(model=MODEL, prompt=p, max_tokens=1, temperature=0) for p in prompts)
            return [answer.usage for answer in await asyncio.gather(*asked)]

    usages = asyncio.run(ask())
    computed = [usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens for usage in usages]
    longest = max(usage.prompt_tokens for usage in usages)
    assert longest > 90 and max(computed) > 80  # somebody computed the prefix
    assert sorted(computed)[-2] < 24, computed  # and nobody else did


def test_16_streams_do_not_mix_and_leave_nothing(server: LiveServer) -> None:
    command = [sys.executable, str(SOAK), "--seconds", "3", "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["answers"] >= 16 and report["idle_at_end"] and not report["errors"]
    for part in ("tokenize", "queue", "prefill", "sample", "deliver", "network"):
        assert metric(server.url, "octavo:first_token_part_seconds_count", f'part="{part}"') >= 16, part
    assert metric(server.url, "octavo:core_seconds_total") > 0.0
    for at in ("engine", "socket"):
        assert metric(server.url, "octavo:time_per_output_token_seconds_count", f'at="{at}"') > 0, at


def test_leaving_a_stream_frees_its_pages(server: LiveServer, client: openai.OpenAI) -> None:
    before = metric(server.url, "octavo:request_failures_total", 'class="cancelled"')
    stream = client.completions.create(model=MODEL, prompt="Count: 1, 2, 3,", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    assert wait_idle(server.url)
    assert metric(server.url, "octavo:request_failures_total", 'class="cancelled"') == before + 1


def test_bytes_that_are_no_request(server: LiveServer) -> None:
    large = b"GET / HTTP/1.1\r\nhost: x\r\nx-filler: " + b"a" * 40_000
    many = b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 70 + b"\r\n"
    for sent, status in ((large, b"431"), (many, b"431"), (b"\x16\x03\x01 nonsense\r\n\r\n", b"400")):
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port or 0), timeout=10) as raw:
            raw.sendall(sent)
            answer = b""
            while piece := raw.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status) and body.startswith(b'{"error":{"message"'), answer
