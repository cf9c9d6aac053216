"""Text that arrives in pieces, read by parsers that wait, as generators do, where it is not there yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["BLANKS", "Malformed", "Steps", "TextFeed", "held_back"]

_T = TypeVar("_T")
Steps = Generator[None, None, _T]  # yields where it waits for text
BLANKS = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """What was read is not what it began as."""


class TextFeed:
    """Reads a text from front to back, each character once, so that all reading is linear in it.

    ``kept`` holds what was read since ``forget``: who fails gives it back. ``tap`` hears everything as it is read.
    """

    def __init__(self) -> None:
        self._text, self._at, self._over = "", 0, False
        self.kept: list[str] = []
        self.tap: Callable[[str], object] | None = None

    def feed(self, text: str) -> None:
        """More of it. Readers leave little unread, so this costs what the piece costs."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """There is no more."""
        self._over = True

    def forget(self) -> None:
        """What has been read is done with."""
        self.kept.clear()

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text):
            if self._over:
                return ""
            yield
        return self._text[self._at]

    def one(self) -> Steps[str]:
        """Read the next character; empty at the end."""
        character = yield from self.peek()
        return self._read(self._at + len(character))

    def skips_end(self, literal: str) -> Steps[None]:
        """Read ``literal`` if it comes next, or what a cut text has of it."""
        if not (yield from self.skips(literal)) and self._over and literal.startswith(self._text[self._at :]):
            self._read(len(self._text))

    def raw(self, reader: Steps[None]) -> Steps[str]:
        """All that ``reader`` reads."""
        parts: list[str] = []
        self.tap = parts.append
        try:
            yield from reader
        finally:
            self.tap = None
        return "".join(parts)

    def while_in(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read what ``characters`` (a repeated class of them) matches, as it comes."""
        parts = []
        while True:
            found = characters.match(self._text, self._at)
            parts.append(self._read(self._at if found is None else found.end()))
            if self._at < len(self._text) or self._over:
                return "".join(parts)
            yield

    def blanks(self) -> Steps[str]:
        """Read white space; the character behind it."""
        yield from self.while_in(BLANKS)
        return (yield from self.peek())

    def comes(self, literal: str) -> Steps[bool]:
        """Whether ``literal`` comes next."""
        while True:
            unread = self._text[self._at : self._at + len(literal)]
            if unread == literal:
                return True
            if self._over or not literal.startswith(unread):
                return False
            yield

    def skips(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if it comes next; whether it did."""
        found = yield from self.comes(literal)
        if found:
            self._read(self._at + len(literal))
        return found

    def expect(self, *literals: str) -> Steps[str]:
        """Read the first of these that comes next. Raises ``Malformed``."""
        for literal in literals:
            if (yield from self.skips(literal)):
                return literal
        raise Malformed

    def up_to(self, marks: tuple[str, ...], show: Callable[[str], object]) -> Steps[str]:
        """Read up to the first of ``marks`` and behind it, showing what stands before; the mark, empty at the end.

        What is shown is not kept.
        """
        while True:
            places = [(self._text.find(mark, self._at), -len(mark), mark) for mark in marks]
            found = min((place for place in places if place[0] >= 0), default=None)
            if found is not None:
                self._pass_on(found[0], show)
                return self._read(found[0] + len(found[2]))
            self._pass_on(len(self._text) - (0 if self._over else held_back(self._text, self._at, marks)), show)
            if self._over:
                return ""
            yield

    def until(self, mark: str) -> Steps[str]:
        """Read up to ``mark`` and behind it; what stands before. Raises ``Malformed`` where it does not come."""
        parts = []
        while True:
            found = self._text.find(mark, self._at)
            if found >= 0:
                parts.append(self._read(found))
                self._read(found + len(mark))
                return "".join(parts)
            parts.append(self._read(len(self._text) - held_back(self._text, self._at, (mark,))))
            if self._over:
                raise Malformed
            yield

    def _pass_on(self, end: int, show: Callable[[str], object]) -> None:
        part = self._read(end)
        self.forget()
        if part:
            show(part)

    def _read(self, end: int) -> str:
        part, self._at = self._text[self._at : end], end
        if part:
            self.kept.append(part)
            if self.tap is not None:
                self.tap(part)
        return part


def held_back(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Characters at the end of ``text[start:]`` that may begin one of ``marks``."""
    for size in range(min(len(text) - start, max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0
