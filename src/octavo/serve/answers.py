"""What completions and chat completions share on their way out: ids, the stream's law, the pieces of a choice.

chunk*   then one chunk with a finish reason per choice   then usage, if asked for   then [DONE]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.decoding.answer import AnswerForm
from octavo.serve.dialects import event
from octavo.serve.generate import Job, run
from octavo.serve.metrics import Metrics
from octavo.serve.names import Warnings, warning_headers
from octavo.serve.port import Delta, EnginePort
from octavo.serve.protocol import Answer, GenerationRequest

__all__ = ["Reply", "extras", "stream_events"]

_MARK = "\0the text\0"  # no name has these characters


@dataclass
class Reply:
    """One request on its way: what was asked, what the engine was given, and how to sign the answer."""

    request: Any
    job: Job
    model: str
    answer_id: str
    request_id: str
    warnings: Warnings
    form: AnswerForm = field(default_factory=AnswerForm)  # what its text is made of
    first_token_s: float = 0.0  # as foretold; 0: unknown
    created: int = field(default_factory=lambda: int(time.time()))

    def signature(self, kind: str) -> dict[str, Any]:
        """The fields that every object of the answer begins with."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def headers(self) -> dict[str, str]:
        """The request's id, and the names of what was not honoured."""
        headers = {"X-Request-Id": self.request_id}
        if self.first_token_s:
            headers["X-Octavo-First-Token-Forecast"] = f"{self.first_token_s:.4f}"
        return headers | warning_headers(self.warnings)

    @property
    def warnings_field(self) -> Any:
        """The warnings, or nothing at all."""
        return self.warnings or UNSET


def extras(request: GenerationRequest, token_ids: list[int]) -> dict[str, Any]:
    """Fields of a choice that appear only where they were asked for."""
    return {"token_ids": token_ids} if request.return_token_ids else {}


def _is_plain(reply: Reply) -> bool:
    """Whether the chunks of a choice, between its first and its last, differ in their text alone."""
    request = reply.request
    has_logprobs = request.logprobs is not None and request.logprobs is not False  # 0 asks for them
    return reply.form.is_plain and not request.return_token_ids and not has_logprobs


class _PlainFrames:
    """Events of plain text: all but the text is encoded once for each choice."""

    def __init__(self, piece: Callable[[int, Any], Answer | None], with_usage: bool) -> None:
        self.begun: set[int] = set()  # choices that have had their first piece
        self._piece, self._usage = piece, None if with_usage else UNSET
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the bytes before and behind the text, by choice

    def of(self, index: int, delta: Delta) -> bytes | None:
        """The event of a delta; None for one that is more than plain text."""
        if not delta.text or index not in self.begun or delta.finish_reason is not None:
            return None
        if delta.prompt_logprobs is not None:
            return None
        before, after = self._around.get(index) or self._learn(index, delta)
        return before + msgspec.json.encode(delta.text) + after

    def _learn(self, index: int, delta: Any) -> tuple[bytes, bytes]:
        answer = self._piece(index, replace(delta, text=_MARK))
        assert answer is not None
        answer.usage = self._usage
        before, _, after = event(answer).partition(msgspec.json.encode(_MARK))
        self._around[index] = before, after
        return before, after


def _written(plain: _PlainFrames, write: Callable[[bytes], bool], index: int, delta: Delta) -> bool:
    frame = plain.of(index, delta)
    return frame is not None and write(frame)


async def stream_events(
    engine: EnginePort,
    reply: Reply,
    metrics: Metrics,
    begin: Callable[[], list[Answer]],
    piece: Callable[[int, Delta], Answer | None],
    last: Callable[[], Answer],
) -> AsyncGenerator[bytes, None]:
    """The events of one stream. `begin` opens it, `piece` turns a delta into a chunk, `last` carries the usage."""
    options = reply.request.stream_options
    with_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats
    warnings = reply.warnings_field
    plain = None if continuous or not _is_plain(reply) else _PlainFrames(piece, with_usage)
    if plain is not None and reply.job.line is not None:
        reply.job.express = partial(_written, plain, reply.job.line.write)
    for chunk in begin():
        chunk.usage = None if with_usage else UNSET
        chunk.warnings, warnings = warnings, UNSET
        yield event(chunk)
    async with aclosing(run(engine, reply.job, metrics)) as deltas:
        async for index, delta in deltas:
            frame = None if plain is None else plain.of(index, delta)
            if frame is not None:
                yield frame
                continue
            # the prompt's logprobs come at once, and may be many
            large = delta.prompt_logprobs is not None
            answer = await asyncio.to_thread(piece, index, delta) if large else piece(index, delta)
            if answer is None:
                continue
            answer.usage = reply.job.usage() if continuous else None if with_usage else UNSET
            answer.warnings, warnings = warnings, UNSET
            yield event(answer)
            if plain is not None:
                plain.begun.add(index)
    if with_usage:
        final = last()
        final.usage = reply.job.usage()
        yield event(final)
