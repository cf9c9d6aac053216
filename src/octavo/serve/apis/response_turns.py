"""The items of a response's input as turns and back, and its tools in our words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.serve.apis.response_store import Turn
from octavo.serve.errors import ApiError, invalid
from octavo.serve.turns import checked_messages

__all__ = ["items_of", "tool_choice_of", "tools_of", "turns_of"]

_PARTS = ("input_text", "output_text", "text")


def turns_of(items: Sequence[dict[str, Any]]) -> list[Turn]:
    """Items as turns. What an assistant says and calls in a row is one turn. Raises ``ApiError`` 400."""
    turns: list[Turn] = []
    for index, item in enumerate(items):
        turn = _turn(index, item)
        if turn is None:
            continue
        last = turns[-1] if turns else {}
        if turn["role"] == last.get("role") == "assistant" and "tool_calls" in turn:
            last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        else:
            turns.append(turn)
    return turns


def _turn(index: int, item: dict[str, Any]) -> Turn | None:
    where, kind = f"input[{index}]", item.get("type", "message")
    if kind == "reasoning":
        return None  # what it led to is there
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "function": function}
        raw: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        output = _content(where, item.get("output"))
        raw = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    elif kind == "message":
        raw = {"role": item.get("role"), "content": _content(where, item.get("content"))}
    else:
        message = f"{where}: only messages, function_call and function_call_output are supported."
        raise ApiError(400, message, param="input")
    return checked_messages([raw], where="input", first=index)[0]


def _content(where: str, content: Any) -> Any:
    return [_part(where, part) for part in content] if isinstance(content, list) else content


def _part(where: str, part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        message = f'{where}: only parts like {{"type": "input_text", "text": "..."}} are supported by this model.'
        raise ApiError(400, message, param="input")
    return {"type": "text", "text": part.get("text")}


def items_of(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Turns as items."""
    for number, turn in enumerate(turns):
        if turn["role"] == "tool":
            yield {
                "id": f"fco_{number}",
                "type": "function_call_output",
                "call_id": turn.get("tool_call_id", ""),
                "output": turn["content"],
            }
            continue
        if turn["content"] or "tool_calls" not in turn:
            kind = "output_text" if turn["role"] == "assistant" else "input_text"
            content = [{"type": kind, "text": turn["content"]}]
            yield {"id": f"msg_{number}", "type": "message", "role": turn["role"], "content": content}
        for index, call in enumerate(turn.get("tool_calls", ())):
            name = {"id": f"fc_{number}_{index}", "type": "function_call", "call_id": call.get("id", "")}
            yield {**name, **call["function"]}


def tools_of(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as chat completions have them. Raises ``ApiError`` 400 for those that OpenAI itself would run."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise invalid("tools", f"[{index}] must be of type function; there are only tools of your own here")
        found.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
    return found or None


def tool_choice_of(choice: Any) -> Any:
    """``tool_choice`` as chat completions have it."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
