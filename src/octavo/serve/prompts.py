"""From what a client sent as prompt to token ids. Everything here that grows with the text runs in a worker thread."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from octavo.core.errors import InvalidInput
from octavo.core.params import MAX_STOP_IDS, MAX_STOP_STRINGS, SamplingParams
from octavo.serve.config import ServeConfig
from octavo.serve.effort import effort_of, thinking_variables
from octavo.serve.errors import ApiError, from_invalid_input, invalid, safe_name
from octavo.serve.port import TextModel
from octavo.serve.protocol import ChatRequest, CompletionRequest
from octavo.serve.turns import ROLES, checked_messages, needs_tools, num_chars, text_of, with_tools
from octavo.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from octavo.serve.text_work import EncodeText, RenderChat

__all__ = [
    "ROLES", "VARIABLE", "Prompt", "check_inputs", "checked_messages", "count_prompts", "decode_ids",
    "encode_chat_prompt", "encode_prompts", "ending_at_turns", "fit_context", "longest_prompt",
    "render_chat_prompt", "text_of", "token_strings",
]  # fmt: skip

_TEMPLATE_FIELDS = ("messages", "tools", "continue_final_message", "add_generation_prompt", "chat_template_kwargs")
_TAKEN = ("chat_template", "documents", "runner", "tokenizer", *_TEMPLATE_FIELDS)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CONTEXT_CHARS = 8  # a prompt longer than this many characters a context token is refused before tokenizing


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and its text where `echo` needs it."""

    token_ids: tuple[int, ...]
    text: str = ""


def count_prompts(request: CompletionRequest, config: ServeConfig) -> int:
    """How many prompts a completion has. Raises ``ApiError`` 400."""
    return len(_split(request.prompt, config.max_prompts))


def check_inputs(prompt: Any, config: ServeConfig) -> int:
    """How many texts are to become vectors. Raises ``ApiError`` 400."""
    return len(_split(prompt, config.max_inputs))


def encode_prompts(request: CompletionRequest | EncodeText, engine: TextModel, config: ServeConfig) -> list[Prompt]:
    """The prompts of a completion. Raises ``ApiError`` 400."""
    items = _split(request.prompt, max(config.max_prompts, config.max_inputs))  # they have been counted
    special = request.add_special_tokens is not False
    return [_encode(item, engine, config, special=special, echo=bool(request.echo)) for item in items]


def encode_chat_prompt(request: ChatRequest | RenderChat, engine: TextModel, config: ServeConfig) -> list[Prompt]:
    """The one prompt of a conversation, through the model's template. Raises ``ApiError`` 400."""
    from octavo.tokenizers.chat import encode_chat

    return [Prompt(tuple(_through_template(encode_chat, request, engine, config)))]


def render_chat_prompt(request: ChatRequest | RenderChat, engine: TextModel, config: ServeConfig) -> str:
    """The text of a conversation's prompt. Raises ``ApiError`` 400."""
    from octavo.tokenizers.chat import render_chat

    return str(_through_template(render_chat, request, engine, config))


def _through_template(function: Any, request: ChatRequest | RenderChat, engine: TextModel, config: ServeConfig) -> Any:
    messages = checked_messages(request.messages)
    _check_chars("messages", sum(map(num_chars, messages)), engine, config)
    tools = getattr(request, "tools", None) or []
    _check_chars("tools", len(json.dumps(tools)), engine, config)
    goes_on = bool(request.continue_final_message)
    opened = request.add_generation_prompt
    options = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on if opened is None else opened}
    try:
        if tools or any(map(needs_tools, messages)):
            messages, options = with_tools(engine.tokenizer, config, messages, tools, options)
        return function(engine.tokenizer, messages, **options, **_variables(request, engine.tokenizer, bool(tools)))
    except InvalidInput as error:
        param = re.split(r"[.\[]", error.field)[0]
        param = param if param in _TEMPLATE_FIELDS else "messages"
        raise ApiError(400, f"{param}: {error.remedy}", param=param) from error


def _variables(request: ChatRequest | RenderChat, tokenizer: Tokenizer, tools: bool) -> dict[str, Any]:
    """Names for the template, those of the client's own first; of those that `render_chat` takes itself, none."""
    from octavo.tokenizers.chat import template_of

    given = request.chat_template_kwargs or {}
    wrong = next((name for name in given if not VARIABLE.fullmatch(name) or name in _TAKEN), None)
    if wrong is not None:
        raise invalid("chat_template_kwargs", f"{safe_name(wrong)} is no variable that a request may set")
    return {**thinking_variables(effort_of(request), template_of(tokenizer, tools=tools).source), **given}


def ending_at_turns(params: SamplingParams, engine: TextModel) -> SamplingParams:
    """For a conversation: where the model has no template of its own, the mark of the next turn ends an answer too."""
    from octavo.tokenizers.chat import FALLBACK_STOPS, template_of

    tokenizer = engine.tokenizer
    marks = FALLBACK_STOPS.get(template_of(tokenizer).name, ())
    ids = tuple(tokenizer.special_tokens[mark] for mark in marks if mark in tokenizer.special_tokens)
    texts = tuple(mark for mark in marks if mark not in tokenizer.special_tokens)
    stop = (*params.stop, *texts)[:MAX_STOP_STRINGS]  # what the client gave comes first
    return replace(params, stop=stop, stop_token_ids=(*params.stop_token_ids, *ids)[:MAX_STOP_IDS]) if marks else params


def decode_ids(ids: list[Any], engine: TextModel, param: str = "prompt") -> str:
    """Text of ids, special tokens included. Raises ``ApiError`` 400."""
    return engine.tokenizer.decode(_checked_ids(ids, engine.vocab_size, param), skip_special_tokens=False)


def token_strings(ids: Sequence[int], engine: TextModel) -> list[str]:
    """Each token as the vocabulary spells it."""
    return [engine.tokenizer.id_to_token(token) or "" for token in ids]


def fit_context(prompts: Sequence[Prompt], params: SamplingParams, engine: TextModel, param: str) -> None:
    """Refuse what cannot fit the context: a prompt is never cut, nor an output in silence."""
    limit, wanted = engine.max_seq_len, params.max_tokens
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise invalid(param, "is empty; give at least one token")
        if length + (1 if wanted is None else wanted) <= limit:
            continue
        if length < limit:
            message = (
                f"asks for {wanted} after a prompt of {length}, but the context holds {limit} tokens; ask for fewer"
            )
            raise invalid("max_tokens", message, code="context_length_exceeded")
        message = f"has {length} tokens, but the context holds {limit} with the output; shorten it"
        raise invalid(param, message, code="context_length_exceeded")


def _split(prompt: Any, most: int) -> list[str | list[int]]:
    """A prompt field as a list of texts and id lists."""
    if prompt is UNSET or prompt is None:
        raise invalid("prompt", "is missing; give a string, token ids, or a list of either")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "must be a string, token ids, or a list of either, not empty")
    items: list[Any] = [prompt] if _is_int(prompt[0]) else prompt
    if len(items) > most:
        raise invalid("prompt", f"has {len(items)} prompts; at most {most} are allowed in one request")
    return items


def _encode(item: Any, engine: TextModel, config: ServeConfig, *, special: bool, echo: bool) -> Prompt:
    tokenizer = engine.tokenizer
    if isinstance(item, str):
        _check_chars("prompt", len(item), engine, config)
        return Prompt(_encode_text(tokenizer, item, special), item)
    ids = _checked_ids(item, engine.vocab_size)
    return Prompt(ids, tokenizer.decode(ids, skip_special_tokens=False) if echo else "")


def _encode_text(tokenizer: Tokenizer, text: str, special: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=special))
    except InvalidInput as error:
        raise from_invalid_input(InvalidInput("prompt", None, error.remedy)) from error


def _checked_ids(item: Any, vocab_size: int, param: str = "prompt") -> tuple[int, ...]:
    if not isinstance(item, list) or not all(_is_int(value) for value in item):
        raise invalid(param, "must be a string, token ids, or a list of either")
    wrong = next((value for value in item if not 0 <= value < vocab_size), None)
    if wrong is not None:
        raise invalid(param, f"{wrong} is no token id; ids are 0 to {vocab_size - 1}")
    return tuple(item)


def _is_int(value: Any) -> bool:
    return type(value) is int


def longest_prompt(engine: TextModel, config: ServeConfig) -> int:
    """Characters that a prompt may have before it is tokenized."""
    return min(config.max_prompt_chars, _CONTEXT_CHARS * engine.max_seq_len)


def _check_chars(param: str, count: int, engine: TextModel, config: ServeConfig) -> None:
    limit = longest_prompt(engine, config)
    if count > limit:
        message = f"has {count} characters; at most {limit} can fit the context; shorten it"
        raise invalid(param, message, code="context_length_exceeded")
