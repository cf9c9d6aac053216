"""Tools for models whose chat template shows none: told in a system turn, and their calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.decoding.pieces import Call
from octavo.decoding.tools.dialects import ToolDialect, written

__all__ = ["in_plain_turns"]


def in_plain_turns(
    dialect: ToolDialect, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The turns with nothing left that only a template for tools would show. Raises ``InvalidInput``."""
    plain = [_plain(dialect, f"messages[{index}]", turn) for index, turn in enumerate(turns)]
    if not tools:
        return plain
    told = _instructions(dialect, tools)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(dialect: ToolDialect, where: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in turn.items() if name not in ("tool_calls", "tool_call_id")}
    if turn["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{turn.get('content') or ''}\n</tool_response>"}
    if not turn.get("tool_calls"):
        return kept
    try:
        calls = [Call(call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]]
        text = written(dialect, calls)
    except InvalidInput as error:
        raise InvalidInput(f"{where}.tool_calls", error.value, f"arguments {error.remedy}") from None
    said = turn.get("content") or ""
    return {**kept, "content": f"{said}\n{text}" if said else text}


def _instructions(dialect: ToolDialect, tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written(dialect, [Call("NAME", '{"PARAMETER": "VALUE"}')])
    return (
        "You can call functions. Each line between the marks describes one, its parameters as a JSON schema.\n"
        f"<tools>\n{functions}\n</tools>\n"
        "To call functions, answer with nothing but the calls, written like this, with the values that are needed:\n"
        f"{example}\n"
        "Their results come back to you. If no function is of use, answer in words."
    )
