"""`/v1/chat/completions`: whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import UNSET

from octavo.serve.answers import Reply, extras, stream_events
from octavo.serve.forms import Reading, ended
from octavo.serve.generate import Choice
from octavo.serve.logprobs import chat_logprobs, prompt_logprobs
from octavo.serve.metrics import Metrics
from octavo.serve.port import Delta, EnginePort
from octavo.serve.protocol import Answer, ChatChoice, ChatResponse
from octavo.serve.said import delta_of, message_of, wants_functions

__all__ = ["chat_events", "chat_whole"]

_WHOLE, _CHUNK = "chat.completion", "chat.completion.chunk"


def chat_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> ChatResponse:
    """The whole answer. Costs what its logprobs cost: call it in a thread."""
    return ChatResponse(
        **reply.signature(_WHOLE),
        choices=[_whole(engine, reply, index, choice) for index, choice in enumerate(choices)],
        usage=reply.job.usage(),
        warnings=reply.warnings_field,
        prompt_token_ids=_prompt_ids(reply),
    )


def _whole(engine: EnginePort, reply: Reply, index: int, choice: Choice) -> ChatChoice:
    request = reply.request
    message, calls = message_of(reply, index, choice)
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=ended(choice.finish_reason, calls, older="function_call" in message),
        stop_reason=choice.stop_reason,
        logprobs=chat_logprobs(engine.tokenizer, choice.logprobs) if request.logprobs else None,
        **extras(request, choice.token_ids),
        **_prompt_part(engine, reply, choice.prompt_logprobs),
    )


def _prompt_part(engine: EnginePort, reply: Reply, entries: Any) -> dict[str, Any]:
    if reply.request.prompt_logprobs is None or entries is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(engine.tokenizer, entries)}


def _prompt_ids(reply: Reply) -> Any:
    return list(reply.job.prompts[0].token_ids) if reply.request.return_token_ids else UNSET


def chat_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The stream: a chunk with the role for each choice, then text, then one finish for each."""

    def begin() -> list[Answer]:
        roles = [
            ChatChoice(index=index, delta={"role": "assistant", "content": ""})
            for index in range(reply.job.num_choices)
        ]
        chunks: list[Answer] = [ChatResponse(**reply.signature(_CHUNK), choices=[role]) for role in roles]
        chunks[0].prompt_token_ids = _prompt_ids(reply)  # type: ignore[attr-defined]
        return chunks

    readings = [Reading(reply.form) for _ in range(reply.job.num_choices)]
    older = not reply.form.is_plain and wants_functions(reply)

    def piece(index: int, delta: Delta) -> Answer | None:
        choice = _piece(engine, reply, index, delta, readings[index], older)
        return None if choice is None else ChatResponse(**reply.signature(_CHUNK), choices=[choice])

    def last() -> Answer:
        return ChatResponse(**reply.signature(_CHUNK), choices=[])

    return stream_events(engine, reply, metrics, begin, piece, last)


def _piece(
    engine: EnginePort, reply: Reply, index: int, delta: Delta, reading: Reading, older: bool
) -> ChatChoice | None:
    request, added = reply.request, delta_of(reply, index, reading.push(delta), older)
    silent = not added and delta.finish_reason is None and delta.prompt_logprobs is None
    if silent and not (delta.token_ids and (request.logprobs or request.return_token_ids)):
        return None
    shown = request.logprobs and delta.token_ids
    choice = ChatChoice(
        index=index,
        delta=added,
        finish_reason=ended(delta.finish_reason, reading.has_calls, older=older),
        logprobs=chat_logprobs(engine.tokenizer, delta.logprobs or ()) if shown else None,
        **extras(request, list(delta.token_ids)),
        **_prompt_part(engine, reply, delta.prompt_logprobs),
    )
    if delta.finish_reason is not None:
        choice.stop_reason = delta.stop_reason
    return choice
