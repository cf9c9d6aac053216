"""Ollama's answers: JSON lines, the last of which tells what it took. Durations are nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import msgspec

from octavo.core.batch import TokenLogprobs
from octavo.decoding.pieces import Call, whole
from octavo.serve.answers import Reply
from octavo.serve.dialects import Dialect
from octavo.serve.errors import ApiError
from octavo.serve.forms import Reading, call_id, parsed, read_whole
from octavo.serve.generate import Choice, run
from octavo.serve.logprobs import chat_logprobs
from octavo.serve.metrics import Metrics
from octavo.serve.port import EnginePort

__all__ = ["OLLAMA", "answer_events", "answer_whole", "loaded"]

_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
)


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


class OllamaError(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of an error, in Ollama's shape."""

    error: str


def _error_body(error: ApiError) -> dict[str, str]:
    return {"error": error.message}


OLLAMA = Dialect(
    _error_body,
    _line,
    media_type="application/x-ndjson",
    nothing=b"",  # each line is an object
    error_kind=OllamaError,
    theirs={
        **{name: f"options.{name}" for name in _OPTIONS},
        "max_tokens": "options.num_predict",
        "response_format": "format",
        "repetition_penalty": "options.repeat_penalty",
        "reasoning_effort": "think",
        "thinking": "think",
    },
)


def loaded(model: str, asked: Any) -> dict[str, Any]:
    """The answer to a request that only wants the model to be there."""
    return {**_head(model), **_said(asked, ""), "done": True, "done_reason": "load"}


def answer_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer. Costs what its logprobs cost: call it in a thread."""
    choice = choices[0]
    answer = read_whole(reply.form, choice.text)
    calls = [_call(reply, index, call) for index, call in enumerate(answer.calls)]
    said = _piece(engine, reply, answer.content, choice.logprobs, answer.reasoning, calls)
    return {**said, **_end(reply, choice.finish_reason), **_warnings(reply)}


async def answer_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The lines: text, then one with the end."""
    more, reason, reading = _warnings(reply), None, _reading(reply)
    async with aclosing(run(engine, reply.job, metrics)) as deltas:
        async for _, delta in deltas:
            reason = delta.finish_reason or reason
            entries = delta.logprobs or ()
            pieces = reading.push(delta)
            found = whole(pieces)
            if found.content or found.reasoning or found.calls or (entries and reply.request.logprobs):
                first = next((piece.index for piece in pieces if piece.kind == "call"), 0)
                made = [_call(reply, index, call) for index, call in enumerate(found.calls, first)]
                piece = _piece(engine, reply, found.content, entries, found.reasoning, made)
                yield _line({**piece, "done": False, **more})
                more = {}
    yield _line({**_piece(engine, reply, "", ()), **_end(reply, reason), **more})


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(timezone.utc).isoformat()}


def _reading(reply: Reply) -> Reading:
    """Calls are sent when they are whole: Ollama's clients take no fragments."""
    return Reading(replace(reply.form, eager=False))


def _call(reply: Reply, index: int, call: Call) -> dict[str, Any]:
    name = call_id(reply.form, reply.job.request_id, 0, index)
    return {"id": name, "function": {"index": index, "name": call.name, "arguments": parsed(call.arguments)}}


def _said(asked: Any, text: str, thoughts: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    more: dict[str, Any] = {"thinking": thoughts} if thoughts and asked.think is not False else {}
    if not hasattr(asked, "messages"):
        return {"response": text, **more}
    return {"message": {"role": "assistant", "content": text, **more, **({"tool_calls": calls} if calls else {})}}


def _piece(
    engine: EnginePort,
    reply: Reply,
    text: str,
    entries: Sequence[TokenLogprobs],
    thoughts: str = "",
    calls: Sequence[Any] = (),
) -> dict[str, Any]:
    shown = chat_logprobs(engine.tokenizer, entries)["content"] if reply.request.logprobs and entries else None
    return {
        **_head(reply.model),
        **_said(reply.request, text, thoughts, calls),
        **({} if shown is None else {"logprobs": shown}),
    }


def _warnings(reply: Reply) -> dict[str, Any]:
    return {"warnings": reply.warnings} if reply.warnings else {}


def _end(reply: Reply, reason: str | None) -> dict[str, Any]:
    """That it is over, why, and what it took: prompt until the first token, the rest after it."""
    job, ended = reply.job, time.monotonic()
    first = ended if job.first_token_at is None else job.first_token_at
    usage = job.usage()
    seconds = {"total": ended - job.started, "load": 0.0, "prompt_eval": first - job.started, "eval": ended - first}
    return {
        "done": True,
        "done_reason": reason,
        **{f"{name}_duration": round(1e9 * value) for name, value in seconds.items()},
        "prompt_eval_count": usage.prompt_tokens,
        "eval_count": usage.completion_tokens,
    }
