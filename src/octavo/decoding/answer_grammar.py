"""The grammar of a whole answer: thoughts, at most so many tokens of them, then text and calls."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.decoding.answer import AnswerForm
from octavo.decoding.reasoning.grammar import thoughts_grammar
from octavo.decoding.tools.grammar import ANY_TEXT, Tool, calls_grammar
from octavo.tokenizers.base import Tokenizer

__all__ = ["answer_grammar"]


def answer_grammar(
    form: AnswerForm,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    required: bool,
    budget: int | None,
    strict: bool = False,
) -> tuple[str | None, bool]:
    """The grammar in llguidance's Lark, or None where nothing is to be enforced; and whether it keeps calls in form.

    ``required``: the answer is one call or more. ``strict``: calls are kept in form also where no mark opens them.
    ``budget``: most tokens of thought. Raises ``InvalidInput`` for what cannot be enforced with this dialect, or this
    tokenizer.
    """
    calls: str | None = None
    if form.tools is not None:
        known = tokenizer.special_tokens
        special = {mark: known[mark] for mark in form.tools.marks if mark in known}
        parallel = form.most_calls is None
        calls = calls_grammar(form.tools, tools, required=required, parallel=parallel, special=special, strict=strict)
    if calls is None and budget is None:
        return None, False
    answer = f"answer: TEXT\n{ANY_TEXT}" if calls is None else calls
    if form.reasoning is None:
        return f"%llguidance {{}}\nstart: answer\n{answer}", calls is not None
    thoughts = thoughts_grammar(form.reasoning, tokenizer, is_open=form.is_open, budget=budget)
    return f"%llguidance {{}}\nstart: thoughts answer\n{thoughts}\n{answer}", calls is not None
