"""From events to text: the glue between the scheduler and `decoding.OutputProcessor`.

TokenEvents of one step -> OutputDelta for each choice that they touch
                        -> a stop string found here ends the choice: core.stop, before the next plan
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.batch import TokenLogprobs
from octavo.core.events import EventKind, TokenEvent
from octavo.core.request import FinishReason, Request
from octavo.decoding.output import OutputProcessor
from octavo.engine.core import EngineCore
from octavo.tokenizers.base import Tokenizer

__all__ = ["OutputDelta", "OutputRouter"]

_TAIL = 8  # prompt tokens that the detokenizer may look at


@dataclass(frozen=True)
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
    last: bool = False  # the request has no further delta


@dataclass
class _Gathered:
    """The making of one delta."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    end: TokenEvent | None = None
    last: bool = False


class _Reader:
    """The text side of one request: a processor for each choice."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        tail = request.prompt_token_ids[-_TAIL:]
        self.processors = [
            OutputProcessor(tokenizer, request.params, prompt_tail_ids=tail, eos_ids=request.eos_token_ids)
            for _ in request.branches
        ]
        self.counts = [0] * len(self.processors)
        self.cached = 0
        for branch, processor in zip(request.branches, self.processors, strict=True):
            delivered = branch.output_token_ids[: branch.num_delivered_tokens]  # of a restored request
            processor.replay(delivered)
            self.counts[branch.choice] = len(delivered)


class OutputRouter:
    """Turns the events of each step into deltas for the requests that were opened. One for an engine."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._readers: dict[str, _Reader] = {}

    def open(self, request: Request) -> None:
        """Follow a request that has been submitted."""
        self._readers[request.request_id] = _Reader(request, self.tokenizer)

    def close(self, request_id: str) -> None:
        """Stop following; its later events are dropped."""
        self._readers.pop(request_id, None)

    def take(self, events: Iterable[TokenEvent]) -> list[OutputDelta]:
        """The deltas of one step, by first event. A request is closed with its last one."""
        gathered: dict[tuple[str, int], _Gathered] = {}
        for event in events:
            reader = self._readers.get(event.request_id)
            if reader is not None:
                self._gather(reader, event, gathered)
        deltas = [self._delta(self._readers[key[0]], key[1], part) for key, part in gathered.items()]
        for delta in deltas:
            if delta.last:
                self.close(delta.request_id)
        return deltas

    def _gather(self, reader: _Reader, event: TokenEvent, gathered: dict[tuple[str, int], _Gathered]) -> None:
        if event.kind == EventKind.REQUEST_END:
            keys = [key for key in gathered if key[0] == reader.request_id]
            key = keys[-1] if keys else (reader.request_id, event.choice)
            gathered.setdefault(key, _Gathered()).last = True
            return
        part = gathered.setdefault((reader.request_id, event.choice), _Gathered())
        part.prompt_logprobs = event.prompt_logprobs or part.prompt_logprobs
        reader.cached = max(reader.cached, event.num_cached_tokens)
        if event.kind == EventKind.CHOICE_END:
            part.end = event
        else:
            self._push(reader, event, part)

    def _push(self, reader: _Reader, event: TokenEvent, part: _Gathered) -> None:
        processor = reader.processors[event.choice]
        if processor.finished or event.token_id is None:
            return  # sampled beyond a stop string that was found late
        shown = processor.push(event.token_id)
        part.text += shown.text
        part.token_ids.append(event.token_id)
        reader.counts[event.choice] += 1
        if event.logprobs is not None:
            part.logprobs.append(event.logprobs)
        if shown.truncate_at is not None:
            self.core.stop(reader.request_id, event.choice, shown.truncate_at, shown.stop_reason)

    def _delta(self, reader: _Reader, choice: int, part: _Gathered) -> OutputDelta:
        finish_reason, stop_reason, error, text = None, None, None, part.text
        if part.end is not None:
            finish_reason, error = _text(part.end.finish_reason), part.end.error
            stop_reason = part.end.stop_reason
            rest = reader.processors[choice].finish()
            text += rest.text
            if rest.truncate_at is not None and finish_reason in ("stop", "length"):
                # the stop string was complete, though the choice also ended by itself
                finish_reason, stop_reason = FinishReason.STOP.value, rest.stop_reason
        return OutputDelta(
            request_id=reader.request_id,
            choice=choice,
            text=text,
            token_ids=tuple(part.token_ids),
            logprobs=tuple(part.logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=reader.num_prompt_tokens,
            num_output_tokens=reader.counts[choice],
            num_cached_tokens=reader.cached,
            prompt_logprobs=part.prompt_logprobs,
            error=error,
            last=part.last,
        )


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
        last=any(d.last for d in deltas),
    )
