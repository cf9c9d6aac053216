"""Thoughts as a grammar: how long they may be, and that the answer comes after them."""

from __future__ import annotations

import json

from octavo.core.errors import InvalidInput
from octavo.decoding.reasoning.formats import ReasoningFormat
from octavo.tokenizers.base import Tokenizer

__all__ = ["closing_token", "opening_token", "thoughts_grammar"]


def thoughts_grammar(marks: ReasoningFormat, tokenizer: Tokenizer, *, is_open: bool, budget: int | None) -> str:
    """Rules that define ``thoughts``: what stands before the answer.

    With a ``budget`` there are thoughts, of at most so many tokens: whatever the tokens are, behind the last of them
    only the closing mark is allowed. That needs a mark of one token. Raises ``InvalidInput``.
    """
    opens, closes = opening_token(marks, tokenizer), closing_token(marks, tokenizer)
    if budget is not None and closes is None:
        raise InvalidInput("thinking_token_budget", budget, f"{marks.closes} is no single token here; use max_tokens")
    opening = json.dumps(marks.opens) if opens is None else f"<[{opens}]>"
    if closes is None:  # found at its first place
        body = "block[lazy]: /(.|\\n)*/ " + json.dumps(marks.closes)
    else:
        forbidden = ",".join(map(str, sorted({*tokenizer.eos_ids, closes})))
        most = "*" if budget is None else f"{{0,{budget}}}"
        body = f"block: {'' if budget == 0 else f'<[^{forbidden}]>{most}'} <[{closes}]>"
    begun = "thinking" if is_open else f"{opening} thinking" if budget is not None else f"({opening} thinking)?"
    return "\n".join([f"thoughts: {begun}", "thinking: block BLANK", body, "BLANK: /\\n{0,2}/"])


def opening_token(marks: ReasoningFormat, tokenizer: Tokenizer) -> int | None:
    """The token that begins thoughts, if it is one."""
    return _token(marks.opens, tokenizer)


def closing_token(marks: ReasoningFormat, tokenizer: Tokenizer) -> int | None:
    """The token that ends thoughts, if it is one: only then can they be kept short."""
    return _token(marks.closes, tokenizer)


def _token(text: str, tokenizer: Tokenizer) -> int | None:
    """The one token of a text, if it is one."""
    if text in tokenizer.special_tokens:
        return tokenizer.special_tokens[text]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
