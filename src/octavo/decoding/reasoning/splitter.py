"""Thoughts and answer, of text that arrives in pieces."""

from __future__ import annotations

from octavo.decoding.feed import BLANKS, Steps, TextFeed
from octavo.decoding.pieces import Piece
from octavo.decoding.reasoning.formats import ReasoningFormat

__all__ = ["ReasoningSplitter"]


class ReasoningSplitter:
    """A fold over the text of one answer: ``push`` each piece, then ``finish``.

    One block of thoughts, at the beginning; what looks like a mark later on is content. White space around the marks
    is no part of either side. A block that is not closed is all thought. ``is_open``: the prompt has opened it.
    """

    def __init__(self, marks: ReasoningFormat, *, is_open: bool = False) -> None:
        self._marks, self._is_open = marks, is_open
        self._feed = TextFeed()
        self._pieces: list[Piece] = []
        self._blanks = ""
        self._parse = self._answer()
        self.thought = is_open  # whether there are thoughts
        self.answering = False  # whether they are over, if there are any

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
        pieces, self._pieces = self._pieces, []
        return pieces

    def _answer(self) -> Steps[None]:
        feed, blanks = self._feed, ""
        if not self._is_open:
            blanks = yield from feed.while_in(BLANKS)
        # a model may repeat the mark that the template has written
        if (yield from feed.skips(self._marks.opens)) or self._is_open:
            self.thought, blanks = True, ""
            yield from feed.while_in(BLANKS)
            yield from feed.up_to((self._marks.closes,), self._think)
            self.answering = True
            yield from feed.while_in(BLANKS)
        self.answering = True
        if blanks:
            self._say(blanks)
        yield from feed.up_to((), self._say)

    def _think(self, text: str) -> None:
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._pieces.append(Piece("reasoning", shown))

    def _say(self, text: str) -> None:
        self._pieces.append(Piece("content", text))
