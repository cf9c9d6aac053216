"""The safetensors format: `[u64 header length][JSON header][data]`, single files and sharded folders.

Our own reader: the format is small, and strict checks are the point (a header is untrusted input).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput
from octavo.weights.jsonfile import parse_json, read_json
from octavo.weights.tensors import CorruptFile, FileRows, MappedFile, TensorInfo, WeightFile

__all__ = ["SafetensorsFile", "ShardedSafetensors", "open_safetensors", "write_safetensors"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_HEADER = 32 << 20
_MAX_DIMS = 8
_MAX_SHARDS = 4096
_BITS16 = np.dtype("<u2")
# Stored name -> little-endian storage; BF16 and FP8 are widened by hand.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": _BITS16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": _BITS16, "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"),
}  # fmt: skip
_ROW_TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # stored types that native packing reads, by GGUF's numbers
_WIDENED = ("BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class _Span:
    start: int  # from the start of the file
    length: int  # bytes


class SafetensorsFile(WeightFile):
    """One `.safetensors` file, memory-mapped. `CorruptFile` when anything about it is inconsistent."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file = MappedFile(path, min_size=10)
        try:
            self._spans = self._parse()
        except BaseException:
            self._file.close()
            raise

    def _parse(self) -> dict[str, _Span]:
        path, size = self._file.path, self._file.size
        length = int.from_bytes(self._file.bytes_at(0, 8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CorruptFile(path, "header length", length, f"2 to {min(_MAX_HEADER, size - 8)} bytes are possible")
        header = parse_json(self._file.bytes_at(8, length), path, "header")
        self.metadata = _checked_metadata(header.pop("__metadata__", {}), path)
        data_start = 8 + length
        spans = {name: self._entry(name, entry, data_start) for name, entry in header.items()}
        _check_cover(spans, data_start, size, path)
        return spans

    def _entry(self, name: str, entry: Any, data_start: int) -> _Span:
        path = self._file.path
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CorruptFile(path, f"tensor {name!r}", entry, "must hold exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CorruptFile(path, f"tensor {name!r}: dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
        if not _naturals(shape) or len(shape) > _MAX_DIMS or 0 in shape:
            raise CorruptFile(path, f"tensor {name!r}: shape", shape, f"must be up to {_MAX_DIMS} positive integers")
        if not _naturals(offsets) or len(offsets) != 2:
            raise CorruptFile(path, f"tensor {name!r}: data_offsets", offsets, "must be two non-negative integers")
        want = math.prod(shape) * _DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != want:
            raise CorruptFile(path, f"tensor {name!r}: data_offsets", offsets, f"must span {want} bytes")
        self._infos[name] = TensorInfo(name, tuple(shape), dtype)
        return _Span(data_start + offsets[0], want)

    def read(self, name: str) -> NDArray[np.float32]:
        """The values as a new float32 array of `info(name).shape`."""
        info, span = self.info(name), self._spans[name]
        raw = self._file.array_at(span.start, span.length)
        return _to_float32(raw, info.dtype).reshape(info.shape)

    def stored(self, name: str) -> NDArray[Any]:
        """The values as a new array of the stored type; BF16 and FP8, which NumPy lacks, as float32."""
        info, span = self.info(name), self._spans[name]
        if info.dtype in _WIDENED:
            return self.read(name)
        return self._file.array_at(span.start, span.length).view(_DTYPES[info.dtype]).reshape(info.shape).copy()

    def in_file(self, name: str) -> FileRows | None:
        """A matrix as it lies in the file; None for a type that native packing does not read."""
        info, span = self.info(name), self._spans[name]
        if len(info.shape) != 2 or info.dtype not in _ROW_TYPES:
            return None
        return FileRows(info.shape, _ROW_TYPES[info.dtype], self._file.array_at(span.start, span.length))

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        self.info(name)
        return self._spans[name].length

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()


class ShardedSafetensors(WeightFile):
    """A folder with `model.safetensors.index.json`: one view over its shards."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        index_path = Path(folder) / INDEX_NAME
        index = read_json(index_path, _MAX_HEADER)
        self._home = _checked_weight_map(index.get("weight_map"), index_path)
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for shard in dict.fromkeys(self._home.values()):
                self._shards[shard] = SafetensorsFile(Path(folder) / shard)
            for name, shard in self._home.items():
                self._adopt(name, shard, index_path)
        except BaseException:
            self.close()
            raise
        metadata = index.get("metadata", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}

    def _adopt(self, name: str, shard: str, index_path: Path) -> None:
        if name not in self._shards[shard]._infos:
            raise CorruptFile(index_path, f"weight_map[{name!r}]", shard, "that shard has no such tensor")
        self._infos[name] = self._shards[shard].info(name)

    def read(self, name: str) -> NDArray[np.float32]:
        """The values as a new float32 array of `info(name).shape`."""
        self.info(name)
        return self._shards[self._home[name]].read(name)

    def stored(self, name: str) -> NDArray[Any]:
        """The values as a new array of the stored type; BF16 and FP8, which NumPy lacks, as float32."""
        self.info(name)
        return self._shards[self._home[name]].stored(name)

    def in_file(self, name: str) -> FileRows | None:
        """A matrix as it lies in its file; None for a type that native packing does not read."""
        self.info(name)
        return self._shards[self._home[name]].in_file(name)

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        self.info(name)
        return self._shards[self._home[name]].stored_bytes(name)

    def close(self) -> None:
        """Unmap every shard."""
        for shard in self._shards.values():
            shard.close()


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile | ShardedSafetensors:
    """A `.safetensors` file, or a folder holding one file or an index with shards."""
    place = Path(path)
    if not place.is_dir():
        return SafetensorsFile(place)
    if (place / INDEX_NAME).exists():
        return ShardedSafetensors(place)
    if (place / SINGLE_NAME).exists():
        return SafetensorsFile(place / SINGLE_NAME)
    files = sorted(place.glob("*.safetensors"))
    if len(files) == 1:
        return SafetensorsFile(files[0])
    raise InvalidInput("model folder", str(path), f"holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _checked_metadata(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CorruptFile(path, "__metadata__", value, "must map strings to strings")
    return value


def _checked_weight_map(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not value or not all(isinstance(item, str) for item in value.values()):
        raise CorruptFile(path, "weight_map", value, "must map tensor names to file names")
    shards = dict.fromkeys(value.values())
    if len(shards) > _MAX_SHARDS:
        raise CorruptFile(path, "weight_map", len(shards), f"names more than {_MAX_SHARDS} files")
    for shard in shards:
        # A shard is a sibling of its index: a path in a downloaded file never leaves its folder.
        if os.path.basename(shard) != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CorruptFile(path, "weight_map", shard, "must name .safetensors files of the same folder")
    return value


def _check_cover(spans: dict[str, _Span], start: int, size: int, path: Path) -> None:
    """The tensors must tile the data without gap or overlap, as the format demands."""
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.start != start:
            what = "overlaps the tensor before it" if span.start < start else "leaves a gap before it"
            raise CorruptFile(path, f"tensor {name!r}: data_offsets", span.start, what)
        start += span.length
    if start != size:
        raise CorruptFile(path, "file size", size, f"the tensors end at byte {start}")


def _to_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """`[bytes] u8 -> [n] f32`, always a copy."""
    stored = raw.view(_DTYPES[dtype])
    if dtype == "BF16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[stored]
    if dtype == "F8_E5M2":
        # E5M2 is the upper byte of a half.
        return (stored.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32)


def _e4m3_table() -> NDArray[np.float32]:
    """`[256] f32`: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, all ones is NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8.0
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_table()


def _stored(tensor: NDArray[Any]) -> tuple[str, bytes]:
    kind = "BOOL" if tensor.dtype == np.bool_ else f"{tensor.dtype.kind.upper()}{tensor.dtype.itemsize * 8}"
    if kind not in _DTYPES:
        raise InvalidInput("tensor dtype", str(tensor.dtype), f"write one of {', '.join(_DTYPES)}")
    return kind, np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).tobytes()


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: dict[str, NDArray[Any]],
    metadata: dict[str, str] | None = None,
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write one file, or (with `max_shard_bytes`) a folder of shards with its index.

    `path` is the file, or the folder. A shard holds at least one tensor. Types as in NumPy; none is converted.
    """
    if max_shard_bytes is None:
        _write_one(Path(path), tensors, metadata or {})
        return
    folder, shards = Path(path), _shard(tensors, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    home: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_one(folder / file_name, shard, metadata or {})
        home.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _shard(tensors: dict[str, NDArray[Any]], limit: int) -> list[dict[str, NDArray[Any]]]:
    shards: list[dict[str, NDArray[Any]]] = [{}]
    for name, tensor in tensors.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and held + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _write_one(path: Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        dtype, blob = _stored(tensor)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs)
