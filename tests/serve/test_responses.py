"""OpenAI's responses over a fake engine, through OpenAI's own client: made, streamed, kept, gone on with, stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from fake_engine import FakeDelta, FakeEngine, refusing
from serve_http import CHAT, Client, check_error, make_app, post, send
from starlette.applications import Starlette

PATH = "/v1/responses"
ANSWER = "<USER>HÉ\n ✓"
PROMPT, OUTPUT = len(b"<user>h\xc3\xa9\n"), len(ANSWER.encode()) + 1
HELLO: dict[str, Any] = {"model": "fake", "input": "hé"}
_Result = TypeVar("_Result")


def ask(call: Callable[[openai.AsyncOpenAI], Awaitable[_Result]], app: Starlette | None = None) -> _Result:
    """What the client gets from an application in this process."""

    async def go() -> _Result:
        transport = httpx2.ASGITransport(app=app or make_app(), raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", max_retries=0, http_client=http
        ) as c:
            return await call(c)

    return asyncio.run(go())


def named_events(text: str) -> list[dict[str, Any]]:
    pieces = text.split("\n\n")
    assert pieces.pop() == ""
    found = []
    for number, piece in enumerate(pieces):
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"] and found[-1]["sequence_number"] == number
    return found


def test_a_whole_response_is_kept() -> None:
    async def calls(client: openai.AsyncOpenAI) -> tuple[Any, Any, Any]:
        made = await client.responses.create(**HELLO, instructions=None, metadata={"a": "b"}, temperature=0.5)
        again = await client.responses.retrieve(made.id)
        return made, again, await client.responses.input_items.list(made.id)

    made, again, items = ask(calls)
    assert made.output_text == ANSWER and made.status == "completed" and made.id.startswith("resp_")
    assert made.usage.input_tokens == PROMPT and made.usage.output_tokens == OUTPUT
    assert made.usage.input_tokens_details.cached_tokens == PROMPT // 2
    assert (made.metadata, made.temperature, made.model) == ({"a": "b"}, 0.5, "fake")
    assert again == made
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", "hé")]


class Guessing(FakeEngine):
    """An engine that has guessed tokens ahead."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[FakeDelta, None]:
        async for delta in super().generate(*args, **kwargs):
            yield replace(delta, spent=(6.0, 9.0, 7.0, 5.0)) if delta.finish_reason else delta


def test_tokens_that_were_guessed_are_in_the_usage() -> None:
    drafts = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    whole = post(PATH, HELLO, engine=Guessing()).json()
    last = named_events(post(PATH, {**HELLO, "stream": True}, engine=Guessing()).text)[-1]["response"]
    chat = post(CHAT, {"model": "fake", "messages": [{"role": "user", "content": "h"}]}, engine=Guessing()).json()
    for response in (whole, last):
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **drafts}
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0, **drafts}
    two = post("/v1/completions", {"model": "fake", "prompt": ["h", "i"]}, engine=Guessing()).json()
    twice = {name: 2 * count for name, count in drafts.items()}
    assert two["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0, **twice}
    assert post(PATH, HELLO).json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_is_the_whole_event_by_event() -> None:
    async def calls(client: openai.AsyncOpenAI) -> tuple[str, Any, Any]:
        text = ""
        async with client.responses.stream(**HELLO) as stream:
            async for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
            final = await stream.get_final_response()
        return text, final, await client.responses.retrieve(final.id)

    text, final, kept = ask(calls)
    assert text == final.output_text == kept.output_text == ANSWER and kept.status == "completed"
    kinds = [
        found["type"].removeprefix("response.") for found in named_events(post(PATH, {**HELLO, "stream": True}).text)
    ]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_another(stream: bool) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    first = send(app, "POST", PATH, json={"input": "a", "instructions": "s", "request_id": "one", "stream": stream})
    assert first.status_code == 200
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    items = [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": parts}]
    body = {"input": items, "previous_response_id": "resp_one", "request_id": "two"}
    assert send(app, "POST", PATH, json=body).json()["previous_response_id"] == "resp_one"
    heard = "<SYSTEM>S\n<USER>A\n ✓"
    assert bytes(engine.asked[1][0]).decode() == f"<user>a\n<assistant>{heard}\n<system>d\n<user>bc\n"
    third = send(app, "POST", PATH, json={"input": "e", "previous_response_id": "resp_two"})
    assert third.status_code == 200 and bytes(engine.asked[2][0]).decode().count("<assistant>") == 2
    listed = send(app, "GET", f"{PATH}/resp_two/input_items").json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant", "system", "user"]
    assert listed[1]["content"][0] == {"type": "output_text", "text": heard}
    counted = send(app, "POST", PATH + "/input_tokens", json={"input": "e", "previous_response_id": "resp_two"}).json()
    assert counted["input_tokens"] == len(engine.asked[2][0])


def test_what_is_not_stored_or_deleted_is_not_there() -> None:
    app = make_app()
    assert send(app, "POST", PATH, json={"input": "a", "store": False, "request_id": "x"}).json()["store"] is False
    check_error(send(app, "GET", f"{PATH}/resp_x"), 404)
    send(app, "POST", PATH, json={"input": "a", "request_id": "y"})
    assert send(app, "DELETE", f"{PATH}/resp_y").json() == {"id": "resp_y", "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        check_error(send(app, method, f"{PATH}/resp_y{path}"), 404)
    check_error(
        send(app, "POST", PATH, json={"input": "a", "previous_response_id": "resp_y"}), 404, "previous_response_id"
    )


def test_responses_are_their_keys_own() -> None:
    app = make_app()
    mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
    send(app, "POST", PATH, json={"input": "a", "request_id": "x"}, headers=mine)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        check_error(send(app, method, f"{PATH}/resp_x{path}", headers=other), 404)
    body = {"input": "a", "previous_response_id": "resp_x"}
    check_error(send(app, "POST", PATH, json=body, headers=other), 404)
    assert send(app, "POST", PATH, json=body, headers=mine).status_code == 200


@pytest.mark.parametrize("limits", [{"max_stored_responses": 2}, {"max_stored_bytes": 2500}])
def test_the_store_is_bounded_and_the_oldest_leave(limits: dict[str, int]) -> None:
    app = make_app(**limits)
    for number in range(5):
        send(app, "POST", PATH, json={"input": "a", "request_id": str(number)})
    found = [send(app, "GET", f"{PATH}/resp_{number}").status_code for number in range(5)]
    assert found == [404, 404, 404, 200, 200]


def test_nobodys_response_leaves_for_one_that_does_not_fit_or_has_the_same_id() -> None:
    app, mine = make_app(max_stored_bytes=2500), {"authorization": "Bearer mine"}
    send(app, "POST", PATH, json={"input": "a", "request_id": "x"}, headers=mine)
    body = {"input": "b", "request_id": "x"}
    assert send(app, "POST", PATH, json=body, headers={"authorization": "Bearer other"}).status_code == 200
    large = {"input": "c", "request_id": "y", "metadata": {str(number): "m" * 500 for number in range(8)}}
    assert send(app, "POST", PATH, json=large).status_code == 200
    assert send(app, "GET", f"{PATH}/resp_y").status_code == 404
    assert send(app, "GET", f"{PATH}/resp_x/input_items", headers=mine).json()["data"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize("limits", [{"max_stored_responses": 0}, {"max_stored_bytes": 0}, {"max_stored_bytes": 100}])
def test_what_could_never_be_asked_for_does_not_run(limits: dict[str, int]) -> None:
    engine = FakeEngine()
    app = make_app(engine, **limits)
    check_error(send(app, "POST", PATH, json={"input": "a", "background": True}), 400, "background")
    assert not engine.asked
    assert send(app, "POST", PATH, json={"input": "a"}).status_code == 200


async def eventually(client: httpx2.AsyncClient, path: str, status: str) -> dict[str, Any]:
    for _ in range(1000):
        body: dict[str, Any] = (await client.get(path)).json()
        if body["status"] == status:
            return body
        await asyncio.sleep(0.001)
    raise AssertionError(body)


def in_process(app: Starlette, call: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as client:
            await call(client)

    asyncio.run(go())


def test_a_background_response_is_asked_for_later() -> None:
    async def calls(client: httpx2.AsyncClient) -> None:
        made = (await client.post(PATH, json={"input": "hé", "background": True, "request_id": "x"})).json()
        assert (made["status"], made["output"], made["usage"]) == ("in_progress", [], None)
        body = await eventually(client, f"{PATH}/resp_x", "completed")
        assert body["output"][0]["content"][0]["text"] == ANSWER and body["background"]
        assert (await client.post(f"{PATH}/resp_x/cancel")).json() == body  # it is over

    in_process(make_app(), calls)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_background_response_is_stopped(how: str) -> None:
    engine = FakeEngine(hold_after=2)

    async def calls(client: httpx2.AsyncClient) -> None:
        await client.post(PATH, json={"input": "hé", "background": True, "request_id": "x"})
        early = await client.post(PATH, json={"input": "b", "previous_response_id": "resp_x"})
        assert early.status_code == 400 and early.json()["error"]["param"] == "previous_response_id"
        if how == "cancel":
            await client.post(f"{PATH}/resp_x/cancel")
            await eventually(client, f"{PATH}/resp_x", "cancelled")
        else:
            await client.delete(f"{PATH}/resp_x")
            assert (await client.get(f"{PATH}/resp_x")).status_code == 404
        await eventually(client, "/v1/requests/x", "cancelled")
        assert engine.live == 0
        assert (await client.get(f"{PATH}/resp_x")).status_code == (200 if how == "cancel" else 404)

    in_process(make_app(engine, request_timeout=5), calls)


def test_a_response_that_fails_unseen_says_so() -> None:
    async def calls(client: httpx2.AsyncClient) -> None:
        await client.post(PATH, json={"input": "hé", "background": True, "request_id": "x"})
        body = await eventually(client, f"{PATH}/resp_x", "failed")
        assert body["error"]["code"] == "engine_error" and "secret" not in json.dumps(body)

    in_process(make_app(FakeEngine(fail_after=2)), calls)


def test_a_stream_that_fails_says_so() -> None:
    failed = named_events(post(PATH, {**HELLO, "stream": True}, engine=FakeEngine(fail_after=3)).text)
    assert [found["type"] for found in failed[-2:]] == ["error", "response.failed"]
    assert failed[-1]["response"]["status"] == "failed" and failed[-2]["code"] == "engine_error"
    blamed = named_events(post(PATH, {**HELLO, "stream": True}, engine=refusing("max_tokens")).text)
    assert blamed[-2]["param"] == "max_output_tokens"


@pytest.mark.parametrize("leave", [False, True])
def test_a_stream_that_is_stopped_or_left_is_kept_as_cancelled(leave: bool) -> None:
    app = make_app(FakeEngine(hold_after=2))

    async def calls(client: httpx2.AsyncClient) -> None:
        reader = Client(app, PATH, {**HELLO, "stream": True, "request_id": "x"})
        running = asyncio.ensure_future(reader.run())
        await reader.until_sent(7)  # the head, four events, two pieces of text
        assert (await client.get(f"{PATH}/resp_x")).json()["status"] == "in_progress"
        if leave:
            reader.leave()
        else:
            await client.post(f"{PATH}/resp_x/cancel")
        await running
        assert (await client.get(f"{PATH}/resp_x")).json()["status"] == "cancelled"
        if not leave:
            last = named_events(b"".join(sent.get("body", b"") for sent in reader.sent).decode())[-1]
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")

    in_process(app, calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_makes_it_incomplete(stream: bool) -> None:
    response = post(PATH, {**HELLO, "max_output_tokens": 3, "stream": stream})
    body = named_events(response.text)[-1]["response"] if stream else response.json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["content"][0]["text"] == ANSWER[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_warnings(stream: bool) -> None:
    more = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 1, "usr": "u"}
    response = post(PATH, {**HELLO, **more, "stream": stream})
    assert response.headers["x-octavo-warnings"] == "usr, include"
    body = response.json() if not stream else named_events(response.text)[-1]["response"]
    entries = body["output"][0]["content"][0]["logprobs"]
    assert len(entries) == OUTPUT and len(entries[0]["top_logprobs"]) == 1
    assert [warning["param"] for warning in body["warnings"]] == ["usr", "include"]
    if stream:
        deltas = [found for found in named_events(response.text) if found["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == entries


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [{"role": "x", "content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"), ({"input": "a" * 5000}, "input"),
    ({"input": [{"type": "function_call_output"}]}, "input"), ({"input": [{"role": "user"}]}, "input"),
    ({"max_output_tokens": 999}, "max_output_tokens"), ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"), ({"metadata": {"a": "b" * 600}}, "metadata"),
    ({"text": {"format": "yaml"}}, "text"), ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "x"}]}, "tools"), ({"reasoning": {"effort": "high"}}, "reason"), ({"temperature": -1}, "temp"),
    ({"top_logprobs": 21}, "top_logprobs"), ({"conversation": "c"}, "conversation"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD)
def test_refusals_name_the_parameter_as_the_client_knows_it(change: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    error = check_error(post(PATH, {**HELLO, **change}, engine=engine), 400)
    assert error["param"].startswith(param) and not engine.asked
    assert error["message"].startswith(error["param"])


def test_a_kept_response_is_not_streamed_again() -> None:
    app = make_app()
    send(app, "POST", PATH, json={"input": "a", "request_id": "x"})
    check_error(send(app, "GET", f"{PATH}/resp_x?stream=true"), 400, "stream")
