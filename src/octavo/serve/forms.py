"""What an answer is made of, besides text: decided before it begins, and read from its text as it comes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.answer import AnswerForm, AnswerReader
from octavo.decoding.answer_grammar import answer_grammar
from octavo.decoding.grammar.definition import definition
from octavo.decoding.pieces import Piece, Whole, whole
from octavo.decoding.reasoning import ReasoningFormat, format_named, format_of
from octavo.decoding.reasoning.counter import ThoughtCounter
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError, from_invalid_input, invalid
from octavo.serve.known_names import NO_THINKING
from octavo.serve.names import Warnings, note
from octavo.serve.port import Delta, TextModel
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import ChatRequest
from octavo.serve.tools import ToolsAsked, tools_asked
from octavo.serve.turns import tool_dialect
from octavo.tokenizers.base import Tokenizer
from octavo.tokenizers.chat import template_of

__all__ = ["PLAIN", "Reading", "answer_of", "call_id", "check_answer", "counter_of", "ended", "note_strict"]
__all__ += ["parsed", "read_whole", "reasoning_format"]

PLAIN = AnswerForm()
_TAIL = 32  # tokens of a prompt that are looked at for a mark
_MAX_BUDGET = 1 << 20
Check = Callable[[Grammar, str], Awaitable[None]]  # raises `ApiError` that blames the name of what cannot be used


def reasoning_format(tokenizer: Tokenizer, config: ServeConfig) -> ReasoningFormat | None:
    """How the model marks what it thinks: as the operator says, or its template."""
    if config.reasoning_parser == "auto":
        return format_of(template_of(tokenizer).source)
    return None if config.reasoning_parser == "none" else format_named(config.reasoning_parser)


def check_answer(body: ChatRequest, model: TextModel, config: ServeConfig) -> None:
    """Refuse what cannot be asked of an answer. Raises ``ApiError`` 400."""
    try:
        if tools_asked(body) is not None:
            tool_dialect(model.tokenizer, config)
    except InvalidInput as error:
        raise from_invalid_input(error) from error
    budget, param = body.thinking_token_budget, "thinking_token_budget"
    if budget is not None and not 0 <= budget <= _MAX_BUDGET:
        raise invalid(param, f"must be from 0 to {_MAX_BUDGET}")
    if budget is not None and reasoning_format(model.tokenizer, config) is None:
        raise ApiError(400, f"{param}: {NO_THINKING}.", param=param, code="unsupported_parameter")


async def answer_of(
    body: Any, params: SamplingParams, prompts: Sequence[Prompt], model: TextModel, config: ServeConfig, check: Check
) -> tuple[AnswerForm, SamplingParams]:
    """What the answers to a body are made of, and the parameters that keep them so. Raises ``ApiError`` 400.

    Where a call may be made and need not, schemas that cannot be enforced are left to the model, unless strict.
    """
    form = answer_form(body, prompts, model, config)
    if form.is_plain:
        return form, params
    asked = tools_asked(body)
    if params.grammar is not None:
        _check_alone(body, asked)
        return PLAIN, params  # it is a word of its grammar: a mark in it marks nothing
    params = reading_marks(params, form, model.tokenizer)
    param = _asked_as(asked)
    try:
        for tool in () if asked is None else asked.callable:
            await check(Grammar("json_schema", json.dumps(tool.parameters)), param)
        return _constrained(body, asked, form, params, model.tokenizer)
    except (ApiError, InvalidInput) as error:
        if body.thinking_token_budget is None and asked is not None and not (asked.must or asked.strict):
            return form, params
        if isinstance(error, ApiError):
            raise
        raise ApiError(400, f"{param}: {error.remedy.rstrip('.')}.", param=param, code="invalid_grammar") from error


def _check_alone(body: Any, asked: ToolsAsked | None) -> None:
    """Refuse what cannot stand beside a format of the answer. Raises ``ApiError`` 400."""
    if asked is not None or body.thinking_token_budget is not None:
        raise invalid(_asked_as(asked), "cannot be combined with a format of the answer; send one of them")


def _asked_as(asked: ToolsAsked | None) -> str:
    return "thinking_token_budget" if asked is None else "functions" if asked.older else "tools"


def note_strict(warnings: Warnings, body: Any, form: AnswerForm) -> None:
    """Warn where strict arguments were asked for, and nothing says when a call has begun."""
    if form.tools is not None and not form.eager and (asked := tools_asked(body)) is not None and asked.strict:
        note(
            warnings, "strict", "this model's calls begin with no mark, and are kept in form only where they are forced"
        )


def _constrained(
    body: Any, asked: ToolsAsked | None, form: AnswerForm, params: SamplingParams, tokenizer: Tokenizer
) -> tuple[AnswerForm, SamplingParams]:
    budget = body.thinking_token_budget
    tools, must = ((), False) if asked is None else (asked.callable, asked.must)
    source, eager = answer_grammar(form, tools, tokenizer, required=must, budget=budget)
    if source is None:
        return form, params
    grammar = Grammar("lark", source)
    definition(grammar)
    return replace(form, eager=eager), replace(params, grammar=grammar)


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


def counter_of(form: AnswerForm, params: SamplingParams, tokenizer: Tokenizer) -> Callable[[], ThoughtCounter] | None:
    """What counts the thoughts of a choice; None where there are none."""
    if form.reasoning is None:
        return None
    skip = params.skip_special_tokens
    return partial(ThoughtCounter, form.reasoning, tokenizer, is_open=form.is_open, skip_special=skip)


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
