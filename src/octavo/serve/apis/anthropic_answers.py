"""A message of Anthropic's, whole and streamed.

message_start  (content_block_start  content_block_delta*  content_block_stop)+  message_delta  message_stop
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from octavo.decoding.pieces import Piece
from octavo.serve.answers import Reply
from octavo.serve.dialects import named_event
from octavo.serve.forms import Reading, call_id, parsed, read_whole
from octavo.serve.generate import Choice, run
from octavo.serve.metrics import Metrics
from octavo.serve.port import EnginePort

__all__ = ["message_events", "message_whole"]


def message_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer."""
    choice = choices[0]
    answer = read_whole(reply.form, choice.text)
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        content.append({"type": "text", "text": answer.content})
    for index, call in enumerate(answer.calls):
        content.append({**_call(reply, index, call.name), "input": parsed(call.arguments)})
    return _message(reply, content, _ending(reply, choice, bool(answer.calls)), _usage(reply))


async def message_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The stream. The prompt's tokens are known at its beginning, how many of them were cached at its end."""
    nothing = {"stop_reason": None, "stop_sequence": None}
    yield named_event({"type": "message_start", "message": _message(reply, [], nothing, _usage(reply))})
    choice, reading, blocks = Choice(), Reading(reply.form), _Blocks(reply)
    async with aclosing(run(engine, reply.job, metrics)) as deltas:
        async for _, delta in deltas:
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            for piece in reading.push(delta):
                for event in blocks.add(piece):
                    yield event
    for event in blocks.end():
        yield event
    ending = _ending(reply, choice, reading.has_calls)
    yield named_event({"type": "message_delta", "delta": ending, "usage": _usage(reply)})
    yield named_event({"type": "message_stop"})


_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
_DELTAS |= {"arguments": ("input_json_delta", "partial_json")}


class _Blocks:
    """The content blocks of a stream, one after the other: a text, thoughts, or a call."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._open, self._index = reply, "", -1

    def add(self, piece: Piece) -> Iterator[bytes]:
        """The events of a piece; one of another kind than the last ends a block and begins one."""
        kind = piece.kind
        if kind == "call" or (kind != "arguments" and kind != self._open):
            yield from self._begin(kind, self._block(piece))
        if kind != "call":
            name, field = _DELTAS[kind]
            delta = {"type": name, field: piece.text}
            yield named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def end(self) -> Iterator[bytes]:
        """The events at the end; there is a block at least."""
        if self._index < 0:
            yield from self._begin("content", {"type": "text", "text": ""})
        yield named_event({"type": "content_block_stop", "index": self._index})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._index >= 0:
            yield named_event({"type": "content_block_stop", "index": self._index})
        self._open, self._index = kind, self._index + 1
        yield named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _block(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == "call":
            return _call(self._reply, piece.index, piece.text)
        thoughts = {"type": "thinking", "thinking": "", "signature": ""}
        return thoughts if piece.kind == "reasoning" else {"type": "text", "text": ""}


def _call(reply: Reply, index: int, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(reply.form, reply.job.request_id, 0, index), "name": name, "input": {}}


def _message(
    reply: Reply, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    head = {"id": reply.answer_id, "type": "message", "role": "assistant", "model": reply.model}
    more = {"warnings": reply.warnings} if reply.warnings else {}
    return {**head, "content": content, **ending, "usage": usage, **more}


def _ending(reply: Reply, choice: Choice, calls: bool) -> dict[str, Any]:
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.stop_reason in (reply.request.stop_sequences or ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, Any]:
    """Tokens so far. Those that came from the prefix cache are counted apart, as Anthropic does."""
    usage = reply.job.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    thoughts = {} if details is UNSET else {"output_tokens_details": {"thinking_tokens": details.reasoning_tokens}}
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        **thoughts,
    }
