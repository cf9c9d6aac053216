"""How the checkpoints of others store a matrix `[N, K]`, by the tensors beside its name.

    GPTQ                qweight [K * b / 32, N], qzeros [G, N * b / 32], scales [G, N], g_idx [K]
                        the zero of the first version is stored less one, in its own bits (0 is stored as 15)
    AWQ                 qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]; the nibbles of a word are columns
                        0 2 4 6 1 3 5 7
    compressed-tensors  weight_packed [N, K * b / 32], weight_scale [N, G], weight_zero_point [N * b / 32, G],
                        weight_shape [2], weight_g_idx [K]; codes and zeros are signed, stored from 0
                        or weight int8 [N, K], weight_scale [N, G], weight_zero_point [N, G]
                        or weight FP8 [N, K], weight_scale [1], [N, 1] or one for each block
    fp8                 weight FP8 [N, K], weight_scale_inv, one for each block (a factor, despite its name)

Every shape is checked against the others before anything is made of it: `CorruptFile` names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.integer import IntegerWeight, unpack_words
from octavo.weights.quant.settings import QuantSettings, Scheme
from octavo.weights.tensors import CorruptFile, TensorInfo

__all__ = ["MARKS", "SUFFIXES", "StoredMatrix", "Tensors", "find_matrices", "float_values"]

Floats = NDArray[np.float32]
Shape = tuple[int, ...]

_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of a word that holds column i
_FP8 = ("F8_E4M3", "F8_E5M2")
# method -> the tensor that makes a module a quantized one
MARKS = {
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv", "weight_scale"),
}
# what belongs to a quantized module, beside `weight` and `bias`; scales of activations that we find as we go
SUFFIXES = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
)


class Tensors(Protocol):
    """Raw tensors by name."""

    def info(self, name: str) -> TensorInfo:
        """Shape and stored type."""
        ...

    def stored(self, name: str) -> NDArray[Any]:
        """The values in their stored type."""
        ...

    def read(self, name: str) -> Floats:
        """The values as float32."""
        ...


class StoredMatrix:
    """One matrix of a quantized checkpoint: its shapes are checked when it is made, its values when they are read."""

    def __init__(
        self, path: Path, module: str, infos: Mapping[str, TensorInfo], tensors: Tensors, settings: QuantSettings
    ) -> None:
        self.path, self.module, self.settings = path, module, settings
        self.infos, self.tensors = infos, tensors  # infos by suffix
        self.scheme, self.shape = self._resolve()
        size = self.scheme.group_size
        kind = "FP8" if self.scheme.kind == "float" else f"INT{self.scheme.bits}"
        self.label = f"{settings.method} {kind}" + (f" g{size}" if size else "")

    # ---- shapes

    def _resolve(self) -> tuple[Scheme, tuple[int, int]]:
        method = self.settings.method
        if method == "gptq":
            return self._gptq_shape()
        if method == "awq":
            return self._awq_shape()
        if "weight_packed" in self.infos:
            return self._packed_shape()
        return self._plain_shape()

    def _info(self, suffix: str, dtypes: tuple[str, ...], dims: int) -> Shape:
        info = self.infos.get(suffix)
        if info is None:
            raise self._error(suffix, "missing", f"a matrix of {self.settings.method} needs it")
        if info.dtype not in dtypes or len(info.shape) != dims:
            raise self._error(suffix, (info.dtype, list(info.shape)), f"must be {dims}-d of {' or '.join(dtypes)}")
        return info.shape

    def _error(self, suffix: str, value: object, reason: str) -> CorruptFile:
        return CorruptFile(self.path, f"tensor {f'{self.module}.{suffix}'!r}", value, reason)

    def _expect(self, suffix: str, dtypes: tuple[str, ...], shape: Shape) -> None:
        found = self._info(suffix, dtypes, len(shape))
        if found != shape:
            raise self._error(suffix, list(found), f"must be {list(shape)}, to fit the matrix")

    def _gptq_shape(self) -> tuple[Scheme, tuple[int, int]]:
        scheme = self.settings.schemes[0]
        per_word = 32 // scheme.bits
        words, rows = self._info("qweight", ("I32",), 2)
        columns = words * per_word
        if rows % per_word:
            raise self._error("qweight", [words, rows], f"its width must be a multiple of {per_word}")
        groups = self._num_groups("qweight", columns, scheme.group_size)
        self._expect("qzeros", ("I32",), (groups, rows // per_word))
        self._expect("scales", _SCALES, (groups, rows))
        if "g_idx" in self.infos:
            self._expect("g_idx", ("I32", "I64"), (columns,))
        return scheme, (rows, columns)

    def _awq_shape(self) -> tuple[Scheme, tuple[int, int]]:
        scheme = self.settings.schemes[0]
        columns, words = self._info("qweight", ("I32",), 2)
        groups = self._num_groups("qweight", columns, scheme.group_size)
        self._expect("qzeros", ("I32",), (groups, words))
        self._expect("scales", _SCALES, (groups, words * 8))
        return scheme, (words * 8, columns)

    def _num_groups(self, suffix: str, columns: int, size: int) -> int:
        if size and columns % size:
            raise self._error(suffix, columns, f"inputs must be a multiple of the group size {size}")
        return columns // size if size else 1

    def _packed_shape(self) -> tuple[Scheme, tuple[int, int]]:
        rows, words = self._info("weight_packed", ("I32",), 2)
        _, groups = self._info("weight_scale", _SCALES, 2)
        self._expect("weight_shape", ("I64", "I32"), (2,))
        stated = self.tensors.stored(f"{self.module}.weight_shape").tolist()
        if stated[0] != rows or not 0 < stated[1] <= words * 8:
            raise self._error("weight_shape", stated, f"does not fit packed codes of {[rows, words]}")
        for scheme in self.settings.schemes:
            if _fits(scheme, stated[1], words, groups):
                break
        else:
            raise self._error("weight_packed", [rows, words], "fits no scheme of quantization_config")
        self._expect("weight_scale", _SCALES, (rows, groups))
        if not scheme.symmetric:
            self._expect("weight_zero_point", ("I32",), (-(-rows * scheme.bits // 32), groups))
        if "weight_g_idx" in self.infos:
            self._expect("weight_g_idx", ("I32", "I64"), (stated[1],))
        return scheme, (rows, stated[1])

    def _plain_shape(self) -> tuple[Scheme, tuple[int, int]]:
        info = self.infos.get("weight")
        kind = "int" if info is not None and info.dtype == "I8" else "float"
        rows, columns = self._info("weight", ("I8", *_FP8), 2)
        for scheme in self.settings.schemes:
            if scheme.kind == kind and scheme.bits == 8:
                break
        else:
            raise self._error("weight", info and info.dtype, "fits no scheme of quantization_config")
        scales = self.infos[self._scale_name()].shape
        if scales not in _scale_shapes(scheme, rows, columns):
            raise self._error(self._scale_name(), list(scales), f"does not fit a matrix {[rows, columns]}")
        if not scheme.symmetric:
            self._expect("weight_zero_point", ("I8", "I32"), scales)
        return scheme, (rows, columns)

    def _scale_name(self) -> str:
        name = "weight_scale_inv" if "weight_scale_inv" in self.infos else "weight_scale"
        self._info(name, _SCALES, len(self.infos[name].shape) if name in self.infos else 2)
        return name

    # ---- values

    @property
    def is_integer(self) -> bool:
        """Codes, scales and zeros; otherwise FP8 values with factors."""
        return self.scheme.kind == "int"

    def integers(self) -> IntegerWeight:
        """The matrix as integers. `CorruptFile` for a group index that is out of range."""
        if self.settings.method == "gptq":
            return self._gptq()
        if self.settings.method == "awq":
            return self._awq()
        return self._packed() if "weight_packed" in self.infos else self._plain()

    def floats(self) -> Floats:
        """The matrix as float32, [N, K]."""
        if self.is_integer:
            return self.integers().dequantize()
        values = self.tensors.read(f"{self.module}.weight")
        return float_values(values, self.tensors.read(f"{self.module}.{self._scale_name()}"), self.scheme)

    def _get(self, suffix: str) -> NDArray[Any]:
        return self.tensors.stored(f"{self.module}.{suffix}")

    def _groups(self, suffix: str, count: int) -> NDArray[np.intp]:
        """The group of each column: as stored, or runs of equal size."""
        columns = self.shape[1]
        if suffix not in self.infos:
            return np.arange(columns) // (self.scheme.group_size or columns)
        index = self._get(suffix).astype(np.intp)
        if index.min() == -1 == index.max():  # a place kept for an order that is not used
            return np.arange(columns) // (self.scheme.group_size or columns)
        if index.min() < 0 or index.max() >= count:
            raise self._error(suffix, int(index.min()), f"must be groups from 0 to {count - 1}")
        return index

    def _gptq(self) -> IntegerWeight:
        bits = self.scheme.bits
        codes = unpack_words(np.ascontiguousarray(self._get("qweight").T), bits)
        zeros = unpack_words(self._get("qzeros"), bits)
        zeros = (zeros + np.uint8(self.settings.zero_shift)) & np.uint8((1 << bits) - 1)
        scales = self.tensors.read(f"{self.module}.scales")
        groups = self._groups("g_idx", len(scales))
        return IntegerWeight(bits, codes, _turned(scales), _turned(zeros), groups)

    def _awq(self) -> IntegerWeight:
        codes, zeros = (self._awq_order(self._get(name)) for name in ("qweight", "qzeros"))
        scales = self.tensors.read(f"{self.module}.scales")
        groups = self._groups("", len(scales))
        return IntegerWeight(4, np.ascontiguousarray(codes.T), _turned(scales), _turned(zeros), groups)

    @staticmethod
    def _awq_order(words: NDArray[Any]) -> NDArray[np.uint8]:
        nibbles = unpack_words(words, 4).reshape(len(words), -1, 8)
        return nibbles[:, :, _AWQ_ORDER].reshape(len(words), -1)

    def _packed(self) -> IntegerWeight:
        bits, (rows, columns) = self.scheme.bits, self.shape
        codes = unpack_words(self._get("weight_packed"), bits)[:, :columns]
        scales = self.tensors.read(f"{self.module}.weight_scale")
        zeros = np.full_like(scales, 1 << (bits - 1))
        if not self.scheme.symmetric:
            words = np.ascontiguousarray(self._get("weight_zero_point").T)
            zeros = _turned(unpack_words(words, bits)[:, :rows])
        return IntegerWeight(bits, codes, scales, zeros, self._groups("weight_g_idx", scales.shape[1]))

    def _plain(self) -> IntegerWeight:
        columns = self.shape[1]
        codes = self._get("weight").view(np.uint8) ^ np.uint8(128)
        scales = self._rowwise(self.tensors.read(f"{self.module}.weight_scale"))
        zeros = np.full_like(scales, 128)
        if not self.scheme.symmetric:
            zeros = self._rowwise(self.tensors.read(f"{self.module}.weight_zero_point")) + np.float32(128)
        groups = np.arange(columns) // (self.scheme.group_size or columns)
        return IntegerWeight(8, codes, scales, zeros, groups)

    def _rowwise(self, values: Floats) -> Floats:
        """[N, G] of one value for the tensor, or of one for each row (and group)."""
        values = values.reshape(1, 1) if values.size == 1 else values.reshape(len(values), -1)
        return np.ascontiguousarray(np.broadcast_to(values, (self.shape[0], values.shape[1])))


_SCALES = ("F16", "BF16", "F32")


def _fits(scheme: Scheme, columns: int, words: int, groups: int) -> bool:
    """Whether packed codes of so many words, with so many scales in a row, are `columns` columns of a scheme."""
    if scheme.kind != "int" or scheme.strategy not in ("group", "channel"):
        return False
    return words == -(-columns * scheme.bits // 32) and groups == -(-columns // (scheme.group_size or columns))


def _turned(values: NDArray[Any]) -> Floats:
    return np.ascontiguousarray(values.T, np.float32)


def _scale_shapes(scheme: Scheme, rows: int, columns: int) -> tuple[Shape, ...]:
    """Shapes that the scales of a matrix may have."""
    if scheme.strategy == "tensor":
        return (), (1,), (1, 1)
    if scheme.strategy == "channel":
        return (rows, 1), (rows,)
    if scheme.strategy == "group":
        return ((rows, -(-columns // scheme.group_size)),)
    high, wide = scheme.block
    return ((-(-rows // high), -(-columns // wide)),)


def float_values(values: Floats, scales: Floats, scheme: Scheme) -> Floats:
    """FP8 values times their factors. [N, K]; the factors' shape was checked."""
    if scheme.strategy == "block":
        rows, columns = values.shape
        scales = scales.repeat(scheme.block[0], 0)[:rows].repeat(scheme.block[1], 1)[:, :columns]
    elif scheme.strategy == "group":
        scales = scales.repeat(scheme.group_size, 1)[:, : values.shape[1]]
    else:
        scales = scales.reshape(-1, 1)
    with np.errstate(all="ignore"):
        return values * scales


def find_matrices(
    path: Path, infos: Mapping[str, TensorInfo], tensors: Tensors, settings: QuantSettings
) -> dict[str, StoredMatrix]:
    """Module name to matrix, for every quantized module of a checkpoint, in file order."""
    marks = MARKS[settings.method]
    modules = [name.rpartition(".")[0] for name in infos if name.rpartition(".")[2] in marks]
    found = {}
    for module in dict.fromkeys(modules):
        parts = {s: infos[f"{module}.{s}"] for s in ("weight", *SUFFIXES) if f"{module}.{s}" in infos}
        found[module] = StoredMatrix(path, module, parts, tensors, settings)
    return found
