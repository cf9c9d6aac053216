"""What the scheduler tells the outside: tokens, the end of each choice, the end of each request.

TOKEN* CHOICE_END   for every choice (choices interleave), then one REQUEST_END, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.batch import TokenLogprobs
from octavo.core.lazy import LazyRows
from octavo.core.request import Branch


class EventKind(str, Enum):
    """The three kinds of event."""

    TOKEN = "token"
    CHOICE_END = "choice_end"
    REQUEST_END = "request_end"


@dataclass(slots=True)  # not frozen: one is made for every token
class TokenEvent:
    """One event of one request.

    TOKEN: ``index`` (from 0, contiguous for each choice), ``token_id``, ``logprobs`` if asked for. The end-of-sequence
    or stop token that ends a choice is a TOKEN event too: it counts as usage and is not text.
    CHOICE_END: ``finish_reason``, ``stop_reason`` (the stop token's id or the stop string; None for end-of-sequence),
    ``num_output_tokens`` as finally counted, ``error`` if the choice failed, ``hidden``, a pooled state, if asked for.
    REQUEST_END: ``num_output_tokens`` of all choices together; its ``finish_reason`` is that of choice 0.
    ``prompt_logprobs`` comes once for each choice, with its first event: one entry a prompt token, None for the first.
    ``spent`` is what the engine measured, in seconds: with a request's first token those that it waited, those of
    prefill and those of drawing; with its REQUEST_END those from first to last token, and its core-seconds, then, with
    speculation, its drafts and those of them that were drawn.
    """

    request_id: str
    kind: EventKind
    choice: int = 0
    index: int = -1
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    hidden: str = ""  # base64 of float32, little-endian
    spent: tuple[float, ...] = field(default=(), compare=False)  # by a clock: no part of what is the same again


@dataclass(slots=True, eq=False)
class StepEvents(LazyRows[TokenEvent]):
    """The events of a step: TOKEN events of plain decodes as columns, then the others.

    ``branches``, ``indices`` and ``token_ids`` are of equal length; no event of theirs is a choice's first.
    """

    branches: Sequence[Branch]
    indices: Sequence[int]
    token_ids: Sequence[int]
    others: Sequence[TokenEvent]

    def __len__(self) -> int:
        return len(self.branches) + len(self.others)

    def _row(self, index: int) -> TokenEvent:
        if index >= len(self.branches):
            return self.others[index - len(self.branches)]
        branch = self.branches[index]
        return TokenEvent(
            request_id=branch.key[0],
            kind=EventKind.TOKEN,
            choice=branch.choice,
            index=self.indices[index],
            token_id=self.token_ids[index],
            num_prompt_tokens=branch.num_prompt_tokens,
            num_output_tokens=self.indices[index] + 1,
            num_cached_tokens=branch.num_cached_tokens,
        )


class EventLog:
    """Events on their way out, oldest first."""

    def __init__(self) -> None:
        self._drawn: StepEvents | None = None  # before all of `_listed`
        self._listed: list[TokenEvent] = []

    def append(self, event: TokenEvent) -> None:
        """Add one event."""
        self._listed.append(event)

    def append_drawn(self, branches: Sequence[Branch], indices: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add a token of each branch; as columns unless something is there already, which must come before them."""
        drawn = StepEvents(branches, indices, token_ids, ())
        if self._drawn is None and not self._listed:
            self._drawn = drawn
        else:
            self.pending.extend(drawn)

    @property
    def pending(self) -> list[TokenEvent]:
        """All events, singly."""
        if self._drawn is not None:
            self._listed[:0] = self._drawn
            self._drawn = None
        return self._listed

    def take(self) -> Sequence[TokenEvent]:
        """All events; none is left."""
        drawn, listed = self._drawn, self._listed
        self._drawn, self._listed = None, []
        if drawn is None:
            return listed
        drawn.others = listed
        return drawn
