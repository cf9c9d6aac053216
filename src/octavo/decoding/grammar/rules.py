"""Grammars in Lark whose language is empty, as each word would have to hold another one.

start: "(" start ")"          never ends        start: "(" start ")" | "x"          does
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

__all__ = ["may_end"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\n]*>)"""
    r"""|(?P<order>%\w+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>\n|->|[:|()\[\]?*+~{},.=!-]|\d+)"""
)
_Expression = list[list[Any]]  # alternatives of sequences of: True (it ends), the name of a rule, an expression


class _Unread(Exception):
    """A notation that is not known here."""


def may_end(text: str) -> bool:
    """False if nothing finite fits the rule ``start``. True as well where the text cannot be read here.

    A least fixpoint: a rule ends if one of its alternatives holds only what ends.
    """
    try:
        rules = {name: _read(iter(body), "") for name, body in _statements(text)}
    except (_Unread, RecursionError):
        return True
    ending = {name for name in _names(rules.values()) if name not in rules}
    turns, before = list(rules), -1
    while before < len(ending):
        before = len(ending)
        turns.reverse()  # chains of rules are written in either order
        for name in turns:
            if name not in ending and _ends(rules[name], ending):
                ending.add(name)
    return "start" in ending or "start" not in rules


def _ends(expression: _Expression, ending: Set[str]) -> bool:
    return any(
        all(item is True or (item in ending if isinstance(item, str) else _ends(item, ending)) for item in sequence)
        for sequence in expression
    )


def _statements(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, body) of each rule; terminals, which cannot hold themselves, and orders to the library are left out."""
    words, depth = [], 0
    tokens = [*_tokens(text), "\n"]
    for at, token in enumerate(tokens):
        depth += (token in "([{") - (token in ")]}")
        following = next((word for word in tokens[at + 1 : at + 4] if word != "\n"), "")
        if token != "\n":
            words.append(token)
        elif depth <= 0 and following != "|" and words:
            if ":" in words and words[0][0] != "%":
                colon = words.index(":")
                name = next((word for word in words[:colon] if word not in "?!"), "")
                if not name[:1].isupper():
                    yield name, words[colon + 1 :]
            words = []


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _Unread
        if match.lastgroup != "space":
            yield match[0]
        at = match.end()


def _read(tokens: Iterator[str], close: str) -> _Expression:
    """Alternatives up to a bracket that closes."""
    found: _Expression = [[]]
    for token in tokens:
        if token == close:
            return found
        last = found[-1]
        if token == "|":
            found.append([])
        elif token == "(":
            last.append(_read(tokens, ")"))
        elif token == "[":
            _read(tokens, "]")
        elif token in ("?", "*") and last:
            last.pop()
        elif token in ("{", "~") and last:
            _repeat(last, tokens, token)
        elif token[0] == "%":
            _skip(tokens)
        elif token == "->":
            next(tokens, "")
        elif token[0].isalpha() or token[0] == "_":
            last.append(True if token[0].isupper() else token)
        elif token[0] not in '"/<+.':
            raise _Unread
    if close:
        raise _Unread
    return found


def _repeat(last: list[Any], tokens: Iterator[str], token: str) -> None:
    """``{2,5}``, ``{,5}`` or ``~2..5`` behind an item: gone if it may come no time."""
    least = next(tokens, "")
    if least in ("0", ","):
        last.pop()
    while token == "{" and least != "}":
        least = next(tokens, "}")


def _skip(tokens: Iterator[str]) -> None:
    """Past what stands in braces."""
    depth = 0
    for token in tokens:
        depth += (token == "{") - (token == "}")
        if depth <= 0:
            return


def _names(expressions: Iterable[Any]) -> Iterator[str]:
    for item in expressions:
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            yield from _names(item)
