"""A tokenizer of the standard library alone, for the tiny fixture model and for tests.

Its vocabulary is explicit, as JSON (a token's id is its place in `vocab`)::

    {"type": "simple", "kind": "characters", "vocab": ["<bos>", "<eos>", "<unk>", "a", ...],
     "bos": "<bos>", "eos": ["<eos>"], "unk": "<unk>", "special": ["<pad>"], "add_bos": false, "chat_template": null}

`words` splits at white space, `characters` takes each character, `bytes` takes each byte of the UTF-8 text, which the
vocabulary writes `<0x00>` to `<0xFF>`. Only `vocab` is required; `special` adds to bos, eos and unk, which are special
anyway.
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
_OPTIONS = ("kind", "special", "bos", "eos", "unk", "add_bos", "chat_template")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class SimpleTokenizer(Tokenizer):
    """Whole words, characters or bytes of an explicit vocabulary.

    A piece that the vocabulary lacks becomes `unk`, or raises `InvalidInput` where there is none.
    """

    def __init__(
        self,
        vocab: Sequence[str],
        *,
        kind: str = "characters",
        special: Sequence[str] = (),
        bos: str | None = None,
        eos: Sequence[str] = (),
        unk: str | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidInput("tokenizer.kind", kind, f"must be one of {', '.join(_KINDS)}")
        self.kind = kind
        self._tokens = _checked_tokens(vocab)
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._unknown = None if unk is None else self._named("unk", unk)
        bos_id = None if bos is None else self._named("bos", bos)
        eos_ids = tuple(self._named("eos", token) for token in eos)
        named = [*special, *eos, *(token for token in (bos, unk) if token is not None)]
        content = [kind, self._tokens, sorted(named), bos, list(eos), unk, add_bos, chat_template]
        traits = TokenizerTraits(
            identity=content_digest([json.dumps(content)]),
            special={token: self._named("special", token) for token in named},
            bos_id=bos_id,
            eos_ids=eos_ids,
            prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
            strip_leading_space=kind == "words",
            chat_template=chat_template,
        )
        super().__init__(traits)
        longest_first = sorted(traits.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> SimpleTokenizer:
        """From the JSON form in the module's description. Raises `InvalidInput` for an unknown or missing key."""
        options = {key: value for key, value in spec.items() if key not in ("type", "vocab")}
        for key in options:
            if key not in _OPTIONS:
                raise InvalidInput(f"tokenizer.{key}", options[key], f"unknown key; known: {', '.join(_OPTIONS)}")
        if isinstance(options.get("eos"), str):
            options["eos"] = [options["eos"]]
        return cls(spec.get("vocab", ()), **options)

    def _named(self, field: str, token: object) -> int:
        index = self._ids.get(token) if isinstance(token, str) else None
        if index is None:
            raise InvalidInput(f"tokenizer.{field}", token, "must be a token of the vocabulary")
        return index

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
        raise InvalidInput("tokenizer.vocab", tokens, "must be a list of strings, at least one")
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or not token:
            raise InvalidInput(f"tokenizer.vocab[{index}]", token, "must be a string that is not empty")
        if token in seen:
            raise InvalidInput(f"tokenizer.vocab[{index}]", token, "is there twice; every token has one id")
        seen.add(token)
    return tuple(tokens)
