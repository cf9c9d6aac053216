"""What a tokenizer is to the rest of the house: text to ids, ids to bytes, and what is special.

Everything here is standard library, so the tiny fixture model runs on a bare interpreter.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.errors import InvalidInput

__all__ = ["ByteTable", "Tokenizer", "TokenizerTraits", "content_digest"]


@dataclass(frozen=True)
class TokenizerTraits:
    """What is known of a tokenizer besides its vocabulary.

    `special` maps the text of every special (control) token to its id. `prefix_ids` and `suffix_ids` are put around
    a text when special tokens are asked for (a BOS, rarely an EOS). `strip_leading_space` says that the tokenizer
    puts a space before the text, so that decoding takes one away.
    """

    identity: str
    special: Mapping[str, int] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    strip_leading_space: bool = False
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)


class ByteTable(dict[int, bytes]):
    """The bytes of each token id, worked out when it is first looked up."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found


class Tokenizer(ABC):
    """Text to token ids and back. Immutable once built, and safe to use from several threads.

    Decoding is defined by bytes: the text of some ids is `b"".join(token_bytes(i) for i in ids)` read as UTF-8, each
    maximal invalid part shown as U+FFFD, less one leading space where `strip_leading_space` holds. An id at or above
    `vocab_size` (models pad their output rows) has no bytes; a negative id raises `InvalidInput`.
    """

    def __init__(self, traits: TokenizerTraits) -> None:
        self.traits = traits
        self._special_ids = frozenset(traits.special.values())
        self._all_bytes = ByteTable(self._bytes_of)
        self._text_bytes = ByteTable(lambda index: b"" if index in self._special_ids else self._all_bytes[index])

    @property
    def identity(self) -> str:
        """A digest of the content (vocabulary, merges, rules, template): equal digests encode equally."""
        return self.traits.identity

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.traits.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation, the principal one first."""
        return self.traits.eos_ids

    @property
    def chat_template(self) -> str | None:
        """The model's own (Jinja) chat template, or None."""
        return self.traits.chat_template

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text to id of every special token."""
        return self.traits.special

    @property
    def strip_leading_space(self) -> bool:
        """True where decoding takes away one space at the beginning of a text."""
        return self.traits.strip_leading_space

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None for an id that it lacks."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""

    @abstractmethod
    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Ids of `text` alone. With `parse_special` false no id of a special token is returned."""

    @abstractmethod
    def _visible_bytes(self, token_id: int) -> bytes:
        """The bytes of a token below `vocab_size`, specials by their own text."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        `add_special_tokens` adds what the model expects around a text (BOS), but no second BOS to a text that begins
        with it. `parse_special=False` takes the text of special tokens for plain text: use it for what users wrote.
        Raises `InvalidInput` for a text that is no valid Unicode (lone surrogates).
        """
        check_text(text)
        ids = self._encode_text(text, parse_special)
        if not add_special_tokens:
            return ids
        prefix = list(self.traits.prefix_ids)
        if parse_special and prefix and ids[: len(prefix)] == prefix:
            prefix = []
        return prefix + ids + list(self.traits.suffix_ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids, by the definition in the class description. Never raises for odd bytes."""
        table = self.byte_table(skip_special_tokens=skip_special_tokens)
        raw = b"".join([table[index] for index in ids])
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The raw bytes of one token; `b""` for a special one unless `skip_special_tokens` is false."""
        return self.byte_table(skip_special_tokens=skip_special_tokens)[token_id]

    def byte_table(self, *, skip_special_tokens: bool = True) -> ByteTable:
        """`token_bytes` of every token, for those who look up many."""
        return self._text_bytes if skip_special_tokens else self._all_bytes

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id < 0:
            raise InvalidInput("token_id", token_id, "token ids are not negative")
        return self._visible_bytes(token_id) if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """True for control tokens (BOS, EOS, turn marks): they are no text of the model."""
        return token_id in self._special_ids


def check_text(text: str) -> None:
    """Raise `InvalidInput` unless `text` is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise InvalidInput("text", text, "must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput("text", text, f"character {error.start} is half of a surrogate pair") from None


def content_digest(parts: Sequence[str | bytes]) -> str:
    """A hex digest of some parts; where one part ends and the next begins counts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
