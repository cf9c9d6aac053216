"""JSON from a model folder: bounded in size, density, depth and duplicates before it becomes objects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.weights.tensors import CorruptFile, open_regular

__all__ = ["parse_json", "read_json"]

_MAX_DEPTH = 64
_FREE_MARKS = 16 << 10
_BYTES_PER_MARK = 3  # a safetensors header has about six bytes for every bracket or comma


def read_json(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`; `InvalidInput` if unreadable, `CorruptFile` if malformed."""
    file, size = open_regular(path)
    with file:
        if size > max_bytes:
            raise CorruptFile(path, "file size", size, f"at most {max_bytes} bytes are read")
        raw = file.read(size)
    return parse_json(raw, Path(path), "content")


def parse_json(raw: bytes, path: Path, field: str) -> dict[str, Any]:
    """`raw` as a JSON object. Duplicate keys, non-finite numbers, deep or over-dense text: `CorruptFile`."""
    _check_shape(raw, path, field)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise CorruptFile(path, field, "too deep", f"at most {_MAX_DEPTH} levels") from error
    except ValueError as error:  # JSON, Unicode, duplicate key, integer of thousands of digits
        raise CorruptFile(path, field, _reason(error), "must be a JSON object") from error
    if not isinstance(value, dict):
        raise CorruptFile(path, field, value, "must be a JSON object")
    return value


def _check_shape(raw: bytes, path: Path, field: str) -> None:
    """Refuse text whose objects would be many times its size, without building any."""
    marks = raw.count(b"[") + raw.count(b"{") + raw.count(b",")
    if marks > _FREE_MARKS and marks * _BYTES_PER_MARK > len(raw):
        raise CorruptFile(path, field, f"{marks} brackets and commas in {len(raw)} bytes", "too dense")


def _reason(error: ValueError) -> str:
    return str(error)[:120]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:60]!r}")
            seen.add(key)
    return table


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
