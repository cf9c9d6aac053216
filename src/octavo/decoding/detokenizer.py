"""Text from token ids as they come."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from octavo.core.errors import OctavoError
from octavo.tokenizers.base import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Text from token ids as they come; a character appears when its last byte has come.

    The pieces that `push` and `finish` return, joined, are `tokenizer.decode` of all pushed ids, with one exception:
    where the tokenizer takes away a leading space and `prompt_tail_ids` (the end of the prompt) holds a visible token,
    the space stays, because the text goes on from the prompt's. Bytes that are no UTF-8 become U+FFFD, each maximal
    invalid part one, and bytes still waiting at `finish` become one U+FFFD.

    A fold over the ids: pushing them again, in any grouping, rebuilds the same state. O(1) per token.
    """

    __slots__ = ("_finished", "_partial", "_strip", "_table", "num_chars")

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail_ids: Iterable[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._partial = b""  # the beginning of a character
        self._strip = tokenizer.strip_leading_space and not any(self._table[index] for index in prompt_tail_ids)
        self._finished = False
        self.num_chars = 0  # of whole text returned so far

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete. Raises `OctavoError` after `finish`."""
        if self._finished:
            raise OctavoError("the detokenizer is finished; make a new one and replay the ids")
        table = self._table
        return self._decoded(self._partial + b"".join([table[index] for index in ids]), False)

    def push_one(self, token_id: int) -> str:
        """`push` of one id, at half the cost: nearly every token takes this way."""
        if self._finished:
            return self.push((token_id,))
        data = self._partial + self._table[token_id] if self._partial else self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._partial = data[used:]
        if self._strip:
            return self._returned(text)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        """What was held back, as text. A second call returns nothing."""
        self._finished = True
        return self._decoded(self._partial, True)

    def _decoded(self, data: bytes, final: bool) -> str:
        text, used = utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        return self._returned(text)

    def _returned(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        self.num_chars += len(text)
        return text
