"""Bytes that are no request: always a 4xx in our error shape, never a 5xx, and the body is not echoed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from serve_http import CHAT, COMPLETIONS, HELLO, Client, check_error, make_app, post, send

GOOD = json.dumps({"prompt": "SECRETWORD", "max_tokens": 2, "stop": ["x"]}).encode()
JSON = {"content-type": "application/json"}

TABLE = [
    b"", b" ", b"null", b"[]", b'"SECRETWORD"', b"5", b"\xef\xbb\xbf{}", '{"prompt":"SECRETWORD"}'.encode("utf-16"),
    b'{"prompt":"\xff\xfe"}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\ude00SECRETWORD"}', b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"a\x00b"}', b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":Infinity}',
    b'{"prompt":"a","temperature":1e999}', b'{"prompt":"a","temperature":-1e999}',
    b'{"prompt":"a","seed":' + b"9" * 10_000 + b"}", b'{"prompt":"a","max_tokens":' + b"9" * 30 + b"}",
    b'{"prompt":' + b"[" * 100_000, b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}", b'{"x":' * 65 + b"1" + b"}" * 65,
    b'{"prompt":"a"}{"prompt":"b"}', b"{'prompt': 'a'}", b'{"prompt":"a",}', b"--\xc3\x28", b"prompt=SECRETWORD",
    b'{"prompt":[1e308]}', b'{"prompt":[9223372036854775808]}', b'{"prompt":[18446744073709551616]}',
    b'{"prompt":[[[1]]]}', b'{"prompt":"a","prompt":"SECRETWORD"}', b'{"prompt":"a","\\u0070rompt":"a"}',
    b'{"prompt":"a","stream_options":{"x":1,"x":1}}', b'{"prompt":"a","logit_bias":{"01":1}}',
]  # fmt: skip


@pytest.mark.parametrize("body", TABLE, ids=range(len(TABLE)))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_malformed_bodies(path: str, body: bytes) -> None:
    engine = FakeEngine()
    response = send(make_app(engine), "POST", path, content=body, headers=JSON)
    error = check_error(response, 400)
    assert "SECRETWORD" not in response.text and "/" not in error["message"].replace("/v1/", "") and not engine.asked


def test_a_body_cut_at_every_byte() -> None:
    app = make_app()
    for end in range(len(GOOD)):
        check_error(send(app, "POST", COMPLETIONS, content=GOOD[:end], headers=JSON), 400)
    assert send(app, "POST", COMPLETIONS, content=GOOD, headers=JSON).status_code == 200


def test_a_body_is_counted_while_it_is_read() -> None:
    app = make_app(max_body_bytes=100)

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(50):
            yield b" " * 10

    check_error(send(app, "POST", COMPLETIONS, content=b" " * 101, headers=JSON), 413)
    check_error(send(app, "POST", COMPLETIONS, content=pieces(), headers=JSON), 413)
    lying = {**JSON, "content-length": "9" * 30}
    check_error(send(app, "POST", COMPLETIONS, content=b"{}", headers=lying), 413)


def test_a_body_that_is_too_large_is_answered_at_once_and_read_to_its_end() -> None:
    left = 40
    left_at_answer: list[int] = []
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b" " * 10, "more_body": left > 0}

    async def send_message(message: Any) -> None:
        left_at_answer.append(left)
        sent.append(message)

    app = make_app(max_body_bytes=100)
    asyncio.run(app(Client(app, COMPLETIONS, {}).scope, receive, send_message))
    assert sent[0]["status"] == 413 and b"max-body-bytes" in sent[1]["body"] and not sent[-1]["more_body"]
    assert left_at_answer[1] == 29 and left == 0


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def never():  # type: ignore[no-untyped-def]
        yield b"{"
        await asyncio.Event().wait()

    app = make_app(body_timeout=0.02)
    check_error(send(app, "POST", COMPLETIONS, content=never(), headers=JSON), 408)


def test_depth_is_bounded_whatever_is_nested() -> None:
    for depth, status in ((63, 200), (64, 400), (900, 400)):
        nested = b'{"prompt":"a","extra":' + b"[" * depth + b"]" * depth + b"}"
        assert send(make_app(), "POST", COMPLETIONS, content=nested, headers=JSON).status_code == status, depth


def test_only_plain_json_is_taken() -> None:
    form = "application/x-www-form-urlencoded"
    for headers in ({"content-type": "text/plain"}, {"content-type": form}, {**JSON, "content-encoding": "gzip"}):
        check_error(send(make_app(), "POST", COMPLETIONS, content=GOOD, headers=headers), 415)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/api/generate"])
@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, -(1 << 63) - 1, (1 << 64) - 1])
def test_a_priority_that_no_engine_takes_opens_no_stream(path: str, value: int) -> None:
    engine = FakeEngine()
    prompt = {"input": "a"} if "responses" in path else {"prompt": "a"} if path in _OF_TEXT else HELLO
    body = {**prompt, "max_tokens": 3, "stream": True}
    answer = post(path, {**body, "priority": value}, engine=engine)
    assert answer.status_code == 400 and "priority" in answer.text and not engine.asked
    assert post(path, {**body, "priority": -(1 << 31)}, engine=engine).status_code == 200


_OF_TEXT = (COMPLETIONS, "/api/generate")
