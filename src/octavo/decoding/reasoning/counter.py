"""How many tokens of an answer are thought."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.decoding.detokenizer import IncrementalDetokenizer
from octavo.decoding.reasoning.formats import ReasoningFormat
from octavo.decoding.reasoning.splitter import ReasoningSplitter
from octavo.tokenizers.base import Tokenizer

__all__ = ["ThoughtCounter"]


class ThoughtCounter:
    """A fold over the output ids of one choice, with the marks of its thoughts, as `ReasoningSplitter` reads them.

    ``count``: tokens up to the one in which the thoughts are closed, all of them where they are not; 0 where there are
    none. Tokens that go one by one or many at once come to the same.
    """

    def __init__(self, marks: ReasoningFormat, tokenizer: Tokenizer, *, is_open: bool, skip_special: bool) -> None:
        self._splitter = ReasoningSplitter(marks, is_open=is_open)
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special)
        self._seen = 0
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """More output tokens."""
        for token in token_ids:
            if self._splitter.answering:
                return
            self._seen += 1
            self._splitter.push(self._text.push_one(token))
            if self._splitter.thought:
                self.count = self._seen
