"""What an answer is made of, besides text: decided before it begins, and read from its text as it comes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.answer import AnswerForm, AnswerReader
from octavo.decoding.answer_grammar import answer_grammar
from octavo.decoding.grammar.definition import definition
from octavo.decoding.pieces import Piece, Whole, whole
from octavo.decoding.reasoning import ReasoningFormat, format_named, format_of
from octavo.decoding.reasoning.counter import ThoughtCounter
from octavo.decoding.reasoning.grammar import closing_token, opening_token, thoughts_grammar
from octavo.decoding.tools import ToolDialect
from octavo.decoding.tools.grammar import Tool, check_tool
from octavo.serve.config import ServeConfig
from octavo.serve.effort import check_effort, effort_of, most_thoughts
from octavo.serve.errors import ApiError, from_invalid_input, invalid
from octavo.serve.names import note, warn
from octavo.serve.port import Delta, TextModel
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import ChatRequest
from octavo.serve.tools import ToolsAsked, tools_asked
from octavo.serve.turns import tool_dialect
from octavo.tokenizers.base import Tokenizer
from octavo.tokenizers.chat import template_of

if TYPE_CHECKING:
    from octavo.serve.orders import Order

__all__ = ["PLAIN", "Reading", "answer_of", "call_id", "check_answer", "counter_of", "ended"]
__all__ += ["parsed", "read_whole", "reasoning_format"]

PLAIN = AnswerForm()
_TAIL = 32  # tokens of a prompt that are looked at for a mark
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
    has_marks = reasoning_format(model.tokenizer, config) is not None
    check_effort(effort_of(body), template_of(model.tokenizer).source, has_marks)


async def answer_of(
    order: Order, prompts: Sequence[Prompt], model: TextModel, config: ServeConfig, check: Check
) -> tuple[AnswerForm, SamplingParams]:
    """What the answers to an order are made of, and the parameters that keep them so. Raises ``ApiError`` 400.

    Where a call may be made and need not, what cannot be enforced is left to the model and said in the warnings, unless
    the tool is strict.
    """
    body, params = order.body, order.params
    form = answer_form(body, prompts, model, config)
    if form.is_plain:
        return form, params
    asked, budget = tools_asked(body), _budget(order, form, model.tokenizer)
    try:
        if params.grammar is not None:
            _check_alone(asked)
            form, params = _behind_thoughts(body, form, params, params.grammar, prompts[0], model.tokenizer, budget)
        else:
            params = reading_marks(params, form, model.tokenizer)
            form, params = await _with_calls(order, asked, form, params, model.tokenizer, budget, check)
    except InvalidInput as error:
        of_effort = error.field == "thinking_token_budget"
        param = effort_of(body).name if of_effort else order.constrained_by or _asked_as(asked)
        raise ApiError(400, f"{param}: {error.remedy.rstrip('.')}.", param=param, code="invalid_grammar") from error
    if getattr(body, "separate_reasoning", None) is False:
        form = replace(form, reasoning=None, is_open=False)
    return form, params


def _check_alone(asked: ToolsAsked | None) -> None:
    """Refuse what cannot stand beside a format of the answer. Raises ``ApiError`` 400."""
    if asked is not None:
        raise invalid(_asked_as(asked), "cannot be combined with a format of the answer; send one of them")


def _asked_as(asked: ToolsAsked | None) -> str:
    return "functions" if asked is not None and asked.older else "tools"


def _budget(order: Order, form: AnswerForm, tokenizer: Tokenizer) -> int | None:
    """The most tokens of thought. Where only a word asks for fewer and they cannot be kept short, that is said."""
    if form.reasoning is None:
        return None
    effort = effort_of(order.body)
    most = most_thoughts(effort, template_of(tokenizer).source)
    if most is None or effort.budget is not None or closing_token(form.reasoning, tokenizer) is not None:
        return most
    name = order.dialect.theirs.get(effort.name, effort.name)
    note(order.warnings, name, f"{form.reasoning.closes} is no single token of this model; use max_tokens")
    return None


def _behind_thoughts(
    body: Any,
    form: AnswerForm,
    params: SamplingParams,
    grammar: Grammar,
    prompt: Prompt,
    tokenizer: Tokenizer,
    budget: int | None,
) -> tuple[AnswerForm, SamplingParams]:
    """A format of the answer: thoughts may come first, where the prompt leaves room for any, and are kept apart."""
    marks, wanted = form.reasoning, form.is_open or budget is not None
    if marks is None or marks.is_closed(_end_of(prompt, tokenizer)) or body.separate_reasoning is False:
        return PLAIN, params  # it is a word of its grammar: a mark in it marks nothing
    if not wanted and (body.continue_final_message or opening_token(marks, tokenizer) is None):
        return PLAIN, params  # a mark of several tokens is begun too easily by a model that would not think
    before = thoughts_grammar(marks, tokenizer, is_open=form.is_open, budget=budget)
    params = reading_marks(params, form, tokenizer)
    return form, replace(params, grammar=replace(grammar, before=before))


async def _with_calls(
    order: Order,
    asked: ToolsAsked | None,
    form: AnswerForm,
    params: SamplingParams,
    tokenizer: Tokenizer,
    budget: int | None,
    check: Check,
) -> tuple[AnswerForm, SamplingParams]:
    """The grammar of calls and of a budget of thought."""
    tools: Sequence[Tool] = ()
    if asked is not None and form.tools is not None:
        tools = [await _enforced(order, asked, form.tools, tool, check) for tool in asked.callable]
    required, strict = asked is not None and asked.must, asked is not None and bool(asked.strict)
    source, eager = answer_grammar(form, tools, tokenizer, required=required, budget=budget, strict=strict)
    if source is None:
        return form, params
    try:
        grammar = Grammar("lark", source)
        definition(grammar)
        params = replace(params, grammar=grammar)
    except InvalidInput as error:  # it is too large, or cannot stand beside other parameters
        if asked is None or required or strict or budget is not None:
            raise
        warn(order.warnings, _asked_as(asked), f"calls are left to the model: {error.remedy.rstrip('.')}")
        return form, params
    return replace(form, eager=eager), params


async def _enforced(order: Order, asked: ToolsAsked, dialect: ToolDialect, tool: Tool, check: Check) -> Tool:
    """A tool whose schema can be enforced; where nobody insists on it, one that takes any arguments in its place."""
    param = _asked_as(asked)
    try:
        await check(Grammar("json_schema", json.dumps(tool.parameters)), param)
        check_tool(dialect, tool)
    except (ApiError, InvalidInput) as error:
        reason = error.remedy if isinstance(error, InvalidInput) else error.message.removeprefix(f"{param}: ")
        if asked.must or tool.name in asked.strict:
            raise ApiError(400, f"{param}: {reason.rstrip('.')}.", param=param, code="invalid_grammar") from error
        place = f"{param}[{asked.tools.index(tool)}]"
        reason = f"the schema is not enforced, calls of {tool.name} may not fit it: {reason.rstrip('.')}"
        warn(order.warnings, place, reason)
        return replace(tool, parameters={"type": "object"})
    return tool


def answer_form(body: Any, prompts: Sequence[Prompt], model: TextModel, config: ServeConfig) -> AnswerForm:
    """What to look for in the answers to a body. Raises ``ApiError`` 400."""
    if not isinstance(body, ChatRequest):
        return PLAIN
    asked, marks = tools_asked(body), reasoning_format(model.tokenizer, config)
    opened = marks is not None and (marks.is_open(_end_of(prompts[0], model.tokenizer)) or _thinks_on(body, marks))
    if asked is None:
        return AnswerForm(marks, opened)
    names = {tool.name: tool.parameters for tool in asked.callable}
    most = None if asked.parallel else 1
    return AnswerForm(marks, opened, tool_dialect(model.tokenizer, config), names, False, most)


def _thinks_on(body: ChatRequest, marks: ReasoningFormat) -> bool:
    """Whether a conversation ends within a turn that is gone on with, and that within thoughts."""
    last = body.messages[-1] if body.continue_final_message and body.messages else {}
    return isinstance(last.get("content"), str) and marks.goes_on(last["content"])


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
        """Whether whole calls have come, and nothing less."""
        return self._reader.num_calls > 0 and not self._reader.is_cut


def read_whole(form: AnswerForm, texts: Iterable[str]) -> Whole:
    """A whole answer, the same as its pieces put together."""
    reader = AnswerReader(form)
    answer = whole([*reader.push("".join(texts)), *reader.finish()])
    answer.is_cut = reader.is_cut
    return answer


def ended(reason: str | None, has_calls: bool, *, older: bool = False) -> str | None:
    """The finish reason of an answer: a stop behind a whole call is for the call."""
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
