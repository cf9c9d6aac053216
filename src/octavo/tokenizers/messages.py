"""Conversations as the APIs send them, checked and brought to the plain form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["ROLES", "normalized_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalized_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """New messages with `role` from `ROLES` and `content` as one string; other keys are kept.

    A list of text parts is joined by line breaks; no content (an assistant's tool calls) becomes the empty string;
    tool-call arguments that are a JSON object in text become that object. Raises `InvalidInput` naming the message.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidInput("messages", messages, "must be a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidInput(field, message, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidInput(f"{field}.role", role, f"must be one of {', '.join(ROLES)}")
    plain = {**message, "content": _content(field, message)}
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(f"{field}.tool_calls", plain["tool_calls"])
    return plain


def _content(field: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant":
            return ""
        raise InvalidInput(f"{field}.content", None, "is required; only an assistant's may be left out")
    if isinstance(content, str):
        return _unicode(f"{field}.content", content)
    if not isinstance(content, (list, tuple)):
        raise InvalidInput(f"{field}.content", content, "must be text or a list of text parts")
    return "\n".join(_part(f"{field}.content[{index}]", part) for index, part in enumerate(content))


def _part(field: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part, Mapping):
        raise InvalidInput(f"{field}.type", kind, "this model takes text only: {'type': 'text', 'text': ...}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidInput(f"{field}.text", text, "must be a string")
    return _unicode(f"{field}.text", text)


def _unicode(field: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(field, text, "holds half of a surrogate pair; send whole characters") from None
    return text


def _tool_calls(field: str, calls: object) -> list[Any]:
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidInput(field, calls, "must be a list of objects")
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else dict(call)
