"""The register, as a front end sees it that has others beside it; and as their supervisor keeps it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.core.admission import Limits
from octavo.serve.errors import ApiError
from octavo.serve.front import internal_error
from octavo.serve.links.messages import Answer, ProtocolError, Question
from octavo.serve.register import Asked, Register

__all__ = ["KeptRegister", "RemoteGate"]

_log = logging.getLogger(__name__)


class RemoteGate:
    """`octavo.serve.admission.Gate` over the line to the supervisor. Used in one event loop."""

    def __init__(self, send: Callable[[Question], None]) -> None:
        self._send = send
        self._number = 0
        self._open: dict[int, asyncio.Future[Any]] = {}  # by number of the question

    async def ask(self, asked: Asked) -> Any:
        """The register's answer. Raises ``ApiError``."""
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self._send(Question(number, _packed(asked)))
        try:
            return await answer
        finally:
            del self._open[number]

    def tell(self, told: Asked) -> None:
        """The same, without waiting for an answer."""
        self._send(Question(0, _packed(told)))

    def orphaned(self, owner: str, request_id: str) -> None:
        """The register knows already."""

    def hear(self, message: Answer) -> None:
        """The register has answered."""
        answer = self._open.get(message.number)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(msgspec.msgpack.decode(message.content))
            return
        status, text, param, code, headers = message.error
        answer.set_exception(ApiError(status, text, param=param, code=code, headers=headers))


class KeptRegister:
    """The register at the supervisor. A fault of it is one front end's answer, and ends nothing."""

    def __init__(self, limits: Limits) -> None:
        self.register = Register(limits)
        self._decode = msgspec.msgpack.Decoder(Asked).decode

    def answer(self, front: int, question: Question) -> Answer | None:
        """The answer, if one is waited for. Raises ``ProtocolError`` for what is no question."""
        try:
            asked = self._decode(question.asked)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"a question that does not fit its schema: {error}") from error
        try:
            content = msgspec.msgpack.encode(self.register.answer(front, asked, time.monotonic()))
        except ApiError as error:
            return _refusal(question.number, error)
        except Exception:
            _log.exception("the register failed")
            return _refusal(question.number, internal_error())
        return Answer(question.number, content) if question.number else None


def _packed(asked: Asked) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(asked))


def _refusal(number: int, error: ApiError) -> Answer | None:
    if not number:
        return None
    return Answer(number, error=(error.status, error.message, error.param, error.code, error.headers))
