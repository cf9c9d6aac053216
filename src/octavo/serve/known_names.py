"""Tables of names: of what other engines call ours, of what is known and refused, of what changes no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "GENERATION",
    "LABEL",
    "NEVER_CUT",
    "NO_SAMPLER",
    "NO_TEMPLATE",
    "NO_THINKING",
    "NO_TOOLS",
    "ONE_MODEL",
    "ORDER",
    "TEXT_ONLY",
    "Names",
    "is_empty",
    "off",
    "one_of",
]  # fmt: skip

Refused = tuple[Callable[[Any], bool], str]  # (values that ask for nothing, why it is refused and what to do)


_IN_TURNS = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "refusal")


@dataclass(frozen=True)
class Names:
    """What becomes of names that are no field of a request."""

    aliases: Mapping[str, str] = field(default_factory=dict)  # theirs -> a field
    refused: Mapping[str, Refused] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)  # changes no answer -> why
    in_turns: tuple[str, ...] = _IN_TURNS  # names that a turn has
    in_parts: tuple[str, ...] = ("type", "text")  # and a part of its content


def is_empty(value: Any) -> bool:
    """null, false, nothing: asking for an unsupported thing to be off is no request for it."""
    return value is None or value is False or value == [] or value == {} or value == ""


def one_of(*values: Any) -> Callable[[Any], bool]:
    """A test for these values, besides empty ones."""
    return lambda value: is_empty(value) or any(type(value) is type(known) and value == known for known in values)


def off(*values: float) -> Callable[[Any], bool]:
    """A test for these numbers, besides empty values."""
    return lambda value: is_empty(value) or (isinstance(value, int | float) and value in values)


NO_TOOLS = "tools are called in conversations alone; use /v1/chat/completions"
TEXT_ONLY = "this model reads and writes text only; leave it out"
NO_THINKING = "this model has no reasoning to control; leave it out"
_NO_TURNS = "only in a conversation are thoughts kept apart, and controlled; use /v1/chat/completions"
NEVER_CUT = "a prompt is never cut; shorten it before sending"
LABEL = "it is a label that this server does not use"
NO_TEMPLATE = "a template comes from the model alone; leave it out, or send the rendered prompt to /v1/completions"
NO_SAMPLER = "this way of sampling is not supported; use top_p, min_p, typical_p, mirostat or dynatemp_range"
_NO_THOUGHTS = "only in a conversation is reasoning kept apart from the answer"
_NO_STATES = "states inside the model are not given out; leave it out"
_NO_CODE = "a request brings no code; leave it out"
ONE_MODEL = "an adapter is asked for by its name as the model; leave this out"
_PLACED = "one engine serves all, and there is nothing to place or to transfer"
_CACHED = "prefixes are cached and found again by themselves"

ORDER = [
    "penalties",
    "dry",
    "temperature",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
]  # llama.cpp's names

GENERATION = Names(
    aliases={
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "n_predict": "max_tokens",
        "num_predict": "max_tokens",
        "n_cmpl": "n",
        "no_stop_trim": "include_stop_str_in_output",
        "repeat_penalty": "repetition_penalty",
        "return_tokens": "return_token_ids",
        "rid": "request_id",
        "typ_p": "typical_p",
        "token_ids_logprob": "logprob_token_ids",
    },
    refused={
        "tools": (is_empty, NO_TOOLS),
        "tool_choice": (one_of("none", "auto"), NO_TOOLS),
        "functions": (is_empty, NO_TOOLS),
        "function_call": (one_of("none", "auto"), NO_TOOLS),
        "parallel_tool_calls": (one_of(True), NO_TOOLS),
        "audio": (is_empty, TEXT_ONLY),
        "modalities": (one_of(["text"]), TEXT_ONLY),
        "suffix": (is_empty, "filling a gap is not supported; leave it out"),
        "stop_regex": (is_empty, "stopping by a pattern is not supported; use stop with strings"),
        "prediction": (is_empty, "predicted outputs are not supported; leave it out"),
        "web_search_options": (is_empty, "this server does not search the web; leave it out"),
        "prompt_embeds": (is_empty, "embeddings as a prompt are not supported; send text or token ids"),
        "input_embeds": (is_empty, "embeddings as a prompt are not supported; send text or token ids"),
        "truncate_prompt_tokens": (is_empty, NEVER_CUT),
        "truncation_side": (is_empty, NEVER_CUT),
        "n_keep": (off(0), NEVER_CUT),
        "chat_template": (is_empty, NO_TEMPLATE),
        "documents": (is_empty, NO_TEMPLATE),
        "reasoning_effort": (one_of("none"), _NO_TURNS),
        "thinking_token_budget": (is_empty, _NO_TURNS),
        "thinking": (one_of({"type": "disabled"}), _NO_TURNS),
        "store": (is_empty, "answers are stored on /v1/responses alone; leave it out here"),
        "top_p_min": (off(0), NO_SAMPLER),
        "min_keep": (off(0, 1), NO_SAMPLER),
        "samplers": (one_of(ORDER), f"samplers act in one order alone: {ORDER}; give this one, or leave it out"),
        "watermark": (is_empty, "text is not marked; leave it out"),
        "custom_logit_processor": (is_empty, _NO_CODE),
        "custom_params": (is_empty, _NO_CODE),
        "vllm_xargs": (is_empty, _NO_CODE),
        "lora_path": (is_empty, ONE_MODEL),
        "lora_request": (is_empty, ONE_MODEL),
        "lora": (is_empty, ONE_MODEL),
        "adapter_id": (is_empty, ONE_MODEL),
        "return_hidden_states": (is_empty, _NO_STATES),
        "return_routed_experts": (is_empty, _NO_STATES),
        "mm_processor_kwargs": (is_empty, TEXT_ONLY),
        "media_io_kwargs": (is_empty, TEXT_ONLY),
        "return_tokens_as_token_ids": (is_empty, "tokens are shown as text; use return_token_ids for their ids"),
    },
    idle={
        **dict.fromkeys(("user", "metadata", "service_tier", "safety_identifier", "verbosity"), LABEL),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "n_cache_reuse"), _CACHED),
        **dict.fromkeys(("session_id", "id_slot", "kv_cache_hints", "extra_key"), _CACHED),
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "disaggregated_params"), _PLACED),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank"), _PLACED),
        **dict.fromkeys(("include_reasoning", "separate_reasoning"), _NO_THOUGHTS),
        "spaces_between_special_tokens": "the tokenizer alone decides about spaces",
    },
)
