"""Logprobs in the two shapes of the OpenAI API, and vLLM's shape for those of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.decoding.detokenizer import IncrementalDetokenizer
from octavo.serve.prompts import Prompt
from octavo.tokenizers.base import Tokenizer

__all__ = ["TextPlaces", "chat_logprobs", "completion_logprobs", "prompt_logprobs", "token_text"]

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


class TextPlaces:
    """Where tokens begin in the text that a client sees, in characters. A fold over the output ids of a choice.

    A token that goes on with a character begins where that character does, and one that is not shown takes no place.
    ``shown``: the text begins with the prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Prompt, *, shown: bool) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._start = len(prompt.text) if shown else 0
        skip = params.skip_special_tokens
        self._output = IncrementalDetokenizer(tokenizer, prompt.token_ids, skip_special_tokens=skip)

    def of_prompt(self) -> list[int]:
        """Of the prompt's tokens. A special token that its text has not was put there by the tokenizer."""
        special = {token: text for text, token in self._tokenizer.special_tokens.items()}
        text, places = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False), []
        for token in self._prompt.token_ids:
            places.append(text.num_chars)
            if token not in special or self._prompt.text.startswith(special[token], text.num_chars):
                text.push_one(token)
        return places

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next output tokens."""
        places = []
        for token in token_ids:
            places.append(self._start + self._output.num_chars)
            self._output.push_one(token)
        return places


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], places: Sequence[int]
) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; the last are ``places`` (`TextPlaces`).

    An entry is None for the first token of an echoed prompt: nothing predicts it.
    """
    return {
        "tokens": [token_text(tokenizer, token) for token in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(tokenizer, entry) for entry in entries],
        "text_offset": list(places),
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
