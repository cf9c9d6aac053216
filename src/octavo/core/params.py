"""Sampling parameters, validated: finite, in range, named in the error. Spelling follows vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen and when they end.

    Raises ``InvalidInput`` (a ``ValueError``) at construction for a value out of range.
    """

    max_tokens: int | None = 16  # None: up to the context limit
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    n: int = 1  # choices
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
