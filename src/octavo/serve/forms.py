"""What an answer is made of, besides text: decided before it begins, and read from its text as it comes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.decoding.answer import AnswerForm, AnswerReader
from octavo.decoding.pieces import Piece, Whole, whole
from octavo.decoding.reasoning import ReasoningFormat, format_named, format_of
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError, from_invalid_input
from octavo.serve.port import Delta, TextModel
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import ChatRequest
from octavo.serve.tools import tools_asked
from octavo.serve.turns import tool_dialect
from octavo.tokenizers.base import Tokenizer
from octavo.tokenizers.chat import template_of

__all__ = ["PLAIN", "Reading", "answer_form", "call_id", "check_answer", "ended", "parsed"]
__all__ += ["read_whole", "reading_marks", "reasoning_format"]

PLAIN = AnswerForm()
_TAIL = 32  # tokens of a prompt that are looked at for a mark
_NOT_FORCED = "a call cannot be forced yet; use auto, and say in the prompt that a tool is to be called"


def reasoning_format(tokenizer: Tokenizer, config: ServeConfig) -> ReasoningFormat | None:
    """How the model marks what it thinks: as the operator says, or its template."""
    if config.reasoning_parser == "auto":
        return format_of(template_of(tokenizer).source)
    return None if config.reasoning_parser == "none" else format_named(config.reasoning_parser)


def check_answer(body: ChatRequest, model: TextModel, config: ServeConfig) -> None:
    """Refuse what cannot be asked of an answer. Raises ``ApiError`` 400."""
    asked = tools_asked(body)
    if asked is not None and asked.must:
        name = "function_call" if asked.older else "tool_choice"
        raise ApiError(400, f"{name}: {_NOT_FORCED}.", param=name, code="unsupported_parameter")
    try:
        if asked is not None:
            tool_dialect(model.tokenizer, config)
    except InvalidInput as error:
        raise from_invalid_input(error) from error


def answer_form(body: Any, prompts: Sequence[Prompt], model: TextModel, config: ServeConfig) -> AnswerForm:
    """What to look for in the answers to a body. Raises ``ApiError`` 400."""
    if not isinstance(body, ChatRequest):
        return PLAIN
    asked, marks = tools_asked(body), reasoning_format(model.tokenizer, config)
    if body.separate_reasoning is False:
        marks = None
    opened = marks is not None and marks.is_open(_end_of(prompts[0], model.tokenizer))
    if asked is None:
        return AnswerForm(marks, opened)
    names = tuple(tool.name for tool in asked.callable)
    most = None if asked.parallel else 1
    return AnswerForm(marks, opened, tool_dialect(model.tokenizer, config), names, False, most)


def _end_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids[-_TAIL:], skip_special_tokens=False)


def reading_marks(params: SamplingParams, form: AnswerForm, tokenizer: Tokenizer) -> SamplingParams:
    """Marks that are special tokens must not be left out of the text that is looked through for them."""
    marks = [] if form.reasoning is None else [form.reasoning.opens, form.reasoning.closes]
    marks += [] if form.tools is None else form.tools.marks
    if not any(mark in tokenizer.special_tokens for mark in marks):
        return params
    return replace(params, skip_special_tokens=False)


class Reading:
    """The pieces of one choice, as its deltas come."""

    def __init__(self, form: AnswerForm) -> None:
        self._reader = AnswerReader(form)

    def push(self, delta: Delta) -> list[Piece]:
        """What one delta decides."""
        pieces = self._reader.push(delta.text) if delta.text else []
        return pieces if delta.finish_reason is None else pieces + self._reader.finish()

    @property
    def has_calls(self) -> bool:
        """Whether a call has come."""
        return self._reader.num_calls > 0


def read_whole(form: AnswerForm, texts: Iterable[str]) -> Whole:
    """A whole answer, the same as its pieces put together."""
    reader = AnswerReader(form)
    return whole([*reader.push("".join(texts)), *reader.finish()])


def ended(reason: str | None, has_calls: bool, *, older: bool = False) -> str | None:
    """The finish reason of an answer: a stop behind a call is for the call."""
    if reason != "stop" or not has_calls:
        return reason
    return "function_call" if older else "tool_calls"


def parsed(arguments: str) -> Any:
    """Arguments as an object; what a cut answer has of them, which is none, as nothing."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def call_id(form: AnswerForm, request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same whenever it is asked for, and no other's."""
    size = 24 if form.tools is None else form.tools.id_length
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode()).hexdigest()[:size]
    return digest if size < 24 else f"call_{digest}"
