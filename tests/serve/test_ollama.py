"""Ollama's API over a fake engine, through Ollama's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import ollama
import pytest
from fake_engine import FakeEngine, refusing
from serve_http import make_app, post, send
from starlette.applications import Starlette

from octavo.serve.apis.ollama import OllamaOptions

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hé"}]}
ANSWER = "<USER>HÉ\n ✓"
PROMPT = len(b"<user>h\xc3\xa9\n")
OUTPUT = len(ANSWER.encode()) + 1
_Result = TypeVar("_Result")


def ask(call: Callable[[ollama.AsyncClient], Awaitable[_Result]], app: Starlette | None = None) -> _Result:
    """What the client gets from an application in this process."""

    async def go() -> _Result:
        transport = httpx.ASGITransport(app=app or make_app(), raise_app_exceptions=False)
        async with ollama.AsyncClient("http://localhost", transport=transport) as client:
            return await call(client)

    return asyncio.run(go())


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("model", ["fake", "fake:latest"])
def test_a_whole_chat(model: str) -> None:
    made = ask(lambda client: client.chat(model=model, **HELLO))
    assert (made.message.role, made.message.content) == ("assistant", ANSWER) and made.model == "fake"
    assert made.done and made.done_reason == "stop" and made.created_at
    assert (made.prompt_eval_count, made.eval_count, made.load_duration) == (PROMPT, OUTPUT, 0)
    assert made.total_duration == pytest.approx(made.prompt_eval_duration + made.eval_duration, abs=2)
    assert made.prompt_eval_duration > 0 and made.eval_duration > 0


def test_a_stream_is_the_whole_and_the_default() -> None:
    async def streamed(client: ollama.AsyncClient) -> list[ollama.ChatResponse]:
        return [part async for part in await client.chat(model="fake", stream=True, **HELLO)]

    parts = ask(streamed)
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", OUTPUT)
    assert len(lines(post(CHAT, HELLO))) == len(parts)


def test_generate_is_one_turn_and_raw_is_no_turn() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    made = ask(lambda client: client.generate(model="fake", prompt="hi", system="s", options={"num_predict": 4}), app)
    assert made.response == "<SYS" and made.done_reason == "length"
    raw = ask(lambda client: client.generate(model="fake", prompt="hi", raw=True), app)
    assert raw.response == "HI ✓" and raw.prompt_eval_count == 2
    assert [bytes(prompt) for prompt, _, _ in engine.asked] == [b"<system>s\n<user>hi\n", b"hi"]
    assert [params.max_tokens for _, params, _ in engine.asked] == [4, None]
    assert "".join(line["response"] for line in lines(post(GENERATE, {"prompt": "hi", "raw": True}))) == "HI ✓"


def test_options_reach_the_engine() -> None:
    engine = FakeEngine()
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "presence_penalty": 0.2}
    more = {"frequency_penalty": 0.3, "repeat_penalty": 1.5, "num_predict": -1, "stop": ["x"]}
    body = {**HELLO, "options": {**options, **more}, "request_id": "mine", "cache_salt": "s"}
    assert post(CHAT, body, engine=engine).headers["x-request-id"] == "mine"
    params = engine.asked[0][1]
    assert {name: getattr(params, name) for name in options} == options and params.frequency_penalty == 0.3
    assert (params.repetition_penalty, params.max_tokens, params.stop, engine.salts) == (1.5, None, ("x",), ["s"])
    post(CHAT, {**HELLO, "options": {"num_predict": 0}}, engine=engine)
    assert engine.asked[1][1].max_tokens == 0


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_tokens(path: str, stream: bool) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "stream": stream}
    asked = {**body, **HELLO} if path == CHAT else {**body, "prompt": "hé"}
    response = post(path, asked)
    found = [line.get("logprobs", []) for line in (lines(response) if stream else [response.json()])]
    spelled = [entry for part in found for entry in part]
    assert bytes(byte for entry in spelled for byte in entry["bytes"]) == ANSWER.encode() + b"<eos>"
    assert all(len(entry["top_logprobs"]) == 1 and entry["logprob"] == -0.25 for entry in spelled)
    raw = {**body, "prompt": "hi", "raw": True, "stream": False}
    assert len(post(GENERATE, raw).json()["logprobs"]) == len("HI ✓".encode()) + 1


def test_a_request_for_nothing_finds_the_model_there() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    assert ask(lambda client: client.generate(model="fake"), app).done_reason == "load"
    assert ask(lambda client: client.chat(model="fake", messages=[]), app).message.content == ""
    assert not engine.asked
    assert send(app, "POST", GENERATE, json={"model": "other"}).status_code == 404
    for path in (CHAT, GENERATE):  # and is looked through as any other
        assert send(app, "POST", path, json={"options": {"temperature": -1}}).status_code == 400
        assert send(app, "POST", path, json={"options": {"num_predict": -3}}).status_code == 400
        assert send(app, "POST", path, json={"cache_salt": "s" * 129}).status_code == 400
        assert send(app, "POST", path, json={"request_id": "?"}).status_code == 400
        assert send(app, "POST", path, json={"keep_alive": 5}).json()["warnings"]


def test_what_there_is() -> None:
    app = make_app()
    assert [model.model for model in ask(lambda client: client.list(), app).models] == ["fake"]
    assert [model.context_length for model in ask(lambda client: client.ps(), app).models] == [512]
    shown = ask(lambda client: client.show("fake:latest"), app)
    assert shown.capabilities == ["completion", "embedding"] and "m.role" in (shown.template or "")
    assert shown.modelinfo["octavo.context_length"] == 512
    assert send(app, "GET", "/api/version").json()["version"] == send(app, "GET", "/version").json()["version"]
    assert send(app, "POST", "/api/show", json={"name": "other"}).status_code == 404
    assert send(app, "POST", "/api/show", json={"model": ""}).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_named(stream: bool) -> None:
    options = {"num_ctx": 4096, "temprature": 1, "num_keep": None}
    response = post(CHAT, {**HELLO, "keep_alive": "5m", "strem": 1, "options": options, "stream": stream})
    named = ["keep_alive", "strem", "options.num_ctx", "options.temprature"]
    assert response.headers["x-octavo-warnings"] == ", ".join(named)
    found = (lines(response) if stream else [response.json()])[0]["warnings"]
    assert [warning["param"] for warning in found] == named
    assert "did you mean stream?" in found[1]["message"] and "did you mean temperature?" in found[3]["message"]


def refused(status: int, response: httpx.Response) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"options": {"temperature": -1}}, "options.temp"), ({"options": {"num_predict": 999}}, "options.num_predict"),
    ({"options": {"stop": [""]}}, "options.stop"), ({"options": {"min_p": "x"}}, "options.min"), ({"options": 1}, "op"),
    ({"options": {"mirostat": 3}}, "options.mirostat"), ({"format": "yaml"}, "format"), ({"think": True}, "think"),
    ({"options": {"repeat_penalty": "x"}}, "options.repeat_penalty"),
    ({"tools": [{}]}, "tools"), ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0]"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"messages": [{"role": "x"}]}, "messages[0]"), ({"messages": 1}, "mess"),
    ({"options": {"num_predict": 5, "max_tokens": 6}}, "options.max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "blamed"), BAD)
def test_refusals_name_the_parameter_as_the_client_knows_it(change: dict[str, Any], blamed: str) -> None:
    engine = FakeEngine()
    assert refused(400, post(CHAT, {**HELLO, **change}, engine=engine)).startswith(blamed) and not engine.asked


def test_every_option_out_of_range_is_named_as_an_option() -> None:
    for name in {*OllamaOptions.__struct_fields__} - {"stop", "seed"}:  # a seed may be any
        value = -(10**12) if name == "num_predict" else 10**12
        assert refused(400, post(CHAT, {**HELLO, "options": {name: value}})).startswith(f"options.{name}"), name


def test_other_refusals_have_ollamas_shape() -> None:
    for more in ({"context": [1]}, {"suffix": "x"}, {"template": "{{ x }}"}, {"raw": True, "system": "s"}):
        refused(400, post(GENERATE, {"prompt": "a", **more}))
    refused(404, post(CHAT, {**HELLO, "model": "llama9"}))
    refused(404, post("/api/pull", {"model": "x"}))
    refused(405, send(make_app(), "GET", CHAT))
    assert "secret" not in refused(500, post(CHAT, {**HELLO, "stream": False}, engine=FakeEngine(fail_after=1)))
    with pytest.raises(ollama.ResponseError) as error:
        ask(lambda client: client.chat(model="llama9", **HELLO))
    assert error.value.status_code == 404 and "fake" in error.value.error


def test_an_error_inside_a_stream_is_its_last_line() -> None:
    last = lines(post(CHAT, HELLO, engine=FakeEngine(fail_after=3)))[-1]
    assert set(last) == {"error"} and "secret" not in last["error"]
    assert lines(post(CHAT, HELLO, engine=refusing("max_tokens")))[-1]["error"].startswith("options.num_predict")


def test_a_model_has_the_size_of_its_files() -> None:
    for path in ("/api/tags", "/api/ps"):
        assert send(make_app(), "GET", path).json()["models"][0]["size"] == FakeEngine().model_bytes
