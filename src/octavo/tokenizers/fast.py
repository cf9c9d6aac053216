"""The common body of real tokenizers: the `tokenizers` library encodes, we define decoding by bytes.

Two cores share one model in memory. `core` knows special tokens by their text; its twin takes that text for plain text,
which is what a user's words are.
"""

from __future__ import annotations

import os
from codecs import charmap_build, charmap_encode
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import Tokenizer, TokenizerTraits

__all__ = ["BYTE_LEVEL", "SPACE_MARK", "FastTokenizer", "byte_alphabet", "guarded"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text at a time: the library needs no threads of its own
BYTE_LEVEL = "byte-level"  # each character of a token stands for one byte (GPT-2)
SPACE_MARK = "space-mark"  # a token is text with U+2581 for a space, or one byte written <0xHH> (SentencePiece)
_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Character to byte of GPT-2's alphabet: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = charmap_build("".join(sorted(byte_alphabet(), key=byte_alphabet().__getitem__)))


class FastTokenizer(Tokenizer):
    """A tokenizer over a `tokenizers.Tokenizer` whose ids were already checked.

    `form` is `BYTE_LEVEL` or `SPACE_MARK`: how the vocabulary spells bytes.
    """

    def __init__(self, core: Any, traits: TokenizerTraits, form: str) -> None:
        super().__init__(traits)
        self._core = core
        self._plain = _plain_twin(core)
        self._form = form
        self._added = {index: token.content for index, token in core.get_added_tokens_decoder().items()}
        self._size = max([core.get_vocab_size(with_added_tokens=False) - 1, *self._added]) + 1

    @property
    def vocab_size(self) -> int:
        return self._size

    def to_json(self) -> str:
        """The text of a `tokenizer.json` that encodes and decodes alike, the ids around a text included."""
        from tokenizers import Tokenizer as Core
        from tokenizers import decoders, processors

        twin = Core.from_str(self._core.to_str())
        if self.strip_leading_space:
            spaces = decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()
            twin.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
        around = [(self._core.id_to_token(i), i) for i in (*self.traits.prefix_ids, *self.traits.suffix_ids)]
        if around:
            names = [token for token, _ in around]
            cut = len(self.traits.prefix_ids)
            twin.post_processor = processors.TemplateProcessing(
                single=[*names[:cut], "$A", *names[cut:]], special_tokens=list(dict(around).items())
            )
        text: str = twin.to_str()
        return text

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._size:
            return None
        token: str | None = self._core.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        index: int | None = self._core.token_to_id(token)
        return index

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        core = self._core if parse_special else self._plain
        # of the library's ways, this one lets other threads run meanwhile
        ids: list[int] = guarded("text", text, lambda: core.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return ids if parse_special else self._spelled_out(ids)

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """Merges may still spell a special token (rare vocabularies): write such a one character by character."""
        if self._special_ids.isdisjoint(ids):
            return ids
        plain: list[int] = []
        for index in ids:
            plain += self._characters(index) if index in self._special_ids else [index]
        return plain

    def _characters(self, token_id: int) -> list[int]:
        ids: list[int] = []
        for character in self._visible_bytes(token_id).decode("utf-8", "replace"):
            ids += self._plain.encode(character, add_special_tokens=False).ids
        # a piece outside the vocabulary is the unknown token, which is itself special
        return [index for index in ids if index not in self._special_ids]

    def _visible_bytes(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if self._form == SPACE_MARK:
            return _space_mark_bytes(token)
        if token_id in self._added:
            return token.encode("utf-8")
        try:
            return charmap_encode(token, "strict", _ALPHABET)[0]
        except UnicodeEncodeError:  # outside the alphabet: a piece that stands for itself
            return token.encode("utf-8")


def _space_mark_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_MARK, " ").encode("utf-8")


def _plain_twin(core: Any) -> Any:
    """A second tokenizer on the same model that takes the text of special tokens for plain text."""
    from tokenizers import Tokenizer as Core

    twin = Core(core.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(core, part) is not None:
            setattr(twin, part, getattr(core, part))
    twin.add_tokens([token for _, token in sorted(core.get_added_tokens_decoder().items())])
    twin.encode_special_tokens = True
    return twin


def guarded(field: str, value: object, action: Any) -> Any:
    """Run a call into the library; its failures, panics included, become `InvalidInput`."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, MemoryError, InvalidInput):
        raise
    except BaseException as error:  # a panic of the library does not descend from Exception
        raise InvalidInput(field, value, f"the tokenizer library refused it: {error}") from None
