"""Anthropic's turns and tools in our words. A turn may be several of ours: results of tools, then what a user says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.serve.errors import ApiError, invalid
from octavo.serve.turns import checked_messages, text_of

__all__ = ["tool_choice_of", "tools_of", "turns_of"]

_KINDS = "text, tool_use, tool_result and thinking"


def turns_of(raw: Any) -> list[dict[str, Any]]:
    """The turns, checked. Raises ``ApiError`` 400."""
    if not isinstance(raw, list) or not raw:
        return checked_messages(raw)
    return [
        turn
        for index, item in enumerate(raw)
        for split in _split(f"messages[{index}]", item)
        for turn in checked_messages([split], first=index)
    ]


def _split(where: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = item.get("content")
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    if not isinstance(content, list) or len(blocks) < len(content) or all(b.get("type") == "text" for b in blocks):
        yield item
        return
    for block in (block for block in blocks if block.get("type") == "tool_result"):
        result = block.get("content")
        text = "" if result is None else text_of(where, result)
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest:
        yield _said(where, item.get("role"), rest)


def _said(where: str, role: Any, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A turn without results of tools."""
    texts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "text":
            texts.append(block)
        else:
            raise ApiError(400, f"{where}: only parts of type {_KINDS} are supported by this model.", param="messages")
    turn: dict[str, Any] = {"role": role, "content": text_of(where, texts)}
    if calls:
        turn["tool_calls"] = calls
    return {**turn, "reasoning_content": "".join(thoughts)} if thoughts else turn


def tools_of(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as functions. Raises ``ApiError`` 400 for those that Anthropic itself would run."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") not in (None, "custom"):
            raise invalid("tools", f"[{index}] is run by Anthropic's servers; there are only tools of your own here")
        function: dict[str, Any] = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        found.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema")}})
    return found or None


def tool_choice_of(choice: dict[str, Any] | None) -> dict[str, Any]:
    """``tool_choice`` and ``parallel_tool_calls`` in our words. Raises ``ApiError`` 400."""
    if choice is None:
        return {}
    kind, parallel = choice.get("type"), choice.get("disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    ours = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if not isinstance(kind, str) or kind not in ours:
        raise invalid("tool_choice", "type must be auto, any, tool or none")
    if not isinstance(parallel, bool | None):
        raise invalid("tool_choice", "disable_parallel_tool_use must be true or false")
    return {"tool_choice": ours[kind], "parallel_tool_calls": not parallel}
