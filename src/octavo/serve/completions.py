"""`/v1/completions`: whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.serve.answers import Reply, extras, stream_events
from octavo.serve.generate import Choice
from octavo.serve.logprobs import TextPlaces, completion_logprobs, prompt_logprobs
from octavo.serve.metrics import Metrics
from octavo.serve.port import Delta, EnginePort
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import Answer, CompletionChoice, CompletionResponse

__all__ = ["completion_events", "completion_whole"]

_KIND = "text_completion"


def completion_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> CompletionResponse:
    """The whole answer. Costs what its logprobs cost: call it in a thread."""
    return CompletionResponse(
        **reply.signature(_KIND),
        choices=[_whole(engine, reply, index, choice) for index, choice in enumerate(choices)],
        usage=reply.job.usage(),
        warnings=reply.warnings_field,
    )


def _whole(engine: EnginePort, reply: Reply, index: int, choice: Choice) -> CompletionChoice:
    request, prompt = reply.request, _prompt_of(reply, index)
    writer = _ChoiceWriter(engine, reply, prompt)
    body = writer.logprobs(choice.token_ids, choice.logprobs, choice.prompt_logprobs)
    return CompletionChoice(
        index=index,
        text=(prompt.text if request.echo else "") + "".join(choice.text),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=body,
        **extras(request, choice.token_ids),
        **writer.prompt_part(choice.prompt_logprobs),
        **writer.prompt_ids(),
    )


def _prompt_of(reply: Reply, index: int) -> Prompt:
    prompt: Prompt = reply.job.prompts[index // reply.job.params.n]
    return prompt


class _ChoiceWriter:
    """Writes the pieces of one choice."""

    def __init__(self, engine: EnginePort, reply: Reply, prompt: Prompt) -> None:
        self._tokenizer = engine.tokenizer
        self._request = reply.request
        self._prompt = prompt
        self._places = TextPlaces(engine.tokenizer, reply.job.params, prompt, shown=bool(reply.request.echo))
        self.begun = False

    def logprobs(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs],
        of_prompt: Sequence[TokenLogprobs | None] | None,
    ) -> dict[str, Any] | None:
        """The logprobs object of a piece, or None if not asked for. Echo puts those of the prompt in front."""
        if self._request.logprobs is None:
            return None
        tokens: list[int] = list(token_ids)
        values: list[TokenLogprobs | None] = list(entries)
        places = self._places.of_output(tokens)
        if self._request.echo and of_prompt is not None:
            places = [*self._places.of_prompt(), *places]
            tokens, values = [*self._prompt.token_ids, *tokens], [*of_prompt, *values]
        return completion_logprobs(self._tokenizer, tokens, values, places) if tokens else None

    def prompt_part(self, entries: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
        """The prompt's logprobs, where they were asked for by name."""
        if self._request.prompt_logprobs is None or entries is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, entries)}

    def prompt_ids(self) -> dict[str, Any]:
        """The prompt's ids, where token ids were asked for."""
        return {"prompt_token_ids": list(self._prompt.token_ids)} if self._request.return_token_ids else {}

    def piece(self, index: int, delta: Delta) -> CompletionChoice | None:
        """One chunk, or None where a delta has nothing to show yet."""
        request, first = self._request, not self.begun
        text = (self._prompt.text if request.echo and first else "") + delta.text
        silent = not text and delta.finish_reason is None and delta.prompt_logprobs is None
        if silent and not (delta.token_ids and (request.logprobs is not None or request.return_token_ids)):
            return None
        self.begun = True
        choice = CompletionChoice(
            index=index,
            text=text,
            finish_reason=delta.finish_reason,
            logprobs=self.logprobs(delta.token_ids, delta.logprobs or (), delta.prompt_logprobs),
            **extras(request, list(delta.token_ids)),
            **self.prompt_part(delta.prompt_logprobs),
            **(self.prompt_ids() if first else {}),
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        return choice


def completion_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The stream: text of each choice (after its prompt, with echo), then one finish for each."""
    writers = [_ChoiceWriter(engine, reply, _prompt_of(reply, index)) for index in range(reply.job.num_choices)]

    def begin() -> list[Answer]:
        return []

    def piece(index: int, delta: Delta) -> Answer | None:
        choice = writers[index].piece(index, delta)
        return None if choice is None else CompletionResponse(**reply.signature(_KIND), choices=[choice])

    def last() -> Answer:
        return CompletionResponse(**reply.signature(_KIND), choices=[])

    return stream_events(engine, reply, metrics, begin, piece, last)
