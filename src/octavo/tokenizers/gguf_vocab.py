"""The vocabulary in GGUF metadata, checked: every list as long as it should be, every id in range, every token once."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["CONTROL", "UNKNOWN", "USER_DEFINED", "Vocabulary", "read_vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_MARK = "\u2581"
_MAX_TOKENS = 1 << 22
_LARGEST = 3.5e38  # a little above the largest float32
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in order of id, with their types (0 to 6) and, for SentencePiece, scores; merges for byte-level BPE."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    ids: dict[str, int]
    control: Mapping[str, int]
    has_bytes: bool
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unknown_id: int | None


def read_vocabulary(metadata: Mapping[str, Any], *, byte_level: bool) -> Vocabulary:
    """Check and collect a vocabulary. Raises `InvalidInput` naming the key, what it holds and what it must hold."""
    types = _types(metadata, len(_tokens(metadata)))
    tokens = _spelled(_tokens(metadata), types, byte_level)
    ids = _ids(tokens)
    count = len(tokens)
    special = {name: _special_id(metadata, name, count) for name in ("bos", "eos", "eot", "eom", "unknown")}
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=() if byte_level else _numbers(metadata, "scores", count),
        merges=_merges(metadata, ids) if byte_level else (),
        ids=ids,
        control={tokens[index]: index for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)},
        has_bytes=_check_bytes(tokens, types, byte_level),
        bos_id=special["bos"],
        eos_id=special["eos"],
        eot_id=special["eot"],
        eom_id=special["eom"],
        unknown_id=special["unknown"],
    )


def _tokens(metadata: Mapping[str, Any]) -> Sequence[str]:
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, (list, tuple)) or not 0 < len(tokens) <= _MAX_TOKENS:
        size = len(tokens) if isinstance(tokens, (list, tuple)) else tokens
        raise InvalidInput(_KEY + "tokens", size, f"must be a list of 1 to {_MAX_TOKENS} strings")
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or not token:
            raise InvalidInput(f"{_KEY}tokens[{index}]", token, "must be a string that is not empty")
    return tokens


def _spelled(tokens: Sequence[str], types: Sequence[int], byte_level: bool) -> Sequence[str]:
    """Files write user-defined pieces with plain spaces; a vocabulary of space marks knows them by the mark."""
    if byte_level:
        return tokens
    return [
        token.replace(" ", _MARK) if kind == USER_DEFINED else token for token, kind in zip(tokens, types, strict=True)
    ]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        index = next(index for index, token in enumerate(tokens) if ids[token] != index)
        raise InvalidInput(f"{_KEY}tokens[{index}]", tokens[index], f"is also token {ids[tokens[index]]}")
    return ids


def _types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    if metadata.get(_KEY + "token_type") is None:
        return [NORMAL] * count
    types = [int(value) for value in _numbers(metadata, "token_type", count)]
    wrong = next((kind for kind in types if not 0 <= kind <= BYTE), None)
    if wrong is not None:
        raise InvalidInput(_KEY + "token_type", wrong, f"token types are 0 to {BYTE}")
    return types


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> Sequence[float]:
    """One number for each token, from a list or any array."""
    values: Any = metadata.get(_KEY + name)
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        size = len(listed) if isinstance(listed, (list, tuple)) else values
        raise InvalidInput(_KEY + name, size, f"must be {count} numbers, one for each token")
    if isinstance(values, array) and all(map(math.isfinite, listed)) and max(map(abs, listed)) <= _LARGEST:
        return listed
    for index, value in enumerate(listed):
        if not isinstance(value, (int, float)) or not -_LARGEST <= value <= _LARGEST:
            raise InvalidInput(f"{_KEY}{name}[{index}]", value, "must be a finite number")
    return listed


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    merges = metadata.get(_KEY + "merges", [])
    if not isinstance(merges, (list, tuple)):
        raise InvalidInput(_KEY + "merges", merges, "must be a list of strings")
    return [_merge(index, merge, ids) for index, merge in enumerate(merges)]


def _merge(index: int, merge: object, ids: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
    if left not in ids or right not in ids or left + right not in ids:
        remedy = "must be two tokens with a space between, whose concatenation is a token"
        raise InvalidInput(f"{_KEY}merges[{index}]", merge, remedy)
    return left, right


def _special_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"{_KEY}{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise InvalidInput(f"{_KEY}{name}_token_id", value, f"must be a token id below {count}")
    return value


def _check_bytes(tokens: Sequence[str], types: Sequence[int], byte_level: bool) -> bool:
    """True if the vocabulary spells single bytes; it must then spell all of them, each as `<0xHH>`."""
    found = 0
    for index, kind in enumerate(types):
        if kind == BYTE:
            if not _BYTE_TOKEN.fullmatch(tokens[index]):
                raise InvalidInput(f"{_KEY}tokens[{index}]", tokens[index], "a byte token is <0x00> to <0xFF>")
            found += 1
    if found not in (0, 256) and not byte_level:
        raise InvalidInput(_KEY + "token_type", found, "byte tokens must be all 256, or none")
    return found == 256
