"""A tokenizer of the standard library alone, for the tiny fixture model and for tests.

Its vocabulary is explicit, as JSON (ids are positions in `tokens`)::

    {"kind": "characters", "tokens": ["<bos>", "<eos>", "<unk>", "a", ...], "bos": 0, "eos": 1, "unknown": 2,
     "special": [0, 1, 2], "add_bos": false, "chat_template": null}

`words` splits at white space, `characters` takes each character, `bytes` takes each byte of the UTF-8 text, which the
vocabulary writes `<0x00>` to `<0xFF>`. Only `tokens` is required; `eos` may be a list; `special` adds to bos, eos and
unknown, which are special anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import Tokenizer, TokenizerTraits, content_digest

__all__ = ["SimpleTokenizer"]

_KINDS = ("words", "characters", "bytes")
_OPTIONS = ("kind", "special", "bos", "eos", "unknown", "add_bos", "chat_template")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class SimpleTokenizer(Tokenizer):
    """Whole words, characters or bytes of an explicit vocabulary.

    A piece that the vocabulary lacks becomes `unknown`, or raises `InvalidInput` where there is none.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        kind: str = "characters",
        special: Sequence[int] = (),
        bos: int | None = None,
        eos: int | Sequence[int] = (),
        unknown: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidInput("tokenizer.kind", kind, f"must be one of {', '.join(_KINDS)}")
        self.kind = kind
        self._tokens = _checked_tokens(tokens)
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._unknown = unknown
        eos_ids = (eos,) if isinstance(eos, int) else tuple(eos)
        named = [*special, *eos_ids, *(index for index in (bos, unknown) if index is not None)]
        content = [kind, self._tokens, sorted(special), bos, eos_ids, unknown, add_bos, chat_template]
        traits = TokenizerTraits(
            identity=content_digest([json.dumps(content)]),
            special={self._tokens[_checked_id(index, len(self._tokens))]: index for index in named},
            bos_id=bos,
            eos_ids=eos_ids,
            prefix_ids=(bos,) if add_bos and bos is not None else (),
            strip_leading_space=kind == "words",
            chat_template=chat_template,
        )
        super().__init__(traits)
        longest_first = sorted(traits.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> SimpleTokenizer:
        """From the JSON form in the module's description. Raises `InvalidInput` for an unknown or missing key."""
        options = {key: value for key, value in spec.items() if key != "tokens"}
        for key in options:
            if key not in _OPTIONS:
                raise InvalidInput(f"tokenizer.{key}", options[key], f"unknown key; known: {', '.join(_OPTIONS)}")
        return cls(spec.get("tokens", ()), **options)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        if self._split is None or not parse_special:
            return self._encode_plain(text)
        ids: list[int] = []
        for index, part in enumerate(self._split.split(text)):  # every second part is a special token's text
            ids += [self._ids[part]] if index % 2 else self._encode_plain(part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return [self._piece_id(piece) for piece in self._pieces(text)]

    def _pieces(self, text: str) -> Iterable[str]:
        if self.kind == "words":
            return text.split()
        if self.kind == "characters":
            return text
        return [f"<0x{byte:02X}>" for byte in text.encode("utf-8")]

    def _piece_id(self, piece: str) -> int:
        index = self._ids.get(piece)
        if index is not None and index not in self._special_ids:
            return index
        if self._unknown is None:
            raise InvalidInput("text", piece, "the tokenizer has neither this piece nor an unknown token")
        return self._unknown

    def _visible_bytes(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        if token_id in self._special_ids:
            return token.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(token) if self.kind == "bytes" else None
        if byte:
            return bytes([int(byte.group(1), 16)])
        return (f" {token}" if self.kind == "words" else token).encode("utf-8")


def _checked_tokens(tokens: object) -> tuple[str, ...]:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not tokens:
        raise InvalidInput("tokenizer.tokens", tokens, "must be a list of strings, at least one")
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or not token:
            raise InvalidInput(f"tokenizer.tokens[{index}]", token, "must be a string that is not empty")
        if token in seen:
            raise InvalidInput(f"tokenizer.tokens[{index}]", token, "is there twice; every token has one id")
        seen.add(token)
    return tuple(tokens)


def _checked_id(index: object, size: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
        raise InvalidInput("tokenizer special id", index, f"must be a token id below {size}")
    return index
