"""A dialect as a grammar (llguidance's Lark): what a model may write where a call is demanded, or once it has begun.

It is made from the same description that the parser reads by. Marks that are special tokens are named by id, so that
no text can stand for them; all other text is byte by byte, so that any tokens may spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.decoding.grammar.schema import ending
from octavo.decoding.tools.dialects import ToolDialect
from octavo.decoding.tools.tags import parameter_value

__all__ = ["ANY_TEXT", "Tool", "calls_grammar", "check_tool", "literal"]

ANY_TEXT = "TEXT: /(.|\\n)*/"
_WORDS = r"WORDS: /[ \t\r\n]*([^\[{ \t\r\n](.|\n)*)?/"  # text that begins with no bracket
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPREADABLE = {"type", "properties", "required", "additionalProperties", "title", "description", "default", "examples"}
_SPREADABLE |= {"$defs", "definitions", "$schema", "$id", "$comment"}


@dataclass(frozen=True)
class Tool:
    """A function that may be called, and the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any]


def calls_grammar(
    dialect: ToolDialect,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
    strict: bool = False,
) -> str | None:
    """Rules for an answer, its first one ``answer``: calls of these tools alone if ``required``, else any text with
    calls in it, kept in form from the mark on that opens them. None: such calls have no mark to know them by.

    ``strict``: where calls have no mark, an answer that begins with a bracket is calls, so that these are kept in form,
    too. ``special``: ids of the tokens that no text spells. Raises ``InvalidInput`` for parameters that this dialect
    cannot enforce.
    """
    spell = dict(special or {})
    rules = [*_calls(dialect, tools, spell), f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    inside, closing = _inside(dialect, parallel, spell), _joined(dialect.behind, dialect.closes, spell=spell)
    if required:
        opening = "" if dialect.bare else _joined(dialect.opens, dialect.before, spell=spell)
        closing = "" if dialect.bare else closing
        again = f" ({literal(dialect.apart, spell)} section)*" if parallel and not dialect.several else ""
        return "\n".join([f"answer: section{again}", f"section: {opening} {inside} {closing}", *rules])
    if dialect.bare and not strict:
        return None
    body = f"{literal(dialect.before, spell)} {inside} {closing}"
    opening, lazy = _opening("opening", "TEXT", dialect, spell)
    free = ["rest: TEXT", f"section: {opening} {body}", *lazy, ANY_TEXT] if dialect.opens else []
    if not dialect.bare:
        return "\n".join([f"answer: section{'*' if parallel else '?'} rest", *rules, *free])
    answer = f"answer: {inside} | WORDS"
    if dialect.opens:
        opening, lazy = _opening("first_opening", "WORDS", dialect, spell)
        free += [f"first: {opening} {body}", *lazy]
        answer += f" | first {'section* ' if parallel else ''}rest"
    return "\n".join([answer, *rules, *free, _WORDS])


def _opening(name: str, text: str, dialect: ToolDialect, spell: Mapping[str, int]) -> tuple[str, list[str]]:
    """What stands before a section's calls, ``text`` and the mark that opens it, and the rules for that."""
    if dialect.opens in spell:
        return f"{text} <[{spell[dialect.opens]}]>", []
    return name, [f"{name}[lazy]: {text} {json.dumps(dialect.opens)}"]


def check_tool(dialect: ToolDialect, tool: Tool) -> None:
    """Raises ``InvalidInput`` for parameters that calls of this dialect cannot be kept to."""
    if dialect.form == "python":
        _keywords(0, tool)
    if dialect.form == "tags":
        _parameters(0, tool)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text as grammar, its special tokens by id."""
    if not text:
        return ""
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _joined(*texts: str, spell: Mapping[str, int]) -> str:
    return literal("".join(texts), spell)


def _inside(dialect: ToolDialect, parallel: bool, spell: Mapping[str, int]) -> str:
    """The calls of one section."""
    several = parallel and dialect.several and (dialect.between or dialect.head)
    calls = f"call ({literal(dialect.between, spell)} call)*" if several else "call"
    return f'"[" {calls} "]"' if dialect.listed else calls


def _calls(dialect: ToolDialect, tools: Sequence[Tool], spell: Mapping[str, int]) -> list[str]:
    rules = ['as_it_is[lazy]: /(.|\\n)*/ "\\n</parameter>\\n"'] if dialect.form == "tags" else []
    for index, tool in enumerate(tools):
        if dialect.form == "python":
            rules += _keywords(index, tool)
            rules.append(f'call_{index}: {json.dumps(tool.name + "(")} first_{index}_0 ")"')
            continue
        if dialect.form == "tags":
            rules += _parameters(index, tool)
            continue
        if dialect.form == "named":
            head = literal(dialect.head + tool.name + dialect.middles[0], spell)
            tail = literal(dialect.tail, spell)
        else:
            head, tail = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{dialect.key}": '), '"}"'
        rules.append(f"call_{index}: {head} {_schema(tool.parameters)} {tail}")
    return rules


def _schema(schema: Any, within: Mapping[str, Any] | None = None) -> str:
    """A JSON schema as grammar; of a part, with the definitions that the whole has."""
    if not isinstance(schema, Mapping):
        schema = {} if schema is True else {"not": {}}
    shared = {name: within[name] for name in ("$defs", "definitions") if within is not None and name in within}
    return "%json " + json.dumps({**ending({**shared, **schema}), "x-guidance": _SPELLING})


def _keywords(index: int, tool: Tool) -> list[str]:
    """Keyword arguments in the order of the schema, those that are not required left out or not.

    ``first_i_k``: what may follow where none has been written and the next is the k-th; ``more_i_k`` where one has.
    """
    schema = tool.parameters
    odd = sorted(set(schema) - _SPREADABLE)
    if odd:
        remedy = f"{odd[0]} cannot be enforced in calls written as Python; use properties and required alone"
        raise InvalidInput(f"tools[{index}].function.parameters", odd[0], remedy)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if "properties" not in schema and not required and schema.get("additionalProperties") is not False:
        any_one = f"any_{index}: /[A-Za-z_][A-Za-z0-9_]*=/ %json {json.dumps({'x-guidance': _SPELLING})}"
        return [f'first_{index}_0: (any_{index} (", " any_{index})*)?', any_one]
    missing = [name for name in required if name not in properties] + [n for n in properties if not n.isidentifier()]
    if missing:
        raise InvalidInput(f"tools[{index}].function.parameters", missing[0], "must be among properties, and a name")
    rules = []
    for number, (name, value) in enumerate(properties.items()):
        this = f"{json.dumps(name + '=')} value_{index}_{number} more_{index}_{number + 1}"
        skip_first, skip_more = f" | first_{index}_{number + 1}", f" | more_{index}_{number + 1}"
        must = name in required
        rules.append(f"first_{index}_{number}: {this}{'' if must else skip_first}")
        rules.append(f'more_{index}_{number}: ", " {this}{"" if must else skip_more}')
        rules.append(f"value_{index}_{number}: {_schema(value, schema)}")
    return [*rules, f'first_{index}_{len(properties)}: ""', f'more_{index}_{len(properties)}: ""']


def _parameters(index: int, tool: Tool) -> list[str]:
    """Parameters between tags in the order of the schema, those that are not required left out or not."""
    schema, parts, rules = tool.parameters, [], []
    odd = sorted(set(schema) - _SPREADABLE)
    required, properties = schema.get("required", []), schema.get("properties", {})
    missing = [*odd, *(name for name in required if name not in properties), *(n for n in properties if ">" in n)]
    if missing:
        remedy = f"{missing[0]} cannot be enforced in calls written as tags; use properties and required alone"
        raise InvalidInput(f"tools[{index}].function.parameters", missing[0], remedy)
    for number, (name, value) in enumerate(properties.items()):
        texts = parameter_value(value, schema, f"tools[{index}].function.parameters")
        end = json.dumps("\n</parameter>\n")
        body = "as_it_is" if texts == [] else f"{_schema(value, schema)} {end}"
        if texts:
            rules.append(f"TEXT_{index}_{number}: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}")
            body = f"TEXT_{index}_{number} {end}"
        rules.append(f"parameter_{index}_{number}: {json.dumps(f'<parameter={name}>' + chr(10))} {body}")
        parts.append(f"parameter_{index}_{number}{'' if name in required else '?'}")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        rules.append(f'parameter_{index}: "<parameter=" /[A-Za-z_][A-Za-z0-9_\\-]*/ ">\\n" as_it_is')
        parts = [f"parameter_{index}*"]
    head = json.dumps(f"<function={tool.name}>" + chr(10))
    return [*rules, f'call_{index}: {head} {" ".join(parts)} "</function>"']
