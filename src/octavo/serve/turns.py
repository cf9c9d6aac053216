"""The turns of a conversation as they come in a body, checked, and as a template sees them."""

from __future__ import annotations

import json
from typing import Any

from msgspec import UNSET

from octavo.core.errors import InvalidInput
from octavo.decoding.tools import ToolDialect, dialect_named, dialect_of, shows_tools
from octavo.decoding.tools.prompt import in_plain_turns
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError, invalid
from octavo.tokenizers.base import Tokenizer
from octavo.tokenizers.chat import template_of

__all__ = ["ROLES", "checked_messages", "needs_tools", "num_chars", "text_of", "tool_dialect", "with_tools"]

ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_NO_TEXT = ("audio", "images")
_OTHER_NAMES = {"tool_name": "name", "thinking": "reasoning_content"}  # Ollama's
_NO_DIALECT = "this model's chat template shows tools in a way that is not known here; name one with --tool-call-parser"
_MAX_CALLS = 128  # of one turn


def tool_dialect(tokenizer: Tokenizer, config: ServeConfig) -> ToolDialect:
    """How the model writes calls: as the operator says, or its template. Raises ``InvalidInput``."""
    if config.tool_call_parser != "auto":
        return dialect_named(config.tool_call_parser)
    found = dialect_of(template_of(tokenizer, tools=True).source)
    if found is None:
        raise InvalidInput("tools", "", _NO_DIALECT)
    return found


def needs_tools(turn: dict[str, Any]) -> bool:
    """Whether only a template for tools shows a turn as it is."""
    return turn["role"] == "tool" or "tool_calls" in turn


def with_tools(
    tokenizer: Tokenizer, config: ServeConfig, turns: list[dict[str, Any]], tools: list[Any], options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Turns and options for the template; where it shows no tools, they are told in words. Raises ``InvalidInput``."""
    if shows_tools(template_of(tokenizer, tools=True).source):
        return turns, {**options, "tools": tools or None}
    return in_plain_turns(tool_dialect(tokenizer, config), turns, tools), options


def num_chars(turn: dict[str, Any]) -> int:
    """Characters of a turn."""
    calls = turn.get("tool_calls", ())
    return len(turn["content"]) + sum(len(call["function"]["arguments"]) for call in calls)


def checked_messages(raw: Any, *, where: str = "messages", first: int = 0) -> list[dict[str, Any]]:
    """The turns as a template sees them, at least one. Raises ``ApiError`` 400, naming ``where[first + i]``."""
    if raw is UNSET or not raw:
        raise invalid("messages", "is missing or empty; give at least one message with role and content")
    return [_message(f"{where}[{index}]", item) for index, item in enumerate(raw, first)]


def _message(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    """One turn as the template sees it: role, content as one text, a name if given, and what tools have to do with."""
    for key, value in raw.items():
        if key in _NO_TEXT and value:
            raise _bad(where, f"{key} is not supported; send the turn as text")
    role = raw.get("role")
    if not isinstance(role, str) or role not in (*ROLES, *_TOOL_ROLES):
        raise _bad(where, f"role must be one of {', '.join((*ROLES, *_TOOL_ROLES))}")
    turn: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    calls = _calls(where, raw) if role == "assistant" else []
    content = raw.get("content")
    turn["content"] = "" if content is None and calls else text_of(where, content)
    more = _texts(where, raw, ("tool_name", "thinking", "name", "tool_call_id", "reasoning_content"))
    turn |= {_OTHER_NAMES.get(name, name): value for name, value in more.items()}
    return {**turn, "tool_calls": calls} if calls else turn


def _texts(where: str, raw: dict[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    """Those of these fields that are there, which are texts."""
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    wrong = next((name for name, value in found.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise _bad(where, f"{wrong} must be a string")
    return found


def _calls(where: str, raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of an assistant's turn; the older ``function_call`` is one."""
    older = raw.get("function_call")
    calls = raw.get("tool_calls") or ([] if not older else [{"function": older}])
    if not isinstance(calls, list) or len(calls) > _MAX_CALLS:
        raise _bad(where, f"tool_calls must be a list of at most {_MAX_CALLS}")
    return [_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]


def _call(where: str, raw: Any) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise _bad(where, 'must be like {"id": "...", "type": "function", "function": {"name", "arguments"}}')
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments not in (None, "") and not _is_object(arguments):
        raise _bad(where, "arguments must be the text of a JSON object")
    call_id = _texts(where, raw, ("id",))
    return {**call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def _is_object(text: Any) -> bool:
    """Whether it is the text of a JSON object. NaN is no JSON, nor is a number that no double holds."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def text_of(where: str, content: Any) -> str:
    """A content, which is a string or a list of text parts, as one text. Raises ``ApiError`` 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, "content must be a string or a list of text parts")
    return "".join(_part_text(where, part) for part in content)


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _bad(where, 'only parts like {"type": "text", "text": "..."} are supported by this model')
    return str(part["text"])


def _bad(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}.", param=where.split("[")[0])
