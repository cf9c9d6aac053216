"""How models write calls: one description for each way, which parser, grammar, prompt and history are made from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.errors import InvalidInput
from octavo.decoding.pieces import Call

__all__ = ["DIALECTS", "ToolDialect", "dialect_named", "dialect_of", "shows_tools", "written"]


@dataclass(frozen=True)
class ToolDialect:
    """Calls stand in sections: ``opens  before call (between call)*  closes``, and sections follow one another.

    A call is an `object` ``{"name": ..., KEY: {...}}``, `named` ``HEAD name MIDDLE {...} TAIL``, a `python` call, or
    `tags`: ``<function=NAME> (<parameter=KEY> VALUE </parameter>)* </function>``, where a string is written as it is.
    ``middles``: the first is written, any is read. ``bare``: the first section may begin the answer without ``opens``.
    ``listed``: a section's calls are a list in brackets. ``several``: in one section, or each in its own, ``apart``.
    """

    name: str
    form: Literal["object", "named", "python", "tags"]
    opens: str = ""
    closes: str = ""
    before: str = ""
    behind: str = ""
    key: str = "arguments"
    head: str = ""
    middles: tuple[str, ...] = ()
    tail: str = ""
    between: str = ""
    apart: str = ""
    bare: bool = False
    listed: bool = False
    several: bool = True
    id_length: int = 24

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own, which must not be left out of the text."""
        return tuple(mark for mark in (self.opens, self.closes, *_MARK.findall("".join(self._inner))) if mark)

    @property
    def _inner(self) -> tuple[str, ...]:
        return (self.head, *self.middles, self.tail)


_MARK = re.compile(r"<｜[^｜]*｜>|\[[A-Z_]+\]")

_DEEPSEEK = ToolDialect(
    "deepseek_v31", "named", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    head="<｜tool▁call▁begin｜>", middles=("<｜tool▁sep｜>",), tail="<｜tool▁call▁end｜>",
)  # fmt: skip
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        ToolDialect(
            "hermes", "object", "<tool_call>", "</tool_call>", "\n", "\n", apart="\n", several=False
        ),
        ToolDialect("smollm", "object", "<tool_call>", "</tool_call>", between=", ", listed=True),
        ToolDialect("llama3_json", "object", "<|python_tag|>", key="parameters", between="; ", bare=True),
        ToolDialect("mistral", "object", "[TOOL_CALLS]", between=", ", listed=True, id_length=9),
        ToolDialect("mistral_named", "named", "[TOOL_CALLS]", middles=("[ARGS]", ""), several=False, id_length=9),
        ToolDialect("pythonic", "python", "<|python_start|>", "<|python_end|>", between=", ", bare=True, listed=True),
        ToolDialect("gemma", "python", "```tool_code", "```", "\n", "\n", between="\n"),
        ToolDialect(
            "deepseek_v3", "named", _DEEPSEEK.opens, _DEEPSEEK.closes,
            head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", middles=("\n```json\n",),
            tail="\n```<｜tool▁call▁end｜>", between="\n",
        ),
        _DEEPSEEK,
        ToolDialect("json", "object", between=", ", bare=True, listed=True),
        ToolDialect(
            "qwen3_coder", "tags", "<tool_call>", "</tool_call>", "\n", "\n", apart="\n", several=False
        ),
    )
}  # fmt: skip
_ALIASES = {"qwen": "hermes", "qwen2": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "python": "pythonic"}
_ALIASES |= {"deepseek": "deepseek_v31", "generic": "json", "gemma3": "gemma", "llama4_pythonic": "pythonic"}
_ALIASES |= {"qwen3_xml": "qwen3_coder"}

# the first whose text stands in a template is its dialect; None: known, and not read here
_SIGNS: tuple[tuple[str, str | None], ...] = (
    ("<parameter=", "qwen3_coder"),
    ("<function=", None),
    ("<|channel|>", None),
    ("```json\\n", "deepseek_v3?"),
    ("tool▁calls▁begin", "deepseek_v31"),
    ("[ARGS]", "mistral_named"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("[func_name1(", "pythonic"),
    ("```tool_code", "gemma"),
    ("<tool_call>[", "smollm"),
    ("<tool_call>", "hermes"),
)


def dialect_named(name: str) -> ToolDialect:
    """The dialect of this name. Raises ``InvalidInput``."""
    found = DIALECTS.get(_ALIASES.get(name, name))
    if found is None:
        raise InvalidInput("tool_call_parser", name, f"use one of {', '.join(sorted({*DIALECTS, *_ALIASES}))}")
    return found


def dialect_of(template: str) -> ToolDialect | None:
    """The dialect that a chat template writes calls in; None for one that is not read here.

    A template that shows no tools gets them in a system turn (``prompt.py``), in SmolLM's way or as plain JSON.
    """
    if not shows_tools(template):
        return DIALECTS["smollm" if "SmolLM" in template else "json"]
    for sign, name in _SIGNS:
        if sign in template and name == "deepseek_v3?":
            if "tool▁calls▁begin" in template:
                return DIALECTS["deepseek_v3"]
        elif sign in template:
            return None if name is None else DIALECTS[name]
    return None


def shows_tools(template: str) -> bool:
    """Whether a chat template does anything with tools."""
    return re.search(r"\btools\b", template) is not None


def written(dialect: ToolDialect, calls: Sequence[Call]) -> str:
    """Calls as a model writes them in this dialect. Raises ``InvalidInput`` for arguments that are no object."""
    texts = [_call(dialect, call) for call in calls]
    sections = [texts] if dialect.several else [[text] for text in texts]
    return dialect.apart.join(_section(dialect, each) for each in sections)


def _section(dialect: ToolDialect, texts: Sequence[str]) -> str:
    inside = dialect.between.join(texts)
    if dialect.listed:
        inside = f"[{inside}]"
    if dialect.bare:
        return inside
    return dialect.opens + dialect.before + inside + dialect.behind + dialect.closes


def _call(dialect: ToolDialect, call: Call) -> str:
    try:
        arguments: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidInput("arguments", call.arguments, "must be a JSON object, as text")
    if dialect.form == "python":
        return f"{call.name}({', '.join(f'{name}={_python(value)}' for name, value in arguments.items())})"
    if dialect.form == "tags":
        parameters = (f"<parameter={name}>\n{_as_is(value)}\n</parameter>\n" for name, value in arguments.items())
        return f"<function={call.name}>\n{''.join(parameters)}</function>"
    text = json.dumps(arguments, ensure_ascii=False)
    if dialect.form == "named":
        return f"{dialect.head}{call.name}{dialect.middles[0]}{text}{dialect.tail}"
    return f'{{"name": {json.dumps(call.name)}, "{dialect.key}": {text}}}'


def _as_is(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    """A JSON value as Python writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    constants = {"true": "True", "false": "False", "null": "None"}
    text = json.dumps(value)
    return constants.get(text, text)
