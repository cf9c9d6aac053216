"""A stream's bytes are the same whether each event is encoded whole or only its text is."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_http import CHAT, COMPLETIONS, post

from octavo.serve import answers

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
