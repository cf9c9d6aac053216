"""What a conversation asks of tools: which there are, whether one must be called, and in which words it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.decoding.tools.grammar import Tool
from octavo.serve.errors import ApiError, invalid

__all__ = ["ToolsAsked", "shown_tools", "tools_asked"]

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolsAsked:
    """``choice``: auto, required, or the name of the one tool to call. ``older``: asked for as functions."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True
    older: bool = False
    strict: frozenset[str] = frozenset()  # tools whose calls fit their schema, or the request is refused

    @property
    def must(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice != "auto"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.choice in ("auto", "required", tool.name))


def tools_asked(body: Any) -> ToolsAsked | None:
    """What a conversation asks of tools; None where none are to be called. Raises ``ApiError`` 400."""
    older, tools = bool(getattr(body, "functions", None)), getattr(body, "tools", None)
    if older and tools:
        raise invalid("functions", "is the older name of tools; send one of them")
    given, where = (body.functions, "functions") if older else (tools, "tools")
    name = "function_call" if older else "tool_choice"
    choice = _choice(name, getattr(body, name, None))
    other = "tool_choice" if older else "function_call"
    stray = getattr(body, other, None)
    if stray is not None and (given or _choice(other, stray) not in ("auto", "none")):
        raise invalid(other, f"goes with {'tools' if older else 'functions'}; leave it out, or give those")
    if not given:
        if choice not in ("auto", "none"):
            raise invalid(name, "asks for a call, but there are no tools; give tools")
        return None
    checked = tuple(_tool(f"{where}[{index}]", item, older) for index, item in enumerate(_counted(where, given)))
    names = [tool.name for tool in checked]
    if len(set(names)) < len(names):
        raise invalid(where, "two have the same name; give each its own")
    if choice == "none":
        return None
    if choice not in ("auto", "required", *names):
        raise invalid(name, f"names no tool that is given; there are {', '.join(names)}")
    parallel = not older and getattr(body, "parallel_tool_calls", None) is not False
    functions = [item if older else item["function"] for item in given]
    strict = frozenset(tool.name for tool, said in zip(checked, functions, strict=True) if said.get("strict") is True)
    return ToolsAsked(checked, choice, parallel, older, strict)


def shown_tools(body: Any) -> list[dict[str, Any]] | None:
    """The tools as the model's template is given them; of those that must not be called, none."""
    asked = tools_asked(body)
    if asked is None:
        return None
    return [{"type": "function", "function": item} for item in body.functions] if asked.older else list(body.tools)


def _counted(where: str, given: Sequence[Any]) -> Sequence[Any]:
    if len(given) > _MAX_TOOLS:
        raise invalid(where, f"has {len(given)} tools; at most {_MAX_TOOLS} are allowed")
    return given


def _tool(where: str, item: Mapping[str, Any], older: bool) -> Tool:
    if not older and item.get("type", "function") != "function":
        raise _bad(where, "type must be function; there are no others here")
    function = item if older else item.get("function")
    if not isinstance(function, dict):
        raise _bad(where, 'must be like {"type": "function", "function": {"name", "description", "parameters"}}')
    if not isinstance(function.get("strict"), bool | None):
        raise _bad(where, "strict must be true or false")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(where, "name must have 1 to 64 letters, digits or any of . _ -")
    if name in ("auto", "required", "none"):
        raise _bad(where, f"name must not be {name}, which means something else")
    if parameters is None:
        parameters = {"properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _bad(where, "parameters must be a JSON schema of type object")
    return Tool(name, {**parameters, "type": "object"})


def _choice(param: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        if value not in (None, "auto", "none", "required"):
            raise invalid(param, 'must be auto, none, required, or {"type": "function", "function": {"name": ...}}')
        return value or "auto"
    function = value.get("function", value) if value.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid(param, 'must be auto, none, required, or {"type": "function", "function": {"name": ...}}')
    return name


def _bad(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}.", param=where.split("[")[0])
