"""From a request body to `SamplingParams`, with every limit checked before anything is queued."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.decoding.words import with_token_ids
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError, from_invalid_input, invalid
from octavo.serve.grammars import grammar_of
from octavo.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from octavo.tokenizers.base import Tokenizer

__all__ = ["BIAS_KEY", "LONGEST_DEADLINE", "MOST_PRIORITY", "sampling_params", "top_logprobs"]

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chat goes up to the context
LONGEST_DEADLINE = 86_400e3  # ms
MOST_PRIORITY = 1 << 31
_PLAIN = (
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "repeat_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "no_repeat_ngram_size",
    "bad_words",
    "logits_processors",
    "speculative_verifier",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_ID_LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logprob_token_ids")
BIAS_KEY = re.compile(r"0|[1-9][0-9]{0,11}")  # one spelling for each id


def sampling_params(
    request: CompletionRequest | ChatRequest, config: ServeConfig, vocab_size: int, tokenizer: Tokenizer
) -> SamplingParams:
    """The engine's parameters. Raises ``ApiError`` 400 naming field, value and remedy."""
    _check_counts(request, config)
    values: dict[str, Any] = {name: getattr(request, name) for name in _PLAIN}
    values = {name: value for name, value in values.items() if value is not None}
    values["max_tokens"] = _max_tokens(request)
    values["stop"] = _stop_strings(request, config)
    values["logprobs"] = top_logprobs(request, config)
    values["prompt_logprobs"] = _prompt_logprobs(request, config)
    if request.repetition_detection is not None:
        values["repetition_detection"] = msgspec.structs.asdict(request.repetition_detection)
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias, config, vocab_size)
    values["grammar"] = grammar_of(request)
    for name in _ID_LISTS:
        ids = getattr(request, name)
        if ids is not None:
            values[name] = _token_ids(name, ids, vocab_size)
    try:
        return with_token_ids(SamplingParams(**values), tokenizer)
    except InvalidInput as error:
        raise from_invalid_input(error) from error


def top_logprobs(request: CompletionRequest | ChatRequest, config: ServeConfig) -> int | None:
    """How many alternatives to report beside each token; None for no logprobs at all."""
    if isinstance(request, CompletionRequest):
        return None if request.logprobs is None else _alternatives("logprobs", request.logprobs, config)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return _alternatives("top_logprobs", request.top_logprobs or 0, config) if request.logprobs else None


def _alternatives(name: str, value: int, config: ServeConfig) -> int:
    if not 0 <= value <= config.max_top_logprobs:
        raise invalid(name, f"must be from 0 to {config.max_top_logprobs}, not {value}")
    return value


def _prompt_logprobs(request: CompletionRequest | ChatRequest, config: ServeConfig) -> int | None:
    if request.prompt_logprobs is not None:
        return _alternatives("prompt_logprobs", request.prompt_logprobs, config)
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        if request.use_beam_search:
            raise invalid("echo", "beams have no logprobs of the prompt; leave out echo, logprobs or use_beam_search")
        return request.logprobs
    return None


def _check_counts(request: GenerationRequest, config: ServeConfig) -> None:
    if request.n is not None and not 1 <= request.n <= config.max_choices:
        raise invalid("n", f"must be from 1 to {config.max_choices}, not {request.n}")
    if request.best_of is not None:
        _check_best_of(request, request.best_of, config)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "has a meaning only with stream; set stream to true or leave it out")
    if request.deadline_ms is not None and not 1 <= request.deadline_ms <= LONGEST_DEADLINE:
        raise invalid("deadline_ms", f"must be from 1 to {LONGEST_DEADLINE:.0f} milliseconds from now")
    if request.priority is not None and not -MOST_PRIORITY <= request.priority < MOST_PRIORITY:
        raise invalid("priority", f"must be from {-MOST_PRIORITY} to {MOST_PRIORITY - 1}")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 128:
        raise invalid("cache_salt", "must have 1 to 128 characters")


def _check_best_of(request: GenerationRequest, best_of: int, config: ServeConfig) -> None:
    least = request.n or 1
    if not least <= best_of <= config.max_choices:
        raise invalid("best_of", f"must be from n = {least} to {config.max_choices}, not {best_of}")
    if request.stream and best_of > least and not request.use_beam_search:
        raise invalid("best_of", "ranks whole texts, which cannot be streamed; leave it out, or set stream to false")


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "is the older name of max_completion_tokens; send one of them")
    return old if new is None else new


def _stop_strings(request: GenerationRequest, config: ServeConfig) -> tuple[str, ...]:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > config.max_stop_strings:
        raise invalid("stop", f"has {len(stop)} strings; at most {config.max_stop_strings} are allowed")
    if not all(1 <= len(text) <= config.max_stop_chars for text in stop):
        raise invalid("stop", f"each string must have 1 to {config.max_stop_chars} characters")
    return tuple(stop)


def _logit_bias(bias: dict[str, float], config: ServeConfig, vocab_size: int) -> dict[int, float]:
    if len(bias) > config.max_logit_bias:
        raise invalid("logit_bias", f"has {len(bias)} entries; at most {config.max_logit_bias} are allowed")
    if not all(map(BIAS_KEY.fullmatch, bias)):
        raise invalid("logit_bias", "each key must be a token id written in digits")
    _token_ids("logit_bias", [int(key) for key in bias], vocab_size)
    return {int(key): value for key, value in bias.items()}


def _token_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ApiError(400, f"{name}: {wrong} is no token id; ids are 0 to {vocab_size - 1}.", param=name)
    return tuple(ids)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise ``ApiError`` 400 for labels that are too many or too long."""
    pairs = (metadata or {}).items()
    if len(pairs) > 16 or any(len(name) > 64 or len(value) > 512 for name, value in pairs):
        raise invalid("metadata", "at most 16 names of 64 characters, with values of 512")
