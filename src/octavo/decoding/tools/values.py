"""Values in calls: JSON, read as it stands, and Python's literals, read into JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from octavo.decoding.feed import Malformed, Steps, TextFeed

__all__ = ["MAX_DEPTH", "json_string", "json_value", "python_value"]

MAX_DEPTH = 100
_WORDS = re.compile(r"[-+.0-9a-zE,: \t\r\n]*")  # between strings and brackets; NaN and Infinity are no JSON
_SCALAR = re.compile(r"[-+.0-9a-zE]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_UNQUOTED = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_PYTHON_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_ESCAPES |= {character: character for character in "\\\"'/"}


def json_value(feed: TextFeed) -> Steps[None]:
    """Read one JSON value, whose brackets and strings are looked at, and the rest not. Raises ``Malformed``."""
    first = yield from feed.peek()
    if first == '"':
        yield from json_string(feed)
    elif first not in ("{", "["):
        if not (yield from feed.while_in(_SCALAR)):
            raise Malformed
    else:
        yield from _brackets(feed)


def _brackets(feed: TextFeed) -> Steps[None]:
    open_ones: list[str] = []
    while True:
        character = yield from feed.peek()
        if character == '"':
            yield from json_string(feed)
        elif character in ("{", "["):
            yield from feed.one()
            open_ones.append("}" if character == "{" else "]")
            if len(open_ones) > MAX_DEPTH:
                raise Malformed
        elif character and character == open_ones[-1]:
            yield from feed.one()
            open_ones.pop()
            if not open_ones:
                return
        elif not (yield from feed.while_in(_WORDS)):
            raise Malformed


def json_string(feed: TextFeed) -> Steps[None]:
    """Read one JSON string. Raises ``Malformed``."""
    yield from feed.expect('"')
    while True:
        yield from feed.while_in(_PLAIN)
        character = yield from feed.one()
        if character == '"':
            return
        if character != "\\" or not (yield from feed.one()):
            raise Malformed


def python_value(feed: TextFeed, write: Callable[[str], object], depth: int = 0) -> Steps[None]:
    """Read a literal (text, number, True, False, None, lists, dictionaries by text) and write it as JSON, as it comes.

    JSON's own words are taken, too. Raises ``Malformed``.
    """
    first = yield from feed.peek()
    if depth > MAX_DEPTH:
        raise Malformed
    if first in ("'", '"'):
        write(json.dumps((yield from _python_string(feed)), ensure_ascii=False))
    elif first in ("[", "("):
        yield from _items(feed, write, depth, "]" if first == "[" else ")", keyed=False)
    elif first == "{":
        yield from _items(feed, write, depth, "}", keyed=True)
    else:
        word = yield from feed.while_in(_PYTHON_WORD)
        if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
            raise Malformed
        write(_CONSTANTS.get(word, word))


def _items(feed: TextFeed, write: Callable[[str], object], depth: int, close: str, *, keyed: bool) -> Steps[None]:
    yield from feed.one()
    write("{" if keyed else "[")
    first = True
    while (yield from feed.blanks()) != close:
        if not first:
            write(", ")
        if keyed:
            if (yield from feed.peek()) not in ("'", '"'):
                raise Malformed
            yield from python_value(feed, write, depth + 1)
            yield from feed.blanks()
            yield from feed.expect(":")
            write(": ")
            yield from feed.blanks()
        yield from python_value(feed, write, depth + 1)
        first = False
        if (yield from feed.blanks()) != close:
            yield from feed.expect(",")
    yield from feed.one()
    write("}" if keyed else "]")


def _python_string(feed: TextFeed) -> Steps[str]:
    quote = yield from feed.one()
    parts: list[str] = []
    while True:
        parts.append((yield from feed.while_in(_UNQUOTED[quote])))
        character = yield from feed.one()
        if character == quote:
            return _unescaped("".join(parts))
        if character != "\\":
            raise Malformed
        parts += [character, (yield from feed.one())]


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_meant, text)
    try:  # two halves of a character, as JSON writes them, are one; a lone half is none
        return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise Malformed from None


def _meant(found: re.Match[str]) -> str:
    name = found[1]
    if len(name) == 1:
        return _ESCAPES.get(name, "\\" + name)
    code = int(name[1:], 16)
    if code > 0x10FFFF:
        raise Malformed
    return chr(code)
