"""A quantized weight on arrays: it stays packed, and rows are dequantized a few at a time inside a product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantization import QuantConfig, QuantizedTensor

Floats = NDArray[np.float32]

ROWS_AT_ONCE = 256  # dequantized rows that exist at a time


@dataclass(frozen=True)
class NumpyQuantized:
    """A matrix [N, K] as in quantization.QuantizedTensor, on arrays."""

    config: QuantConfig
    shape: tuple[int, int]
    codes: NDArray[np.uint8]  # [N, packed bytes]
    scales: Floats  # [N, groups]
    zero_points: Floats  # [N, groups]

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> NumpyQuantized:
        """The same codes and scales as arrays."""
        codes = np.frombuffer(b"".join(tensor.codes), np.uint8).reshape(tensor.shape[0], -1)
        scales = np.array(tensor.scales, np.float32)
        if tensor.config.symmetric:
            zeros = np.full_like(scales, tensor.config.offset)
        else:
            zeros = np.array([list(row) for row in tensor.zero_points], np.float32)
        return cls(tensor.config, tensor.shape, codes, scales, zeros)

    def rows(self, index: slice | NDArray[np.int64]) -> Floats:
        """Dequantized rows, [*, K]."""
        codes = self.codes[index]
        if self.config.bits == 4:
            codes = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(codes), -1)[:, : self.shape[1]]
        group = np.arange(self.shape[1]) // self.config.group_size
        return (codes - self.zero_points[index][:, group]) * self.scales[index][:, group]

    def times(self, x: Floats) -> Floats:
        """x[T, K] @ this^T -> [T, N]."""
        out = np.empty((len(x), self.shape[0]), np.float32)
        for start in range(0, self.shape[0], ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            out[:, part] = x @ self.rows(part).T
        return out
