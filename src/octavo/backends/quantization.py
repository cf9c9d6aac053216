"""Integer weights in the standard library: int8 and int4, symmetric or with a zero point, one scale per group of a row.

    weight ~ scale * (code - zero_point)        group g of a row holds its columns g * group_size .. + group_size

Codes are stored packed: a byte each for int8, two to a byte for int4 (low half first). Symmetric codes are kept with an
offset of 2^(bits - 1), so a stored code is never negative and the offset plays the zero point. A range always includes
zero, so zero is exact; |weight - dequantized| <= scale / 2 for every value.
"""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from octavo.core.errors import InvalidInput

GROUP_SIZES = (16, 32, 64, 128)
FLOAT32_MAX = 3.4028234663852886e38
SMALLEST = 2.0**-149  # the smallest float32: the scale of a group that underflows
SCALE_BYTES = 4


@dataclass(frozen=True)
class QuantConfig:
    """How a weight is quantized. Raises InvalidInput for bits other than 8 or 4, or an unsupported group size."""

    bits: int = 8
    group_size: int = 32  # columns that share a scale; the last group of a row may be shorter
    symmetric: bool = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise InvalidInput("bits", self.bits, "supported: 8 and 4")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise InvalidInput("group_size", self.group_size, f"supported: {', '.join(map(str, GROUP_SIZES))}")

    @property
    def levels(self) -> int:
        """The largest stored code."""
        return (1 << self.bits) - 1

    @property
    def offset(self) -> int:
        """The zero point of every symmetric group."""
        return 1 << (self.bits - 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, enough to dequantize."""
        return {"bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [rows, columns] as packed codes, one scale and zero point per row and group."""

    config: QuantConfig
    shape: tuple[int, int]
    codes: tuple[bytes, ...]  # [rows], packed
    scales: tuple[array[float], ...]  # [rows][groups] float32
    zero_points: tuple[bytes, ...]  # [rows][groups]; empty when symmetric

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed tensor holds: codes, scales and zero points."""
        groups = sum(map(len, self.scales))
        return sum(map(len, self.codes)) + groups * SCALE_BYTES + sum(map(len, self.zero_points))

    def row(self, index: int) -> list[float]:
        """One dequantized row, [columns]."""
        size = self.config.group_size
        codes, zeros = self._codes(index), self._zeros(index)
        return [self.scales[index][i // size] * (code - zeros[i // size]) for i, code in enumerate(codes)]

    def times(self, x: Sequence[float]) -> list[float]:
        """This matrix times a vector: [columns] -> [rows]. Scales enter once per group; no dequantized copy is made."""
        size = self.config.group_size
        parts = [x[i : i + size] for i in range(0, len(x), size)]
        sums = [sum(part) for part in parts]
        return [self._dot(index, parts, sums) for index in range(self.shape[0])]

    def _dot(self, index: int, parts: list[Sequence[float]], sums: list[float]) -> float:
        size = self.config.group_size
        codes, zeros = self._codes(index), self._zeros(index)
        total = 0.0
        for g, part in enumerate(parts):
            product = sum(map(mul, part, codes[g * size : (g + 1) * size]))
            total += self.scales[index][g] * (product - zeros[g] * sums[g])
        return total

    def _codes(self, index: int) -> Sequence[int]:
        if self.config.bits == 8:
            return self.codes[index]
        return [code for byte in self.codes[index] for code in (byte & 15, byte >> 4)][: self.shape[1]]

    def _zeros(self, index: int) -> Sequence[int]:
        if self.config.symmetric:
            return [self.config.offset] * len(self.scales[index])
        return self.zero_points[index]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the config as metadata, bytes as base64, scales as exact floats."""
        return {
            "config": self.config.as_dict(),
            "shape": list(self.shape),
            "codes": [base64.b64encode(row).decode() for row in self.codes],
            "scales": [list(row) for row in self.scales],
            "zero_points": [list(row) for row in self.zero_points],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> QuantizedTensor:
        """The inverse of `to_dict`."""
        return cls(
            QuantConfig(**value["config"]),
            (value["shape"][0], value["shape"][1]),
            tuple(base64.b64decode(row, validate=True) for row in value["codes"]),
            tuple(array("f", row) for row in value["scales"]),
            tuple(bytes(row) for row in value["zero_points"]),
        )


def quantize(matrix: Sequence[Sequence[float]], config: QuantConfig) -> QuantizedTensor:
    """Quantize a matrix. Raises InvalidInput when it is empty, ragged, or holds a value that float32 does not."""
    columns = len(matrix[0]) if len(matrix) else 0
    if not columns:
        raise InvalidInput("matrix", matrix, "give at least one row and one column")
    codes, scales, zeros = [], [], []
    for index, row in enumerate(matrix):
        _check(row, columns, index)
        groups = [_quantize_group(row[i : i + config.group_size], config) for i in range(0, columns, config.group_size)]
        codes.append(_pack([code for group in groups for code in group[0]], config.bits))
        scales.append(array("f", [group[1] for group in groups]))
        zeros.append(b"" if config.symmetric else bytes(group[2] for group in groups))
    return QuantizedTensor(config, (len(matrix), columns), tuple(codes), tuple(scales), tuple(zeros))


def dequantize(tensor: QuantizedTensor) -> list[list[float]]:
    """The whole matrix, [rows][columns]."""
    return [tensor.row(index) for index in range(tensor.shape[0])]


def report(matrix: Sequence[Sequence[float]], tensor: QuantizedTensor) -> dict[str, Any]:
    """Metadata, error (absolute) and bytes (before: float32), as plain JSON values."""
    errors = [
        abs(a - b)
        for index, row in enumerate(matrix)
        for a, b in zip(row, tensor.row(index), strict=True)
    ]  # fmt: skip
    before = 4 * len(errors)
    return {
        **tensor.config.as_dict(),
        "shape": list(tensor.shape),
        "max_error": max(errors),
        "mean_error": math.fsum(errors) / len(errors),
        "max_scale": max(max(row) for row in tensor.scales),
        "bytes_before": before,
        "bytes_after": tensor.num_bytes,
        "ratio": tensor.num_bytes / before,
    }


def _check(row: Sequence[float], columns: int, index: int) -> None:
    if len(row) != columns:
        raise InvalidInput(f"matrix row {index}", f"{len(row)} values", f"give {columns}, as in the first row")
    for value in row:
        if not abs(value) <= FLOAT32_MAX:  # false for NaN as well
            raise InvalidInput(f"matrix row {index}", value, "values must be finite and fit in float32")


def _quantize_group(values: Sequence[float], config: QuantConfig) -> tuple[list[int], float, int]:
    """(codes, scale, zero point) of one group. The scale is rounded up to float32, so the range is always covered."""
    low, high = min(0.0, *values), max(0.0, *values)
    if config.symmetric:
        scale = _scale_up(max(-low, high) / (config.offset - 1))
        zero = config.offset
        lowest = 1  # the code 0 would be one step further from zero than any positive code
    else:
        scale = _scale_up(high / config.levels - low / config.levels)
        zero = min(config.levels, round(-low / scale))
        lowest = 0
    codes = [min(config.levels, max(lowest, round(value / scale) + zero)) for value in values]
    return codes, scale, zero


def _scale_up(scale: float) -> float:
    """The smallest float32 that is not below a non-negative scale; 1 for an all-zero group."""
    if scale == 0.0:
        return 1.0
    nearest = array("f", (scale,))[0]
    if nearest < scale:
        bits: int = struct.unpack("<I", struct.pack("<f", nearest))[0]
        nearest = struct.unpack("<f", struct.pack("<I", bits + 1))[0]
    return max(nearest, SMALLEST)


def _pack(codes: list[int], bits: int) -> bytes:
    if bits == 8:
        return bytes(codes)
    even = codes + [0] * (len(codes) % 2)
    return bytes(low | high << 4 for low, high in zip(even[::2], even[1::2], strict=True))
