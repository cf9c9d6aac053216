"""What the scheduler tells the outside: tokens, the end of each choice, the end of each request.

TOKEN* CHOICE_END   for every choice (choices interleave), then one REQUEST_END, and nothing after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from octavo.core.batch import TokenLogprobs


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
    ``num_output_tokens`` as finally counted, ``error`` if the choice failed.
    REQUEST_END: ``num_output_tokens`` of all choices together; its ``finish_reason`` is that of choice 0.
    ``prompt_logprobs`` comes once for each choice, with its first event: one entry a prompt token, None for the first.
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
