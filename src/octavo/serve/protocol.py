"""Requests and answers of the OpenAI API as msgspec structs. Spelling of what OpenAI lacks follows vLLM.

A field that is absent from an answer is `UNSET`; `None` is written as null.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

__all__ = [
    "ChatChoice",
    "ChatRequest",
    "ChatResponse",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "GenerationRequest",
    "PromptTokensDetails",
    "StreamOptions",
    "Usage",
]


class StreamOptions(Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(Struct, kw_only=True, forbid_unknown_fields=True):
    """A loop that ends a choice: a pattern of so many tokens, so often in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3


class GenerationRequest(Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    no_repeat_ngram_size: int | None = None
    bad_words: list[str] | None = None
    logits_processors: list[str] | None = None
    speculative_verifier: str | None = None
    repetition_detection: RepetitionDetection | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/completions`. `prompt`: a string, token ids, or a list of either."""

    prompt: Any = UNSET
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class PromptTokensDetails(Struct):
    """Of the prompt tokens, those that came from the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Of the output, the tokens of thought; of tokens guessed ahead, those that were drawn and those that were not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, kw_only=True):
    """Tokens of a request; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """What the choices of both APIs have in common."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """One choice of a completion, whole or a piece of it."""

    text: str
    logprobs: dict[str, Any] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One choice of a chat completion: `message` when whole, `delta` in a stream."""

    message: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None


class Answer(Struct, kw_only=True):
    """What the answers of both APIs have in common."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[dict[str, str]] | UnsetType = UNSET


class CompletionResponse(Answer, kw_only=True):
    """A completion, or one piece of a streamed one; `choices` are `CompletionChoice`."""


class ChatResponse(Answer, kw_only=True):
    """A chat completion, or one piece of a streamed one; `choices` are `ChatChoice`."""

    prompt_token_ids: list[int] | UnsetType = UNSET
