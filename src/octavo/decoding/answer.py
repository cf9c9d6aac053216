"""What an answer is made of, read from its text: thoughts, then content and calls. A fold over the text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octavo.decoding.pieces import Piece
from octavo.decoding.reasoning import ReasoningFormat, ReasoningSplitter
from octavo.decoding.tools import ToolDialect, ToolParser

__all__ = ["AnswerForm", "AnswerReader"]


@dataclass(frozen=True)
class AnswerForm:
    """What to look for in an answer: thoughts in ``reasoning`` marks, calls of ``names`` in ``tools``."""

    reasoning: ReasoningFormat | None = None
    is_open: bool = False  # the prompt has opened the thoughts
    tools: ToolDialect | None = None
    names: Collection[str] = ()
    eager: bool = False  # a grammar keeps calls in form: show them as they come
    most_calls: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether an answer is all content."""
        return self.reasoning is None and self.tools is None


class AnswerReader:
    """The pieces of one answer: ``push`` its text as it comes, then ``finish``.

    Cut anywhere, a text comes to the same answer; calls beyond ``most_calls`` are left out.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._split = None if form.reasoning is None else ReasoningSplitter(form.reasoning, is_open=form.is_open)
        self._calls = None if form.tools is None else ToolParser(form.tools, form.names, eager=form.eager)
        self.num_calls = 0

    @property
    def is_cut(self) -> bool:
        """Whether the text has ended within a call that is shown."""
        return self._calls is not None and self._calls.is_cut

    def push(self, text: str) -> list[Piece]:
        """What more text decides."""
        return self._read([Piece("content", text)] if self._split is None else self._split.push(text))

    def finish(self) -> list[Piece]:
        """What the end decides. Nothing may follow."""
        pieces = self._read([] if self._split is None else self._split.finish())
        return pieces if self._calls is None else pieces + self._kept(self._calls.finish())

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return [piece for piece in pieces if piece.text]
        found: list[Piece] = []
        for piece in pieces:
            found += self._kept(self._calls.push(piece.text)) if piece.kind == "content" else [piece]
        return found

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        most = self._form.most_calls
        kept = pieces if most is None else [piece for piece in pieces if piece.index < most]
        self.num_calls += sum(piece.kind == "call" for piece in kept)
        return kept
