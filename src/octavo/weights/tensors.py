"""The common view of a file of weights, and the error for a file that cannot be trusted."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput

__all__ = ["CorruptFile", "FileRows", "MappedFile", "TensorInfo", "WeightFile", "WeightSource", "open_regular"]


class CorruptFile(InvalidInput):
    """A model file breaks its own format. `path` is the file; field, value and remedy as in `InvalidInput`."""

    def __init__(self, path: str | os.PathLike[str], field: str, value: object, reason: str) -> None:
        super().__init__(f"{os.path.basename(path)}: {field}", value, f"{reason}; fetch or convert the file again")
        self.args = (path, field, value, reason)
        self.path = Path(path)


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. `shape` is logical and row-major (a linear weight is `[out, in]`); `dtype` is the stored
    format by its own name (`F32`, `BF16`, `Q4_K`, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileRows:
    """A matrix [N, K] as a mapped file holds it, row after row: what native packing reads without a copy."""

    shape: tuple[int, ...]
    type: int  # GGUF's number of the stored type
    data: NDArray[np.uint8]  # a view of the mapping: drop it before `close`
    heads: int = 0  # not 0: the rows of each head lie as interleaved rope wants them
    mapped: bool = True  # its pages may be given back to the system once they were read


@runtime_checkable
class WeightSource(Protocol):
    """What a model is loaded from. `metadata` is the file's own: plain values, never code."""

    metadata: dict[str, Any]

    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and stored type; `InvalidInput` when there is no such tensor."""
        ...

    def read(self, name: str) -> NDArray[np.float32]:
        """The exact values as a new, writable float32 array of `info(name).shape`."""
        ...

    def close(self) -> None:
        """Give the files back. Reading afterwards is an error."""
        ...

    def __enter__(self) -> WeightSource: ...

    def __exit__(self, *exc: object) -> None: ...


class WeightFile:
    """What every source shares: a table of tensors, lookup with a good error, and use as a context manager."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}

    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Shape and stored type of one tensor; `InvalidInput` when there is no such tensor."""
        found = self._infos.get(name)
        if found is None:
            raise InvalidInput("tensor", name, f"not among the {len(self._infos)} tensors of this model")
        return found

    def close(self) -> None:
        """Give the files back."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_regular(path: str | os.PathLike[str]) -> tuple[BinaryIO, int]:
    """A regular file opened for reading, unbuffered, and its size; `InvalidInput` for anything else."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise InvalidInput("path", str(path), f"cannot be opened ({error.strerror})") from error
    held = os.fstat(handle)
    if not stat.S_ISREG(held.st_mode):
        os.close(handle)
        raise InvalidInput("path", str(path), "give a regular file")
    return os.fdopen(handle, "rb", buffering=0), held.st_size


class MappedFile:
    """A regular file mapped read-only: every access is checked against the real size."""

    def __init__(self, path: str | os.PathLike[str], min_size: int) -> None:
        self.path = Path(path)
        file, self.size = open_regular(path)
        with file:
            if self.size < min_size:
                raise CorruptFile(path, "file size", self.size, f"at least {min_size} bytes are needed")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._closed = False

    def bytes_at(self, start: int, length: int) -> bytes:
        """`[start, start + length)`; the caller has checked the range, a breach is an error and never short."""
        if start < 0 or length < 0 or start + length > self.size:
            raise CorruptFile(self.path, "read", (start, length), f"the file has {self.size} bytes")
        return self._map[start : start + length]

    def array_at(self, start: int, length: int) -> NDArray[np.uint8]:
        """`[start, start + length)` as a view of the mapping: drop it before `close`."""
        if self._closed:
            raise InvalidInput("path", str(self.path), "the file was closed; open it again")
        if start < 0 or length < 0 or start + length > self.size:
            raise CorruptFile(self.path, "read", (start, length), f"the file has {self.size} bytes")
        return np.frombuffer(self._map, dtype=np.uint8, count=length, offset=start)

    @property
    def view(self) -> memoryview:
        """The whole file; release it before `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap, as soon as the last view is gone: an error on its way up may hold one. A second call does nothing."""
        self._closed = True
        with contextlib.suppress(BufferError):
            self._map.close()
