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

__all__ = ["ANY_TEXT", "Tool", "calls_grammar", "literal"]

ANY_TEXT = "TEXT: /(.|\\n)*/"
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
) -> str | None:
    """Rules for an answer, its first one ``answer``: calls of these tools alone if ``required``, else any text with
    calls in it, kept in form from the mark on that opens them. None: such calls have no mark to know them by.

    ``special``: ids of the tokens that no text spells. Raises ``InvalidInput`` for parameters that this dialect cannot
    enforce.
    """
    spell = dict(special or {})
    rules = [*_calls(dialect, tools, spell), f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    inside, closing = _inside(dialect, parallel, spell), _joined(dialect.behind, dialect.closes, spell=spell)
    if required:
        opening = "" if dialect.bare else _joined(dialect.opens, dialect.before, spell=spell)
        closing = "" if dialect.bare else closing
        again = f" ({literal(dialect.apart, spell)} section)*" if parallel and not dialect.several else ""
        return "\n".join([f"answer: section{again}", f"section: {opening} {inside} {closing}", *rules])
    if dialect.bare:
        return None
    body = f"{literal(dialect.before, spell)} {inside} {closing}"
    begun = f"TEXT <[{spell[dialect.opens]}]>" if dialect.opens in spell else "opening"
    lazy = [] if dialect.opens in spell else [f"opening[lazy]: TEXT {json.dumps(dialect.opens)}"]
    start = f"answer: section{'*' if parallel else '?'} rest"
    return "\n".join([start, "rest: TEXT", *lazy, f"section: {begun} {body}", *rules, ANY_TEXT])


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
    rules: list[str] = []
    for index, tool in enumerate(tools):
        if dialect.form == "python":
            rules += _keywords(index, tool)
            rules.append(f'call_{index}: {json.dumps(tool.name + "(")} first_{index}_0 ")"')
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
