"""Words in sampling parameters as token ids: what is banned as text, and what breaks a repetition.

Engines know ids alone, so whoever has the text side looks the words up once, when a request comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.decoding.processors import processor
from octavo.tokenizers.base import Tokenizer

__all__ = ["banned_sequences", "breaker_ids", "with_token_ids"]


def with_token_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with `bad_words` as `banned_sequences` and the ids of DRY's sequence breakers.

    Raises `InvalidInput` for a word or breaker that no token ids stand for, and for a processor that is not there.
    """
    if not isinstance(params, SamplingParams):
        return params  # `Request` refuses it
    for name in params.logits_processors:
        processor(name)
    if not params.has_words:
        return params
    found = params.banned_sequences + banned_sequences(params.bad_words, tokenizer)
    breakers = params.dry_breaker_ids
    if params.has_dry and breakers is None:
        breakers = breaker_ids(params.dry_sequence_breakers, tokenizer)
    return replace(params, bad_words=(), banned_sequences=found, dry_breaker_ids=breakers)


def banned_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as it stands and after a space: at the beginning of a text, and within one."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
            if not ids:
                raise InvalidInput(f"bad_words[{index}]", word, "no token stands for it; ban something else")
            found[ids] = None
    return tuple(found)


@lru_cache(maxsize=64)
def breaker_ids(breakers: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens whose text holds one of these, ascending."""
    table = tokenizer.byte_table(skip_special_tokens=False)
    marks = [mark.encode() for mark in breakers]
    found = [i for i in range(tokenizer.vocab_size) if any(mark in table[i] for mark in marks)]
    for index, mark in enumerate(() if breakers == SamplingParams.dry_sequence_breakers else marks):
        if not any(mark in table[i] for i in found):
            raise InvalidInput(
                f"dry_sequence_breakers[{index}]", breakers[index], "no token holds it; give a shorter one"
            )
    return tuple(found)
