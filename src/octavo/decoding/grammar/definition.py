"""From a `Grammar` to the text that `llguidance` compiles. Everything that can be refused by looking at it is."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.matcher import GrammarFault, guarded
from octavo.decoding.grammar.schema import MAX_ENUM, checked_schema
from octavo.decoding.grammar.tags import lark_of_tags

__all__ = ["JSON_STYLE", "definition", "in_lark"]

# One way to write each value, so that more is forced; as Python's `json.dumps` writes, which models have read most
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_IN_LARK = ("choice", "structural_tag", "lark")  # the others are written as JSON
_NOT_HONOURED = re.compile(r"^\s*[A-Za-z_]\w*\s*\[[^\]\n]*\b(temperature|capture)\b", re.MULTILINE)
_MAX_BRACKETS = 128  # open at once


def definition(grammar: Grammar) -> str:
    """The text for `LLMatcher`. Raises ``InvalidInput`` naming what cannot be honoured, or ``GrammarFault``."""
    word = _word(grammar)
    return _behind_thoughts(grammar, word) if grammar.before else word


def _behind_thoughts(grammar: Grammar, word: str) -> str:
    """Two grammars, each with its own names of rules: thoughts, and behind them what the second one says."""
    answer = {"lark_grammar": word} if grammar.kind in _IN_LARK else json.loads(word)["grammars"][0]
    whole = {"lark_grammar": f"%llguidance {{}}\nstart: thoughts @answer\n{grammar.before}"}
    return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]})


def _word(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    kind, source = grammar.kind, grammar.source
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)  # type: ignore[arg-type]
    if kind == "json_schema":
        return _of_schema(checked_schema(source))
    if kind == "regex":
        _check_brackets(kind, source)
        return LLMatcher.grammar_from_regex(_without_anchors(source))
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_lark_of_choices(source))
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(lark_of_tags(source))
    _check_brackets(kind, source)
    return LLMatcher.grammar_from_lark(in_lark(source))


def _of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidInput("json_schema", schema, "nothing could be said: give a schema that something fits")
    return guarded(lambda: LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE))  # type: ignore[arg-type]


def _check_brackets(kind: str, source: str) -> None:
    """The library goes through nested groups by recursion."""
    depth = 0
    for character in source:
        depth = depth + (character in "([{") - (character in ")]}")
        if depth > _MAX_BRACKETS:
            raise InvalidInput(kind, f"{depth} open brackets", f"nest at most {_MAX_BRACKETS}")
        depth = max(depth, 0)


def _without_anchors(pattern: str) -> str:
    """The output as a whole matches, so anchors at both ends say nothing new."""
    pattern = pattern.removeprefix("^")
    head = pattern[:-1]
    escaped = (len(head) - len(head.rstrip("\\"))) % 2
    return head if pattern.endswith("$") and not escaped else pattern


def _lark_of_choices(source: str) -> str:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidInput("choice", None, "give a list of strings, none of them empty")
    if not 1 <= len(choices) <= MAX_ENUM:
        raise InvalidInput("choice", f"{len(choices)} strings", f"give 1 to {MAX_ENUM}")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"start: CHOICE\nCHOICE: {texts}"  # a terminal: the parser takes some hundred alternatives of a rule


def in_lark(source: str) -> str:
    """A grammar in GBNF as Lark; one in Lark as it is. Raises ``InvalidInput`` for what is neither."""
    odd = _NOT_HONOURED.search(source)
    if odd is not None:
        raise InvalidInput(f"lark {odd[1]}", odd[1], "this attribute of a rule is not honoured; leave it out")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return guarded(any_to_lark, source)
    except GrammarFault:
        raise InvalidInput("grammar", None, "give a grammar in Lark (with a rule start) or in GBNF") from None
