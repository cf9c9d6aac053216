"""Calls in text that arrives in pieces cut anywhere: the same calls come out, whatever the pieces were.

Each character is read once. Text that begins like a call and goes on otherwise comes out as content, whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from octavo.decoding.feed import BLANKS, Malformed, Steps, TextFeed
from octavo.decoding.pieces import Piece
from octavo.decoding.tools.dialects import ToolDialect
from octavo.decoding.tools.tags import tagged_value
from octavo.decoding.tools.values import json_string, json_value, python_value

__all__ = ["ToolParser"]

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_NAME_START = re.compile(r"[A-Za-z_]")
_KEYWORD = re.compile(r"\w*")
_KEYS = ("arguments", "parameters")
_FUNCTION = "<function="


class ToolParser:
    """A fold over the text of one answer: ``push`` each piece, then ``finish``; both return what is decided now.

    ``names`` are the tools that there are: a call of another is no call; with the schemas of their parameters, values
    that are written as they are become what their schemas say. A call's name and arguments come out when the
    call is complete; with ``eager``, for text that a grammar keeps in form, as they come, and what a cut text has of
    a call comes out, too.
    """

    def __init__(self, dialect: ToolDialect, names: Collection[str], *, eager: bool = False) -> None:
        self._dialect, self._names, self._eager = dialect, frozenset(names), eager
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._feed = TextFeed()
        self._pieces: list[Piece] = []
        self._content: list[str] = []
        self._fragments: list[str] = []  # of the last call's arguments
        self._blanks = ""  # behind content or a call: dropped if a call follows
        self._is_open = False  # a call has been shown and is not complete
        self.is_cut = False  # nor did it come to be
        self.num_calls = 0
        self._parse = self._answer()

    def push(self, text: str) -> list[Piece]:
        """What this piece of the answer decides."""
        self._feed.feed(text)
        return self._go()

    def finish(self) -> list[Piece]:
        """What the end decides. Nothing may follow."""
        self._feed.end()
        return self._go()

    def _go(self) -> list[Piece]:
        next(self._parse, None)
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- what is decided

    def _show(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._flush_arguments()
            self._content.append(kept)

    def _begin(self, name: str) -> None:
        self._flush()
        self._blanks, self._is_open = "", True
        self._pieces.append(Piece("call", name, self.num_calls))
        self.num_calls += 1

    def _flush(self) -> None:
        self._flush_arguments()
        if self._content:
            self._pieces.append(Piece("content", "".join(self._content)))
            self._content = []

    def _flush_arguments(self) -> None:
        if self._fragments:
            self._pieces.append(Piece("arguments", "".join(self._fragments), self.num_calls - 1))
            self._fragments = []

    def _whole_call(self, name: str | None, arguments: str) -> None:
        """A call that has been read to its end, unless it has been shown. Raises ``Malformed``."""
        if not self._is_open:
            if name is None or not _is_object(arguments):
                raise Malformed
            self._begin(name)
            self._fragments.append(arguments)
        self._is_open = False
        self._feed.forget()

    # -- what is read

    def _answer(self) -> Steps[None]:
        dialect = self._dialect
        if dialect.bare:
            self._blanks = yield from self._feed.while_in(BLANKS)
            self._feed.forget()
            if (yield from self._feed.peek()) in ("{", "["):
                yield from self._section_or_text()
        marks = (dialect.opens,) if dialect.opens else ()
        while (yield from self._feed.up_to(marks, self._show)):
            yield from self._section_or_text()
        if self._blanks and not self.num_calls:
            self._content.append(self._blanks)

    def _section_or_text(self) -> Steps[None]:
        try:
            yield from self._section()
        except Malformed:
            if not self._is_open:  # what is shown as a call is not shown again
                self._show("".join(self._feed.kept))
            self.is_cut, self._is_open = self._is_open, False
        self._feed.forget()

    def _section(self) -> Steps[None]:
        """Calls, behind what opens a section. Raises ``Malformed`` with the text behind the last call kept."""
        feed = self._feed
        listed = (yield from feed.blanks()) == "[" and self._dialect.form != "named"
        if listed:
            yield from feed.one()
        more = True
        while more:
            yield from feed.blanks()
            yield from self._call()
            more = yield from self._goes_on(listed)
        if self._dialect.closes and (yield from feed.blanks()) == self._dialect.closes[0]:
            yield from feed.skips_end(self._dialect.closes)
            feed.forget()
        self._blanks = yield from feed.while_in(BLANKS)

    def _goes_on(self, listed: bool) -> Steps[bool]:
        """Whether there is another call in this section; what stands between is read."""
        after = yield from self._feed.blanks()
        if listed:
            return (yield from self._feed.expect(",", "]")) == ","
        if self._dialect.between.strip():
            return (yield from self._feed.skips(self._dialect.between.strip()))
        if self._dialect.form == "object":
            return after == "{"
        if self._dialect.form == "tags":
            return (yield from self._feed.comes(_FUNCTION))
        if self._dialect.form == "named":
            return bool(self._dialect.head) and (yield from self._feed.comes(self._dialect.head))
        return _NAME_START.fullmatch(after) is not None

    def _call(self) -> Steps[None]:
        if self._dialect.form == "python":
            yield from self._python_call()
        elif self._dialect.form == "tags":
            yield from self._tags_call()
        elif self._dialect.form == "named" and (yield from self._feed.peek()) not in ("{", "["):
            yield from self._named_call()
        else:
            yield from self._object_call()

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._names:
            raise Malformed
        return name

    def _object_call(self) -> Steps[None]:
        feed, name, arguments = self._feed, None, None
        yield from feed.expect("{")
        while (yield from feed.blanks()) != "}":
            key = json.loads((yield from feed.raw(json_string(feed))))
            yield from feed.blanks()
            yield from feed.expect(":")
            yield from feed.blanks()
            if key == "name" and name is None:
                name = self._known(_loaded((yield from feed.raw(json_value(feed)))))
            elif key in _KEYS and arguments is None:
                arguments = yield from self._arguments(name)
            else:
                yield from json_value(feed)
            if (yield from feed.blanks()) != "}":
                yield from feed.expect(",")
                if (yield from feed.blanks()) == "}":
                    raise Malformed
        yield from feed.one()
        self._whole_call(name, "{}" if arguments is None else arguments)

    def _named_call(self) -> Steps[None]:
        feed, dialect = self._feed, self._dialect
        yield from feed.expect(dialect.head)
        name = self._known((yield from feed.while_in(_NAME)))
        yield from feed.expect(*dialect.middles)
        yield from feed.blanks()
        self._whole_call(name, (yield from self._arguments(name)))
        if dialect.tail:
            yield from feed.blanks()
            yield from feed.skips_end(dialect.tail.strip())

    def _arguments(self, name: str | None) -> Steps[str]:
        """The text of the arguments. An object as text in a string, and null, are taken for what they mean."""
        feed = self._feed
        if (yield from feed.peek()) != "{":
            value = _loaded((yield from feed.raw(json_value(feed))))
            return value if isinstance(value, str) else "{}" if value is None else ""
        if not self._eager or name is None:
            return (yield from feed.raw(json_value(feed)))
        self._begin(name)
        feed.tap = self._fragments_append
        try:
            yield from json_value(feed)
        finally:
            feed.tap = None
        return ""

    def _fragments_append(self, part: str) -> None:
        self._fragments.append(part)

    def _python_call(self) -> Steps[None]:
        feed = self._feed
        name = self._known((yield from feed.while_in(_NAME)))
        yield from feed.blanks()
        yield from feed.expect("(")
        parts: list[str] = []
        write = self._fragments_append if self._eager else parts.append
        if self._eager:
            self._begin(name)
        write("{")
        first = True
        while (yield from feed.blanks()) != ")":
            if not first:
                yield from feed.expect(",")
                yield from feed.blanks()
            yield from self._keyword(write, first)
            first = False
        yield from feed.one()
        write("}")
        self._whole_call(name, "".join(parts))

    def _tags_call(self) -> Steps[None]:
        """A parameter comes out when it is whole."""
        feed = self._feed
        yield from feed.expect(_FUNCTION)
        name = self._known((yield from feed.while_in(_NAME)))
        yield from feed.expect(">")
        parts: list[str] = []
        write = self._fragments_append if self._eager else parts.append
        if self._eager:
            self._begin(name)
        write("{")
        between = ""
        while (yield from self._another_parameter()):
            key = yield from feed.until(">")
            text = (yield from feed.until("</parameter>")).removeprefix("\n").removesuffix("\n")
            write(f"{between}{json.dumps(key)}: {tagged_value(text, self._schemas.get(name, {}), key)}")
            between = ", "
        write("}")
        self._whole_call(name, "".join(parts))

    def _another_parameter(self) -> Steps[bool]:
        yield from self._feed.blanks()
        return (yield from self._feed.expect("<parameter=", "</function>")) == "<parameter="

    def _keyword(self, write: Callable[[str], object], first: bool) -> Steps[None]:
        keyword = yield from self._feed.while_in(_KEYWORD)
        if not keyword:
            raise Malformed
        yield from self._feed.blanks()
        yield from self._feed.expect("=")
        yield from self._feed.blanks()
        write(("" if first else ", ") + json.dumps(keyword) + ": ")
        yield from python_value(self._feed, write)


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
