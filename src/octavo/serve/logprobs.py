"""Logprobs in the two shapes of the OpenAI API, and vLLM's shape for those of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.tokenizers.base import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs", "token_text"]

_LOWEST = -9999.0  # JSON has no infinity; OpenAI's documents use this for "practically impossible"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; bytes that are no text of their own show as U+FFFD."""
    return tokenizer.token_bytes(token_id, skip_special_tokens=False).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""
    content = []
    for entry in entries:
        top = [_chat_token(tokenizer, token, value) for token, value in (*entry.top, *entry.chosen)]
        content.append({**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``, offsets in characters from `offset` on.

    An entry is None for the first token of an echoed prompt: nothing predicts it.
    """
    tokens = [token_text(tokenizer, token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(tokenizer, entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """Text -> logprob of the most likely tokens and the chosen one; of two with the same text, the likelier stays."""
    found: dict[str, float] = {}
    for token, value in (*entry.top, *entry.chosen, (entry.token_id, entry.logprob)):
        found.setdefault(token_text(tokenizer, token), _finite(value))
    return found


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[Any]:
    """For each prompt token ``{id: {logprob, rank, decoded_token}}``; null for the first."""
    return [None if entry is None else _prompt_entry(tokenizer, entry) for entry in entries]


def _prompt_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)]
    shown = {token: (value, rank) for token, value, rank in ranked}
    shown.setdefault(entry.token_id, (entry.logprob, entry.rank))
    return {
        str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, token)}
        for token, (value, rank) in shown.items()
    }


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
