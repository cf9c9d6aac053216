"""A stream's bytes are the same whether each event is encoded whole or only its text is."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_http import CHAT, COMPLETIONS, HELLO, Client, make_app, post

from octavo.serve import answers
from octavo.serve.interrupt import LINE, Line

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "stream_options": st.sampled_from([{"include_usage": True}, {"continuous_usage_stats": True}]),
        "return_token_ids": st.booleans(),
        "no_such_name": st.just(1),
        "stop": st.just("L"),
    },
)
TEXTS = st.text(min_size=1, max_size=12) | st.sampled_from(["\0the text\0", '"\\\n\0', "é\U0001f600\u2028"])


def stream(path: str, body: dict[str, Any]) -> bytes:
    content = post(path, {"stream": True, "request_id": "r", "max_tokens": 40, **body}).content
    return re.sub(rb'"created":\d+', b"", content)


@settings(max_examples=25, deadline=None)
@example("a plain text", {}, 0, False, False)
@given(TEXTS, OPTIONS, st.sampled_from([None, 0, 2]), st.booleans(), st.booleans())
def test_the_bytes_are_those_of_whole_events(
    text: str, options: dict[str, Any], logprobs: int | None, echo: bool, chat: bool
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "logprobs": logprobs is not None}
    if not chat:
        body = {"prompt": text, "logprobs": logprobs, "echo": echo}
    path = CHAT if chat else COMPLETIONS
    found = stream(path, {**body, **options})
    with patch.object(answers, "_is_plain", return_value=False):
        assert found == stream(path, {**body, **options})
    assert found.endswith(b"data: [DONE]\n\n")


def test_most_events_of_a_plain_stream_are_made_that_way() -> None:
    with patch.object(answers, "event", wraps=answers.event) as whole:
        found = stream(COMPLETIONS, {"prompt": "a plain text of some length"})
    assert found.count(b"data: {") > 20 and whole.call_count < 6


def written(path: str, body: dict[str, Any], takes: bool) -> tuple[bytes, int]:
    """The body of a stream as a connection sees it, and how many pieces it was given past the request's task."""
    client = Client(make_app(), path, {"stream": True, "request_id": "r", **body})
    past: list[bytes] = []

    def write(piece: bytes) -> bool:
        if takes:
            past.append(piece)
            client.sent.append({"body": piece})
        return takes

    client.scope[LINE] = Line(write)
    asyncio.run(client.run())
    return re.sub(rb'"created":\d+', b"", b"".join(message.get("body", b"") for message in client.sent)), len(past)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a plain text of some length", "n": 2})]
)
def test_plain_events_pass_by_the_task_of_their_request(path: str, body: dict[str, Any]) -> None:
    whole, none = written(path, body, takes=False)
    found, past = written(path, body, takes=True)
    assert found == whole
    assert none == 0 and past > found.count(b"data: {") / 2
