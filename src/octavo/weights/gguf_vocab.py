"""What the vocabulary in GGUF metadata must satisfy before a tokenizer is built from it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.weights.tensors import CorruptFile, TensorInfo

__all__ = ["check_vocabulary"]

_PREFIX = "tokenizer.ggml."
_BYTE_TYPE = 6
_TOKEN_TYPES = range(7)  # undefined, normal, unknown, control, user-defined, unused, byte
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPECIAL_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_MAX_TOKEN_BYTES = 64 << 10


def check_vocabulary(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Raise `CorruptFile` unless tokens, scores, types, merges and special ids agree. No vocabulary is no error."""
    tokens = metadata.get(_PREFIX + "tokens")
    if tokens is None:
        return
    if not _strings(tokens) or not tokens:
        raise CorruptFile(path, _PREFIX + "tokens", tokens, "must be a list of strings, at least one")
    if max(map(len, tokens)) > _MAX_TOKEN_BYTES:
        raise CorruptFile(path, _PREFIX + "tokens", max(map(len, tokens)), "a token has too many characters")
    _check_parallel(metadata, len(tokens), path)
    _check_bytes(tokens, metadata.get(_PREFIX + "token_type"), path)
    _check_merges(metadata.get(_PREFIX + "merges", []), path)
    _check_special_ids(metadata, len(tokens), path)
    _check_embedding(tensors.get("token_embd.weight"), len(tokens), path)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_parallel(metadata: Mapping[str, Any], count: int, path: Path) -> None:
    for field, codes in (("scores", "fd"), ("token_type", "bhiqBHIQ")):
        values = metadata.get(_PREFIX + field)
        if values is None:
            continue
        if not isinstance(values, array) or values.typecode not in codes or len(values) != count:
            shown = len(values) if isinstance(values, (array, list)) else values
            raise CorruptFile(path, _PREFIX + field, shown, f"must be {count} numbers, one for each token")
        if field == "scores" and not all(score - score == 0 for score in values):
            raise CorruptFile(path, _PREFIX + field, "NaN or infinity", "scores must be finite")
        if field == "token_type" and not (min(values) in _TOKEN_TYPES and max(values) in _TOKEN_TYPES):
            raise CorruptFile(path, _PREFIX + field, (min(values), max(values)), "token types are 0 to 6")


def _check_bytes(tokens: list[str], types: Any, path: Path) -> None:
    for index, kind in enumerate(types or ()):
        if kind == _BYTE_TYPE and not _BYTE_TOKEN.fullmatch(tokens[index]):
            raise CorruptFile(path, f"{_PREFIX}tokens[{index}]", tokens[index], "a byte token must read <0x00>..<0xFF>")


def _check_merges(merges: Any, path: Path) -> None:
    if not _strings(merges):
        raise CorruptFile(path, _PREFIX + "merges", merges, "must be a list of strings")
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CorruptFile(path, f"{_PREFIX}merges[{index}]", merge, "must be two parts with a space between")


def _check_special_ids(metadata: Mapping[str, Any], count: int, path: Path) -> None:
    for key, value in metadata.items():
        if _SPECIAL_ID.fullmatch(key) and not (type(value) is int and 0 <= value < count):
            raise CorruptFile(path, key, value, f"must be a token id below {count}")


def _check_embedding(embedding: TensorInfo | None, count: int, path: Path) -> None:
    if embedding is not None and (len(embedding.shape) != 2 or embedding.shape[0] < count):
        raise CorruptFile(path, "token_embd.weight shape", embedding.shape, f"needs a row for each of {count} tokens")
