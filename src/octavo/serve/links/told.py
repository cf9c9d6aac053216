"""The text of choices that another process works out: what it has told, in the place of the fold itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo.decoding.output import TextDelta
from octavo.engine.output import OutputRouter
from octavo.serve.links.api_side import ApiSide
from octavo.serve.links.messages import CHOICE_END, TOKEN, Link, ProtocolError, Shown, Step, Texts
from octavo.serve.links.told_words import ToldTokenizer

__all__ = ["ToldText", "feed"]

_TEXTS: Link[Texts, Texts] = Link(Texts)


class ToldText:
    """`octavo.decoding.OutputProcessor` as far as a router needs it; each token's text must have been fed before."""

    __slots__ = ("_end", "_known", "_rest", "_shown")

    def __init__(self, *args: Any, **options: Any) -> None:
        self._shown: deque[Shown] = deque()
        self._known = 0  # tokens fed
        self._rest: Shown = ""  # what the end shows
        self._end: TextDelta | None = None

    @property
    def finished(self) -> bool:
        """True once a stop string or `finish` ended the text."""
        return self._end is not None

    def feed(self, index: int, shown: Shown | None) -> None:
        """The text of a token. What was fed before, or comes too early, is dropped, as its token is."""
        if index != self._known:
            return
        if shown is None:
            raise ProtocolError("a token came without its text")
        self._known += 1
        self._shown.append(shown)

    def feed_end(self, num_tokens: int, shown: Shown | None) -> None:
        """The text that was held back until the end, after so many tokens."""
        if num_tokens > self._known:
            return  # tokens were lost: it will be told again
        if shown is None:
            raise ProtocolError("an end came without its text")
        self._rest = shown

    def push_plain(self, token_id: int) -> str | None:
        """The text of one more token where nothing ends; None, and nothing is consumed, where `push` has to look."""
        if self._end is not None or type(self._shown[0]) is not str:
            return None
        return str(self._shown.popleft())

    def push(self, token_id: int) -> TextDelta:
        """Consume one token. After the end: the ending again."""
        return self._ending((token_id,), self._shown.popleft(), False) if self._end is None else self._end

    def push_all(self, token_ids: Sequence[int]) -> str:
        """`push` of each; the text that they show together."""
        return "".join([self.push(token_id).text for token_id in token_ids])

    replay = push_all

    def finish(self) -> TextDelta:
        """The end for another reason: what was held back."""
        return self._ending((), self._rest, True) if self._end is None else self._end

    def _ending(self, token_ids: tuple[int, ...], shown: Shown, finished: bool) -> TextDelta:
        text, kept, stop = (shown, None, None) if isinstance(shown, str) else shown
        if finished or kept is not None:
            self._end = TextDelta(finished=True, stop_reason=stop, truncate_at=kept)
        return TextDelta(text, token_ids, 0, self._end is not None, stop, kept)


def feed(side: ApiSide, router: OutputRouter, step: Step, body: bytes) -> None:
    """Give the texts of a step to those who will be asked for them. Raises ``ProtocolError`` if they do not fit it."""
    texts = _TEXTS.unpack_body(body)
    if texts.words and isinstance(router.tokenizer, ToldTokenizer):
        router.tokenizer.learn(texts.words)
    if (len(texts.plain), len(texts.events)) != (len(step.rows), len(step.events)):
        raise ProtocolError("a step came with the text of another one")
    for row, index, shown in zip(step.rows, step.indices, texts.plain, strict=True):
        told = _told(side, router, row)
        if told is not None:
            told.feed(index, shown)
    for event, shown in zip(step.events, texts.events, strict=True):
        told = _told(side, router, event.row)
        if told is not None and event.kind == TOKEN:
            told.feed(event.index, shown)
        elif told is not None and event.kind == CHOICE_END:
            told.feed_end(event.num_output_tokens, shown)


def _told(side: ApiSide, router: OutputRouter, row: int) -> ToldText | None:
    key = side.choice_of(row)
    found = None if key is None else router.processor(*key)
    return found if isinstance(found, ToldText) else None
