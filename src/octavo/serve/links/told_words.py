"""A tokenizer of which only so much is known here as has been told: its traits, and the bytes of some tokens."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.errors import OctavoError
from octavo.tokenizers.base import Tokenizer, TokenizerTraits

__all__ = ["ToldTokenizer"]


class ToldTokenizer(Tokenizer):
    """What a front end has of the tokenizer, where its work is done in other processes."""

    def __init__(self, traits: TokenizerTraits, vocab_size: int) -> None:
        super().__init__(traits)
        self._vocab_size = vocab_size
        self._names = {index: name for name, index in traits.special.items()}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocab_size

    def learn(self, words: Mapping[int, bytes]) -> None:
        """What some tokens look like."""
        self._all_bytes.update(words)

    def id_to_token(self, token_id: int) -> str | None:
        """The spelling of a special token; None for all others."""
        return self._names.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a special token."""
        return self.traits.special.get(token)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        raise OctavoError("text is encoded in another process")

    def _visible_bytes(self, token_id: int) -> bytes:
        raise OctavoError(f"what token {token_id} looks like has not been told")
