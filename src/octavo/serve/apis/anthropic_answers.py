"""A message of Anthropic's, whole and streamed.

message_start  content_block_start  content_block_delta*  content_block_stop  message_delta  message_stop
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from octavo.serve.answers import Reply
from octavo.serve.dialects import named_event
from octavo.serve.generate import Choice, run
from octavo.serve.metrics import Metrics
from octavo.serve.port import EnginePort

__all__ = ["message_events", "message_whole"]


def message_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer."""
    choice = choices[0]
    content = [{"type": "text", "text": "".join(choice.text)}]
    return _message(reply, content, _ending(reply, choice), _usage(reply))


async def message_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The stream. The prompt's tokens are known at its beginning, how many of them were cached at its end."""
    block = {"type": "text", "text": ""}
    nothing = {"stop_reason": None, "stop_sequence": None}
    yield named_event({"type": "message_start", "message": _message(reply, [], nothing, _usage(reply))})
    yield named_event({"type": "content_block_start", "index": 0, "content_block": block})
    choice = Choice()
    async with aclosing(run(engine, reply.job, metrics)) as deltas:
        async for _, delta in deltas:
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.text:
                text = {"type": "text_delta", "text": delta.text}
                yield named_event({"type": "content_block_delta", "index": 0, "delta": text})
    yield named_event({"type": "content_block_stop", "index": 0})
    yield named_event({"type": "message_delta", "delta": _ending(reply, choice), "usage": _usage(reply)})
    yield named_event({"type": "message_stop"})


def _message(
    reply: Reply, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    head = {"id": reply.answer_id, "type": "message", "role": "assistant", "model": reply.model}
    more = {"warnings": reply.warnings} if reply.warnings else {}
    return {**head, "content": content, **ending, "usage": usage, **more}


def _ending(reply: Reply, choice: Choice) -> dict[str, Any]:
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.stop_reason in (reply.request.stop_sequences or ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, Any]:
    """Tokens so far. Those that came from the prefix cache are counted apart, as Anthropic does."""
    usage = reply.job.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
