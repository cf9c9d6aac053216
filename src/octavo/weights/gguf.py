"""The GGUF format: `[magic, version, counts][key-values][tensor infos][padding][data]`, memory-mapped.

Our own reader. A file is untrusted input: every count, length and offset is compared with the real size of the file
before anything is built from it. Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput
from octavo.weights.gguf_dequant import GGUF_TYPES, UNSUPPORTED_TYPES, TensorType, dequantize
from octavo.weights.gguf_vocab import check_vocabulary
from octavo.weights.tensors import CorruptFile, MappedFile, TensorInfo, WeightFile

__all__ = ["GgufFile"]

_MAX_KEY = 256
_MAX_NAME = 256
_MAX_STRING = 16 << 20
_MAX_ITEMS = 4 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty key with a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name with one dimension

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type -> (struct code, array typecode); both little-endian, the array is swapped on a big-endian host.
_SCALARS = {
    0: ("<B", "B"), 1: ("<b", "b"), 2: ("<H", "H"), 3: ("<h", "h"), 4: ("<I", "I"), 5: ("<i", "i"),
    6: ("<f", "f"), _BOOL: ("<B", "B"), 10: ("<Q", "Q"), 11: ("<q", "q"), 12: ("<d", "d"),
}  # fmt: skip
_NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class _Stored:
    kind: TensorType
    start: int  # from the start of the file
    length: int  # bytes


class GgufFile(WeightFile):
    """One `.gguf` file. Names and layouts are the file's own (`names.py` translates them).

    `metadata` holds the key-values: `int`, `float`, `bool`, `str`, `list[str]` for arrays of strings, `list[bool]`,
    and `array.array` for arrays of numbers (compact: a vocabulary has hundreds of thousands).
    `CorruptFile` when the file is inconsistent, `InvalidInput` when it is sound but of a kind we do not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file = MappedFile(path, min_size=24)
        try:
            with self._file.view as view:
                self._stored = self._parse(_Cursor(self._file, view))
            check_vocabulary(self.metadata, self._infos, self._file.path)
        except BaseException:
            self._file.close()
            raise

    def _parse(self, cursor: _Cursor) -> dict[str, _Stored]:
        num_tensors, num_keys = _read_preamble(cursor)
        for _ in range(num_keys):
            key = cursor.string("key", _MAX_KEY)
            if not key or key in self.metadata:
                raise cursor.corrupt("key", key, "is empty or given twice")
            self.metadata[key] = _read_value(cursor, key)
        raw_infos = [_read_tensor(cursor) for _ in range(num_tensors)]
        alignment = _alignment(self.metadata, cursor)
        start = -(-cursor.at // alignment) * alignment
        stored: dict[str, _Stored] = {}
        for info, kind, offset in raw_infos:
            if info.name in stored:
                raise cursor.corrupt("tensor name", info.name, "is given twice")
            if offset % alignment:
                raise cursor.corrupt(f"tensor {info.name!r}: offset", offset, f"must be a multiple of {alignment}")
            length = math.prod(info.shape) // kind.block * kind.size
            stored[info.name] = _Stored(kind, start + offset, length)
            self._infos[info.name] = info
        _check_spans(stored, cursor)
        return stored

    def read(self, name: str) -> NDArray[np.float32]:
        """The exact values as a new float32 array of `info(name).shape`."""
        info, kind = self.info(name), self._stored[name].kind
        return dequantize(self.raw(name), kind).reshape(info.shape)

    def read_slice(self, name: str, index: int) -> NDArray[np.float32]:
        """`read(name)[index]` along the first axis, without decoding the rest."""
        raw = self.raw_slice(name, index)
        return dequantize(raw, self._stored[name].kind).reshape(self.info(name).shape[1:])

    def raw_slice(self, name: str, index: int) -> NDArray[np.uint8]:
        """The bytes of `read_slice`, as a view of the mapping: drop it before `close`."""
        info, stored = self.info(name), self._stored[name]
        if not 0 <= index < info.shape[0] or len(info.shape) < 2:
            raise InvalidInput(f"index into {name}", index, f"the shape is {info.shape}")
        each = stored.length // info.shape[0]
        return self._file.array_at(stored.start + index * each, each)

    def type_number(self, name: str) -> int:
        """GGUF's number of a tensor's type."""
        self.info(name)
        return _NUMBERS[self._stored[name].kind.name]

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        self.info(name)
        return self._stored[name].length

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes as a view of the mapping: drop it before `close`."""
        self.info(name)
        return self._file.array_at(self._stored[name].start, self._stored[name].length)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()


class _Cursor:
    """Reads forward through a file; every step is checked against its size."""

    def __init__(self, file: MappedFile, view: memoryview) -> None:
        self.file, self.view, self.at = file, view, 0

    def corrupt(self, field: str, value: object, reason: str) -> CorruptFile:
        return CorruptFile(self.file.path, field, value, reason)

    @property
    def left(self) -> int:
        return self.file.size - self.at

    def need(self, length: int, field: str) -> None:
        if length > self.left:
            raise self.corrupt(field, length, f"needs that many bytes, the file has {self.left} left")

    def number(self, code: str, field: str) -> Any:
        self.need(struct.calcsize(code), field)
        (value,) = struct.unpack_from(code, self.view, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self, field: str, limit: int = _MAX_STRING) -> str:
        length = self.number("<Q", f"{field} length")
        if length > limit:
            raise self.corrupt(f"{field} length", length, f"at most {limit} bytes")
        self.need(length, field)
        raw = bytes(self.view[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(field, raw[:64], "must be UTF-8") from error

    def strings(self, count: int, field: str) -> list[str]:
        """`count` strings; one Python step for each, none for a byte."""
        view, at, end, unpack = self.view, self.at, self.file.size, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(view, at)[0]
                if at > end:
                    raise self.corrupt(f"{field}[{len(out)}] length", at - start, f"only {end - start} bytes are left")
                out.append(str(view[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{field}[{len(out)}]", error.object[:64], "must be UTF-8") from error
        except struct.error as error:
            raise self.corrupt(f"{field}[{len(out)}]", "end of file", "the array is cut short") from error
        self.at = at
        return out


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.view[:4])
    if magic != b"GGUF":
        raise cursor.corrupt("magic", magic, "must be b'GGUF'")
    cursor.at = 4
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        kind = "big-endian files are not read" if version and version & 0xFFFF == 0 else "versions 2 and 3 are read"
        raise cursor.corrupt("version", version, kind)
    num_tensors, num_keys = cursor.number("<Q", "tensor count"), cursor.number("<Q", "key count")
    for field, count, limit, least in (
        ("tensor count", num_tensors, _MAX_TENSORS, _MIN_TENSOR_BYTES),
        ("key count", num_keys, _MAX_KEYS, _MIN_KEY_BYTES),
    ):
        if count > min(limit, cursor.left // least):
            raise cursor.corrupt(field, count, f"at most {min(limit, cursor.left // least)} fit")
    return num_tensors, num_keys


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("<I", f"{key} type")
    if kind == _STRING:
        return cursor.string(key)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.corrupt(f"{key} type", kind, "must be a value type from 0 to 12")
    value = cursor.number(_SCALARS[kind][0], key)
    if kind != _BOOL:
        return value
    if value > 1:
        raise cursor.corrupt(key, value, "a bool must be 0 or 1")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> Any:
    kind, count = cursor.number("<I", f"{key} element type"), cursor.number("<Q", f"{key} length")
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.corrupt(f"{key} element type", kind, "must be a scalar or string type (arrays do not nest)")
    each = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind][0])
    if count > min(_MAX_ITEMS, cursor.left // each):
        raise cursor.corrupt(f"{key} length", count, f"at most {min(_MAX_ITEMS, cursor.left // each)} fit")
    if kind == _STRING:
        return cursor.strings(count, key)
    values = array(_SCALARS[kind][1])
    values.frombytes(cursor.view[cursor.at : cursor.at + count * each])
    cursor.at += count * each
    if sys.byteorder == "big":
        values.byteswap()
    if kind != _BOOL:
        return values
    if count and max(values) > 1:
        raise cursor.corrupt(key, max(values), "a bool must be 0 or 1")
    return [bool(value) for value in values]


def _read_tensor(cursor: _Cursor) -> tuple[TensorInfo, TensorType, int]:
    name = cursor.string("tensor name", _MAX_NAME)
    rank = cursor.number("<I", f"tensor {name!r}: dimensions")
    if not name or not 1 <= rank <= _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name!r}: dimensions", rank, f"needs a name and 1 to {_MAX_DIMS} dimensions")
    dims = [cursor.number("<Q", f"tensor {name!r}: dimension {axis}") for axis in range(rank)]
    # Python integers do not wrap: the product is the true one.
    if 0 in dims or math.prod(dims) > 1 << 62:
        raise cursor.corrupt(f"tensor {name!r}: dimensions", dims, "each must be positive, the product below 2^62")
    kind = _tensor_type(cursor, name)
    if dims[0] % kind.block:
        raise cursor.corrupt(f"tensor {name!r}: row length", dims[0], f"{kind.name} needs a multiple of {kind.block}")
    offset = cursor.number("<Q", f"tensor {name!r}: offset")
    return TensorInfo(name, tuple(reversed(dims)), kind.name), kind, offset


def _tensor_type(cursor: _Cursor, name: str) -> TensorType:
    code = cursor.number("<I", f"tensor {name!r}: type")
    if code in GGUF_TYPES:
        return GGUF_TYPES[code]
    readable = ", ".join(kind.name for kind in GGUF_TYPES.values())
    if code in UNSUPPORTED_TYPES:
        remedy = f"not supported; use a file with {readable}"
        raise InvalidInput(f"{cursor.file.path.name}: tensor {name!r}: type", UNSUPPORTED_TYPES[code], remedy)
    raise cursor.corrupt(f"tensor {name!r}: type", code, f"no such type; known are {readable}")


def _alignment(metadata: dict[str, Any], cursor: _Cursor) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.corrupt("general.alignment", value, f"must be a power of two up to {_MAX_ALIGNMENT}")
    return value


def _check_spans(stored: dict[str, _Stored], cursor: _Cursor) -> None:
    """Every tensor lies inside the file and none shares a byte with another."""
    end = 0
    for name, span in sorted(stored.items(), key=lambda item: item[1].start):
        if span.start + span.length > cursor.file.size:
            past = span.start + span.length - cursor.file.size
            raise cursor.corrupt(f"tensor {name!r}: end", span.start + span.length, f"is {past} bytes past the file")
        if span.start < end:
            raise cursor.corrupt(f"tensor {name!r}: offset", span.start, "overlaps another tensor")
        end = span.start + span.length
