"""Anthropic's API over a fake engine, through Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anthropic
import httpx
import httpx2
import pytest
from fake_engine import FakeEngine, refusing
from serve_http import make_app, post, send
from starlette.applications import Starlette

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {"max_tokens": 400, "messages": [{"role": "user", "content": "hé"}]}
ANSWER = "<USER>HÉ\n ✓"
PROMPT = len(b"<user>h\xc3\xa9\n")
OUTPUT = len(ANSWER.encode()) + 1
_Result = TypeVar("_Result")


def ask(call: Callable[[anthropic.AsyncAnthropic], Awaitable[_Result]], app: Starlette | None = None) -> _Result:
    """What the client gets from an application in this process."""

    async def go() -> _Result:
        transport = httpx2.ASGITransport(app=app or make_app(), raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
        async with anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="x", max_retries=0, http_client=http
        ) as c:
            return await call(c)

    return asyncio.run(go())


def test_a_whole_message() -> None:
    made = ask(lambda client: client.messages.create(model="fake", **HELLO))
    assert (made.type, made.role, made.model) == ("message", "assistant", "fake") and made.id.startswith("msg_")
    assert [(block.type, block.text) for block in made.content] == [("text", ANSWER)]
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == PROMPT and usage.cache_read_input_tokens == PROMPT // 2
    assert usage.output_tokens == OUTPUT


def test_a_stream_is_the_whole() -> None:
    async def streamed(client: anthropic.AsyncAnthropic) -> tuple[list[str], str, Any]:
        async with client.messages.stream(model="fake", **HELLO) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_text(), await stream.get_final_message()

    kinds, text, final = ask(streamed)
    whole = ask(lambda client: client.messages.create(model="fake", **HELLO))
    assert text == ANSWER and final.usage == whole.usage and final.stop_reason == "end_turn"
    sent = [kind for kind in kinds if kind != "text"]  # which the client adds
    assert sent[:2] == ["message_start", "content_block_start"]
    assert sent[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(sent[2:-3]) == {"content_block_delta"}


def test_every_event_has_its_type_as_its_name_and_nothing_follows_the_last() -> None:
    pieces = post(MESSAGES, {**HELLO, "stream": True}).text.split("\n\n")
    assert pieces.pop() == ""
    for piece in pieces:
        name, data = piece.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert pieces[-1].startswith("event: message_stop")


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(stream: bool) -> None:
    def ended(**more: Any) -> tuple[Any, Any]:
        response = post(MESSAGES, {**HELLO, **more, "stream": stream})
        if not stream:
            return response.json()["stop_reason"], response.json()["stop_sequence"]
        delta = json.loads(response.text.split("event: message_delta\ndata: ")[1].split("\n")[0])["delta"]
        return delta["stop_reason"], delta["stop_sequence"]

    assert ended(max_tokens=3) == ("max_tokens", None)
    assert ended(stop_sequences=["x", "E"]) == ("stop_sequence", "E")
    assert ended() == ("end_turn", None)


def test_the_mark_of_a_next_turn_is_no_stop_sequence_of_the_clients() -> None:
    engine = FakeEngine(stop_with="\nUser:")
    assert post(MESSAGES, HELLO, engine=engine).json()["stop_reason"] == "end_turn"


def test_system_and_turns_become_one_conversation_and_a_begun_answer_goes_on() -> None:
    engine = FakeEngine()
    text = {"type": "text", "text": "b"}
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, text]}, {"role": "assistant", "content": "c"}]
    body = {**HELLO, "system": [text, text], "messages": turns}
    assert post(MESSAGES, body, engine=engine).status_code == 200
    assert bytes(engine.asked[-1][0]) == b"<system>bb\n<user>ab\n<assistant>c"
    assert post(MESSAGES + "/count_tokens", {"messages": turns, "system": "s"}).json() == {
        "input_tokens": len(b"<system>s\n<user>ab\n<assistant>c")
    }
    made = ask(lambda client: client.messages.count_tokens(model="fake", messages=HELLO["messages"]))
    assert made.input_tokens == PROMPT


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.5}
    body = {**HELLO, **asked, "stop_sequences": ["x"], "request_id": "mine", "cache_salt": "s"}
    assert post(MESSAGES, body, engine=engine).json()["id"] == "msg_mine"
    params = engine.asked[0][1]
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.max_tokens, params.stop, engine.salts) == (400, ("x",), ["s"])
    send(make_app(engine), "POST", MESSAGES, json=HELLO, headers={"x-api-key": "k"})
    assert engine.tenants[0] == "" and engine.tenants[1].startswith("key-")


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_named(stream: bool) -> None:
    response = post(MESSAGES, {**HELLO, "metadata": {"user_id": "u"}, "temprature": 1, "stream": stream})
    assert response.headers["x-octavo-warnings"] == "metadata, temprature"
    found = json.loads(response.text.split("data: ")[1].split("\n")[0])["message"] if stream else response.json()
    assert "did you mean temperature?" in found["warnings"][1]["message"]


def refused(status: int, kind: str, response: httpx.Response) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"]["type"] == kind
    return str(body["error"]["message"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 10_000}, "max_tokens"),
    ({"messages": []}, "messages"), ({"stop_sequences": [""]}, "stop_sequences"), ({"stop_sequences": "x"}, "stop_seq"),
    ({"system": "s", "messages": [{"role": "x"}]}, "messages[0]"), ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"temperature": -1}, "temperature"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "blamed"), BAD)
def test_refusals_name_the_parameter_as_the_client_knows_it(change: dict[str, Any], blamed: str) -> None:
    engine = FakeEngine()
    response = post(MESSAGES, {**HELLO, **change}, engine=engine)
    assert refused(400, "invalid_request_error", response).startswith(blamed) and not engine.asked


def test_other_refusals_have_anthropics_shape() -> None:
    body = {key: value for key, value in HELLO.items() if key != "max_tokens"}
    assert "missing" in refused(400, "invalid_request_error", post(MESSAGES, body))
    refused(404, "not_found_error", post(MESSAGES, {**HELLO, "model": "claude-9"}))
    refused(404, "not_found_error", post(MESSAGES + "/count_tokens", {**HELLO, "model": "claude-9"}))
    refused(404, "not_found_error", post(MESSAGES + "/nothing", HELLO))
    refused(405, "invalid_request_error", send(make_app(), "GET", MESSAGES))
    refused(413, "request_too_large", post(MESSAGES, HELLO, max_body_bytes=9))
    refused(503, "overloaded_error", post(MESSAGES, HELLO, engine=FakeEngine(problem="it stands")))
    assert "secret" not in refused(500, "api_error", post(MESSAGES, HELLO, engine=FakeEngine(fail_after=1)))
    with pytest.raises(anthropic.NotFoundError):
        ask(lambda client: client.messages.create(model="claude-9", **HELLO))


def test_an_error_inside_a_stream_is_an_event() -> None:
    app = make_app(FakeEngine(fail_after=3))
    last = send(app, "POST", MESSAGES, json={**HELLO, "stream": True}).text.split("\n\n")[-2]
    name, data = last.split("\n")
    assert name == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"

    async def streamed(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(model="fake", **HELLO) as stream:
            async for _ in stream:
                pass

    with pytest.raises(anthropic.APIStatusError):
        ask(streamed, app)
    blamed = post(MESSAGES, {**HELLO, "stream": True}, engine=refusing("stop")).text
    assert "stop_sequences: say something else" in blamed
