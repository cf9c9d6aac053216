"""The detokenizer between engine and front ends: the text of what is drawn, as a fold over prompt and output ids.

    engine --(hello, submit, cancel, as they came; steps)--> hear --(each step as it came, and its text)--> front end

It decides nothing. A token comes with its text or not at all, so whoever follows a dead detokenizer is asked, through
the engine, to go on behind the tokens whose text a front end has. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.decoding.output import OutputProcessor, TextDelta
from octavo.engine.output import PROMPT_TAIL
from octavo.serve.links.messages import (
    CHOICE_END,
    TOKEN,
    ApiHello,
    Cancel,
    Event,
    Joined,
    Left,
    Link,
    ProtocolError,
    Route,
    Shown,
    Step,
    Submit,
    Texts,
    ToText,
    ends_of,
)
from octavo.tokenizers.base import Tokenizer

__all__ = ["TextSide", "folds_of"]

_FROM_ENGINE: Link[Route, ToText] = Link(ToText)
_TEXTS: Link[Texts, Texts] = Link(Texts)
# by row: the fold of a choice, how many its request has, the first token of its prompt
_Rows = dict[int, tuple[OutputProcessor, int, int]]


class TextSide:
    """The text of all choices of all front ends.

    ``outbox`` holds (epoch of the front end, frames), for whoever does the I/O to send, in order, and clear.
    """

    def __init__(self, own: int, tokenizer: Any = None, eos_ids: Sequence[int] = ()) -> None:
        self.own = own  # epoch
        self.engine = 0  # whose words are taken; 0: nobody's
        self.outbox: list[tuple[int, list[bytes]]] = []
        self.tokenizer, self.eos_ids = tokenizer, eos_ids  # of the model; there before an engine is
        self._joined = False
        self._fronts: dict[int, None] = {}  # epochs that have greeted
        self._dead: set[int] = set()
        self._rows: dict[int, _Rows] = {}  # by epoch

    @property
    def num_choices(self) -> int:
        """Choices that are followed."""
        return sum(map(len, self._rows.values()))

    def engine_up(self, epoch: int) -> None:
        """This engine is asked to send through here; until it has answered, no front end is told of it."""
        self.engine_down()
        self.engine = epoch

    def engine_down(self) -> None:
        """The engine has died: nothing of what it ran goes on under the same row."""
        self.engine, self._joined = 0, False
        self._rows.clear()

    def greeted(self, front: int) -> None:
        """A front end can be reached."""
        if front not in self._dead:
            self._fronts[front] = None
            self._tell_route(front)

    def gone(self, front: int) -> None:
        """A front end has died."""
        self._dead.add(front)
        self._fronts.pop(front, None)
        self._rows.pop(front, None)

    def hear(self, frames: Sequence[bytes]) -> None:
        """A message of the engine, or one that it relays. Raises ``ProtocolError``."""
        if not 2 <= len(frames) <= 3:
            raise ProtocolError(f"{len(frames)} frames are no message of an engine")
        sender, receiver = ends_of(frames[0])
        if sender != self.engine or receiver not in (0, self.own):
            return
        inner = list(frames[-2:])
        front, to = ends_of(inner[0])
        message = _FROM_ENGINE.unpack_body(inner[1])
        if isinstance(message, Joined):
            self._joined = True
            for front in self._fronts:
                self._tell_route(front)
        elif isinstance(message, Left):
            self.gone(message.epoch)
        elif isinstance(message, Step):
            if to in self._fronts:
                texts = self._texts(self._rows.get(to, {}), message)
                self.outbox.append((to, [*inner, _TEXTS.pack_body(texts)]))
        elif front not in self._dead:
            self._follow(front, message)

    # -- inside

    def _tell_route(self, front: int) -> None:
        if self._joined:
            self.outbox.append((front, _FROM_ENGINE.pack(Route(self.engine), self.own, front)))

    def _follow(self, front: int, message: ApiHello | Submit | Cancel) -> None:
        rows = self._rows.setdefault(front, {})
        if isinstance(message, ApiHello):
            rows.clear()
        elif isinstance(message, Submit):
            folds = folds_of(message, self.tokenizer, self.eos_ids)
            rows.update((message.row + i, (fold, len(folds), message.prompt[0])) for i, fold in enumerate(folds))
        else:
            _drop(rows, message.row)

    def _texts(self, rows: _Rows, step: Step) -> Texts:
        plain: list[Shown | None] = []
        for row, index, token in zip(step.rows, step.indices, step.tokens, strict=True):
            found = rows.get(row)
            plain.append(None if found is None else _pushed(found[0], index, token))
        words: dict[int, bytes] = {}
        for event in step.events:
            if event.logprobs is not None or event.prompt_logprobs is not None:
                self._add_words(words, rows.get(event.row), event)
        return Texts(tuple(plain), tuple(_text_of(rows, event) for event in step.events), words)

    def _add_words(self, words: dict[int, bytes], row: Any, event: Event) -> None:
        """What the tokens with logprobs look like, and those beside them; an echoed prompt begins without any."""
        table = self.tokenizer.byte_table(skip_special_tokens=False)
        if row is not None and event.prompt_logprobs is not None:
            words[row[2]] = table[row[2]]
        for entry in (event.logprobs, *(event.prompt_logprobs or ())):
            if entry is not None:
                token, _, _, top, chosen = entry
                words[token] = table[token]
                words.update((index, table[index]) for index, _ in (*top, *chosen))


def folds_of(message: Submit, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> list[OutputProcessor]:
    """The text of each choice, as far as its front end has it."""
    tail = message.prompt[-PROMPT_TAIL:]
    folds = [
        OutputProcessor(tokenizer, message.params, prompt_tail_ids=tail, eos_ids=eos_ids)
        for _ in range(message.params.num_branches)
    ]
    for fold, outputs in zip(folds, message.outputs, strict=False):
        fold.replay(outputs)
    return folds


def _drop(rows: _Rows, row: int) -> None:
    """Forget a request, by the row of its first choice."""
    _, num_choices, _ = rows.get(row, (None, 0, 0))
    for choice in range(num_choices):
        rows.pop(row + choice, None)


def _text_of(rows: _Rows, event: Event) -> Shown | None:
    found = rows.get(event.row)
    if found is None:
        return None
    fold = found[0]
    if event.kind == TOKEN:
        return _pushed(fold, event.index, event.token)
    if event.kind == CHOICE_END:
        missing = event.num_output_tokens > fold.num_tokens and not fold.finished
        return None if missing else _shown(fold.finish())
    _drop(rows, event.row)
    return ""


def _pushed(fold: OutputProcessor, index: int, token: int) -> Shown | None:
    """What one more token shows: nothing if it was told before or lies behind the end, None if one is missing."""
    if index != fold.num_tokens or fold.finished:
        return "" if fold.finished or index < fold.num_tokens else None
    text = fold.push_plain(token)
    return _shown(fold.push(token)) if text is None else text


def _shown(delta: TextDelta) -> Shown:
    if delta.truncate_at is None:
        return delta.text
    return delta.text, delta.truncate_at, str(delta.stop_reason)
