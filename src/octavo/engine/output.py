"""From events to text: the glue between the scheduler and `decoding.OutputProcessor`.

TokenEvents of one step -> OutputDelta for each choice that they touch
                        -> a stop string found here ends the choice: core.stop, before the next plan
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.core.batch import TokenLogprobs
from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.request import FinishReason, Request
from octavo.decoding.output import OutputProcessor
from octavo.tokenizers.base import Tokenizer

__all__ = ["CANNOT_FOLLOW", "NOTHING_LEFT", "PROMPT_TAIL", "OutputDelta", "OutputRouter"]

# what an error says where the request is to blame
CANNOT_FOLLOW = "the grammar cannot be followed"
NOTHING_LEFT = "what is allowed and what is banned leave no token"
PROMPT_TAIL = 8  # prompt tokens that the detokenizer may look at
_TOKEN, _CHOICE_END = EventKind.TOKEN, EventKind.CHOICE_END


@dataclass(slots=True)  # not frozen: one is made for every choice and step, piece by piece
class OutputDelta:
    """What one step added to one choice."""

    request_id: str
    choice: int
    text: str = ""  # decided now; empty while a character or a stop string is undecided
    token_ids: tuple[int, ...] = ()  # the one that ended the choice included
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    finish_reason: str | None = None  # set once, on the choice's last delta
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    hidden: bytes = b""  # a pooled state, float32, little-endian, with the choice's end
    last: bool = False  # the request has no further delta
    first: tuple[float, ...] = field(default=(), compare=False)  # `TokenEvent.spent` of the request's first token
    spent: tuple[float, ...] = field(default=(), compare=False)  # and of its end


class Stopper(Protocol):
    """Who ends a choice in which a stop string was found: `EngineCore`, here or at the other end of a link."""

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: str | int | None) -> None:
        """End it after so many tokens. Idempotent."""


class _Reader:
    """The text side of one request: a processor for each choice."""

    __slots__ = ("cached", "counts", "num_prompt_tokens", "processors", "request", "whole")

    def __init__(self, request: Request, tokenizer: Tokenizer, whole: bool, fold: Callable[..., Any]) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # a stop string or a loop must be looked for at every token, and prompt logprobs come with the first one
        self.whole = whole and not request.params.watches_output and request.params.prompt_logprobs is None
        tail = request.prompt_token_ids[-PROMPT_TAIL:]
        self.processors = [
            fold(tokenizer, request.params, prompt_tail_ids=tail, eos_ids=request.eos_token_ids)
            for _ in request.branches
        ]
        self.counts = [0] * len(self.processors)
        self.cached = 0
        for branch, processor in zip(request.branches, self.processors, strict=True):
            delivered = branch.output_token_ids[: branch.num_delivered_tokens]  # of a restored request
            processor.replay(delivered)
            self.counts[branch.choice] = len(delivered)


_Deltas = dict[tuple[str, int], OutputDelta]


class OutputRouter:
    """Turns the events of each step into deltas for the requests that were opened. One for an engine.

    ``fold`` makes the `OutputProcessor` of a choice, or what stands in its place where another process has it.
    """

    def __init__(self, core: Stopper, tokenizer: Tokenizer, fold: Callable[..., Any] = OutputProcessor) -> None:
        self.core = core
        self._fold = fold
        self.tokenizer = tokenizer
        self._readers: dict[str, _Reader] = {}
        self._num_streams = 0  # readers to whom every token matters at once

    def open(self, request: Request, *, whole: bool = False) -> None:
        """Follow a request that has been submitted. ``whole``: each choice as one delta, at its end, if that can be."""
        self.close(request.request_id)
        reader = self._readers[request.request_id] = _Reader(request, self.tokenizer, whole, self._fold)
        self._num_streams += not reader.whole

    def close(self, request_id: str) -> None:
        """Stop following; its later events are dropped."""
        reader = self._readers.pop(request_id, None)
        self._num_streams -= reader is not None and not reader.whole

    def processor(self, request_id: str, choice: int) -> Any:
        """The fold of a choice that is followed; None if it is not."""
        reader = self._readers.get(request_id)
        return None if reader is None else reader.processors[choice]

    def take(self, events: Iterable[TokenEvent]) -> list[OutputDelta]:
        """The deltas of one step, by first event. A request is closed with its last one."""
        deltas: _Deltas = {}
        if isinstance(events, StepEvents):
            if self._num_streams:  # whole texts are made of the tokens that the branches keep
                self._add_drawn(events, deltas)
            events = events.others
        for event in events:
            reader = self._readers.get(event.request_id)
            if reader is None:
                continue
            if event.kind is _TOKEN:
                if not reader.whole:
                    self._add_token(reader, event, deltas)
            elif event.kind is _CHOICE_END:
                self._add_end(reader, event, deltas)
            else:
                mine = [delta for delta in deltas.values() if delta.request_id == event.request_id]
                delta = mine[-1] if mine else _delta_of(reader, event, deltas)
                delta.last, delta.spent = True, event.spent
                self.close(event.request_id)
        return list(deltas.values())

    def _add_drawn(self, events: StepEvents, deltas: _Deltas) -> None:
        """``_add_token`` for the plain decodes of a step, which nothing precedes."""
        readers = self._readers
        for branch, token in zip(events.branches, events.token_ids, strict=True):
            request_id, choice = key = branch.key
            reader = readers.get(request_id)
            if reader is None or reader.whole:
                continue
            processor = reader.processors[choice]
            text, truncate_at = processor.push_plain(token), None
            if text is None:
                if processor.finished:
                    continue
                shown = processor.push(token)
                text, truncate_at = shown.text, shown.truncate_at
            reader.counts[choice] = count = reader.counts[choice] + 1
            deltas[key] = OutputDelta(
                request_id,
                choice,
                text,
                (token,),
                num_prompt_tokens=reader.num_prompt_tokens,
                num_output_tokens=count,
                num_cached_tokens=reader.cached,
            )
            if truncate_at is not None:
                self.core.stop(request_id, choice, truncate_at, shown.stop_reason)

    def _add_token(self, reader: _Reader, event: TokenEvent, deltas: _Deltas) -> None:
        processor = reader.processors[event.choice]
        if processor.finished or event.token_id is None:
            return  # sampled beyond a stop string that was found late
        shown = processor.push(event.token_id)
        reader.counts[event.choice] += 1
        delta = _delta_of(reader, event, deltas)
        delta.text += shown.text
        delta.token_ids += shown.token_ids
        delta.first = delta.first or event.spent
        if event.logprobs is not None:
            delta.logprobs += (event.logprobs,)
        if shown.truncate_at is not None:
            self.core.stop(event.request_id, event.choice, shown.truncate_at, shown.stop_reason)

    def _add_end(self, reader: _Reader, event: TokenEvent, deltas: _Deltas) -> None:
        processor, branch = reader.processors[event.choice], reader.request.branches[event.choice]
        unseen = branch.output_token_ids[reader.counts[event.choice] :] if reader.whole else []
        logprobs = branch.logprobs[reader.counts[event.choice] :] if reader.whole else []
        reader.counts[event.choice] += len(unseen)
        delta = _delta_of(reader, event, deltas)
        delta.text += processor.push_all(unseen)
        delta.token_ids += tuple(unseen)
        delta.logprobs += tuple(logprobs)
        delta.finish_reason, delta.stop_reason, delta.error = _text(event.finish_reason), event.stop_reason, event.error
        delta.hidden = b64decode(event.hidden)
        rest = processor.finish()
        delta.text += rest.text
        if rest.truncate_at is not None and delta.finish_reason in ("stop", "length"):
            # the stop string was complete, though the choice also ended by itself
            delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, rest.stop_reason


def _delta_of(reader: _Reader, event: TokenEvent, deltas: _Deltas) -> OutputDelta:
    """The delta of the event's choice in the making, with what every event knows."""
    key = (event.request_id, event.choice)
    delta = deltas.get(key)
    if delta is None:
        delta = deltas[key] = OutputDelta(event.request_id, event.choice)
        delta.num_prompt_tokens = reader.num_prompt_tokens
    if event.num_cached_tokens > reader.cached:
        reader.cached = event.num_cached_tokens
    delta.num_cached_tokens = reader.cached
    delta.num_output_tokens = reader.counts[event.choice]
    if event.prompt_logprobs is not None:
        delta.prompt_logprobs = event.prompt_logprobs
    return delta


def _text(reason: object) -> str | None:
    return None if reason is None else str(getattr(reason, "value", reason))


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """One delta for several of the same choice, in order: what a slow reader gets."""
    last = deltas[-1]
    prompt = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
    return OutputDelta(
        request_id=last.request_id,
        choice=last.choice,
        text="".join(d.text for d in deltas),
        token_ids=tuple(token for d in deltas for token in d.token_ids),
        logprobs=tuple(entry for d in deltas for entry in d.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_output_tokens=last.num_output_tokens,
        num_cached_tokens=max(d.num_cached_tokens for d in deltas),
        prompt_logprobs=prompt,
        error=last.error,
        hidden=last.hidden,
        last=any(d.last for d in deltas),
        first=next((d.first for d in deltas if d.first), ()),
        spent=next((d.spent for d in deltas if d.spent), ()),
    )
