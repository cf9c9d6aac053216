"""Builders for small weight files, well-formed and not."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item: Any) -> bytes:
    """The bytes of one GGUF value; an array is `(element kind, items)`."""
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        return struct.pack("<IQ", item[0], len(item[1])) + b"".join(value(item[0], one) for one in item[1])
    return struct.pack(SCALARS[kind], item)


def field(key: str | bytes, kind: int, item: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor info; `dims` in file order, the row first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    fields: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def vocabulary(tokens: list[str], **extra: tuple[int, Any]) -> list[bytes]:
    fields = [field("tokenizer.ggml.tokens", ARRAY, (STRING, tokens))]
    return fields + [field(f"tokenizer.ggml.{key}", kind, item) for key, (kind, item) in extra.items()]


def tensors_f32(arrays: dict[str, np.ndarray]) -> tuple[list[bytes], bytes]:
    """Infos and data of float32 tensors, each aligned to 32 bytes."""
    infos, data = [], b""
    for name, array in arrays.items():
        infos.append(tensor(name, tuple(reversed(array.shape)), 0, len(data)))
        data += array.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    return infos, data


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(start: int, stop: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
