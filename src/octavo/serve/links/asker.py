"""The front end's end of the links to the tokenizers: each task is done once more when who had it has died.

    ask -> queue -> outbox -> a tokenizer -> hear -> answers
                     gone: what it had goes to another one, first

No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.serve.errors import ApiError
from octavo.serve.text_work import Work, result_of

__all__ = ["Answered", "Ask", "Asker", "answered"]

MAX_DEATHS = 3  # tokenizers that a task may see die while it is the one that is done
_DEPTH = 4  # tasks of one front end that one tokenizer has at once
_FATAL = "The server could not read this text; see its log."
_Number = Annotated[int, Meta(ge=0, lt=2**62)]


class Ask(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=60):
    """A task for a tokenizer. Those of one front end are done in order."""

    number: _Number
    work: msgspec.Raw  # `Work`


class Answered(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=61):
    """What came of it: a result in MessagePack, or an error (status, message, param, code)."""

    number: _Number
    content: bytes = b""
    error: tuple[int, str, str | None, str | None] | None = None


@dataclass(eq=False)
class _Task:
    number: int
    work: msgspec.Raw
    result: Any  # its type
    deaths: int = 0


class Asker:
    """Tasks of one front end. ``outbox`` (epoch of a tokenizer, message) is for whoever does the I/O, and to clear."""

    def __init__(self) -> None:
        self.outbox: list[tuple[int, Ask]] = []
        self._number = 0
        self._waiting: deque[_Task] = deque()
        self._given: dict[int, list[_Task]] = {}  # by epoch of the tokenizer that has them, oldest first

    @property
    def num_open(self) -> int:
        """Tasks without an answer."""
        return len(self._waiting) + sum(map(len, self._given.values()))

    def ask(self, work: Work) -> int:
        """Have something done; the answer comes under this number. Raises ``ApiError`` for what cannot be sent."""
        try:
            raw = msgspec.Raw(msgspec.msgpack.encode(work))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(
                400, "The text cannot be read: it holds what is no text, or a number out of range."
            ) from error
        self._number += 1
        self._waiting.append(_Task(self._number, raw, result_of(work)))
        self._give()
        return self._number

    def drop(self, number: int) -> None:
        """Nobody waits for it any more. Whoever has it does it all the same."""
        self._waiting = deque(task for task in self._waiting if task.number != number)

    def up(self, epoch: int) -> None:
        """A tokenizer serves."""
        self._given.setdefault(epoch, [])
        self._give()

    def gone(self, epoch: int) -> Sequence[tuple[int, Any]]:
        """It has died: what it had is asked of another; what it was at, if that sees too many die, is given up."""
        tasks = self._given.pop(epoch, [])
        failed: list[tuple[int, Any]] = []
        if tasks:
            tasks[0].deaths += 1
            if tasks[0].deaths >= MAX_DEATHS:
                failed.append((tasks.pop(0).number, ApiError(500, _FATAL, code="internal_error")))
        self._waiting.extendleft(reversed(tasks))
        self._give()
        return failed

    def hear(self, epoch: int, message: Answered) -> Sequence[tuple[int, Any]]:
        """An answer: (number, result or ``ApiError``); nothing if it is known already."""
        tasks = self._given.get(epoch, [])
        task = next((task for task in tasks if task.number == message.number), None)
        if task is None:
            return ()
        tasks.remove(task)
        self._give()
        if message.error is not None:
            status, text, param, code = message.error
            return ((task.number, ApiError(status, text, param=param, code=code)),)
        return ((task.number, msgspec.msgpack.decode(message.content, type=task.result)),)

    def _give(self) -> None:
        while self._waiting and self._given:
            epoch = min(self._given, key=lambda epoch: (len(self._given[epoch]), epoch))
            if len(self._given[epoch]) >= _DEPTH:
                return
            task = self._waiting.popleft()
            self._given[epoch].append(task)
            self.outbox.append((epoch, Ask(task.number, task.work)))


def answered(number: int, result: Any) -> Answered:
    """The message of a result or an error."""
    if isinstance(result, ApiError):
        return Answered(number, error=(result.status, result.message, result.param, result.code))
    return Answered(number, msgspec.msgpack.encode(result))
