"""A tokenizer as `llguidance` sees it: the bytes of every token, which are special, and how a text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import Tokenizer

__all__ = ["Vocabulary", "bytes_of", "vocabulary_of"]


class Vocabulary:
    """The attributes that `LLTokenizer` looks up. ``tokens[id]``: the token's bytes; ``b""``: never drawn."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = [i for i in special_ids if i < len(self.tokens)]
        self.eos_token_ids = list(eos_ids)
        self.eos_token_id = self.eos_token_ids[0]
        self._encode = encode
        specials = {*self.special_token_ids, *eos_ids}
        self._ids = {text: i for i, text in reversed(list(enumerate(self.tokens))) if text and i not in specials}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text, as the model's own tokenizer cuts it where that keeps its bytes; else greedily."""
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            try:
                ids = self._encode(data.decode())
            except (InvalidInput, UnicodeDecodeError):
                ids = []
            if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == data:
                return ids
        return self._greedily(data)

    def _greedily(self, data: bytes) -> list[int]:
        """Each time the longest token; what no token begins is left out."""
        ids, at = [], 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            length = next((n for n in lengths if data[at : at + n] in self._ids), 0)
            if length:
                ids.append(self._ids[data[at : at + length]])
            at += length or 1
        return ids

    def open(self, size: int) -> Any:
        """An `LLTokenizer` over ``size`` ids."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, n_vocab=size, eos_token=self.eos_token_ids)  # type: ignore[arg-type]


def bytes_of(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The bytes of the first ``size`` tokens."""
    table = tokenizer.byte_table(skip_special_tokens=False)
    return [table[i] for i in range(min(size, tokenizer.vocab_size))]


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with ``size`` ids. Raises ``InvalidInput`` if it has no end token."""
    if not eos_ids:
        raise InvalidInput("grammar", None, "the model has no end token, so no grammar could end: leave it out")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    return Vocabulary(bytes_of(tokenizer, size), sorted(tokenizer.special_tokens.values()), eos_ids, encode)
