"""Answers with thoughts and calls, in the words of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.decoding.pieces import Piece
from octavo.serve.answers import Reply
from octavo.serve.forms import call_id, read_whole
from octavo.serve.generate import Choice
from octavo.serve.tools import tools_asked

__all__ = ["delta_of", "message_of", "shows_reasoning", "wants_functions"]


def shows_reasoning(reply: Reply) -> bool:
    """Whether thoughts are part of the answer."""
    return getattr(reply.request, "include_reasoning", None) is not False


def wants_functions(reply: Reply) -> bool:
    """Whether tools were asked for by their older name."""
    asked = tools_asked(reply.request)
    return asked is not None and asked.older


def message_of(reply: Reply, index: int, choice: Choice) -> tuple[dict[str, Any], bool]:
    """The message of a whole choice, and whether it ends with a call that is whole."""
    answer = read_whole(reply.form, choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning and shows_reasoning(reply):
        message["reasoning_content"] = answer.reasoning
    functions = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    if functions and not answer.content:
        message["content"] = None
    if functions and wants_functions(reply):
        message["function_call"] = functions[0]
    elif functions:
        ids = (call_id(reply.form, reply.job.request_id, index, number) for number in range(len(functions)))
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": each} for name, each in zip(ids, functions, strict=True)
        ]
    return message, bool(functions) and not answer.is_cut


def delta_of(reply: Reply, index: int, pieces: Sequence[Piece], older: bool) -> dict[str, Any]:
    """The delta of a chunk: what all these pieces add to a choice."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.kind == "content":
            delta["content"] = delta.get("content", "") + piece.text
        elif piece.kind == "reasoning" and shows_reasoning(reply):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
        elif piece.kind == "call":
            name = call_id(reply.form, reply.job.request_id, index, piece.index)
            function = {"name": piece.text, "arguments": ""}
            calls[piece.index] = {"index": piece.index, "id": name, "type": "function", "function": function}
        elif piece.kind == "arguments":
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    if calls and older:
        delta["function_call"] = calls[0]["function"]
    elif calls:
        delta["tool_calls"] = list(calls.values())
    return delta
