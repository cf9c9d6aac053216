"""The GGUF types whose blocks are groups of 32 codes with a scale and an offset: Q4_0, Q4_1 and Q8_0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.integer import GroupCodes
from octavo.weights.tensors import TensorInfo

__all__ = ["gguf_codes"]

_BLOCK = 32
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def gguf_codes(raw: NDArray[np.uint8], info: TensorInfo) -> GroupCodes | None:
    """Codes of a matrix `[N, K]` from its stored bytes; None for a type that is not of this kind.

    Q4_0: d, 16 bytes; w = d * code - 8 * d. Q4_1: d, m, 16 bytes; w = d * code + m. The low nibbles are values 0-15.
    Q8_0: d, 32 bytes; w = d * code.
    """
    if info.dtype not in _BYTES:
        return None
    rows, columns = info.shape
    blocks = raw.reshape(-1, _BYTES[info.dtype])
    groups = (rows, columns // _BLOCK)
    scales = _halves(blocks[:, :2]).reshape(groups)
    if info.dtype == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).reshape(rows, columns)
        return GroupCodes(8, _BLOCK, codes, scales, np.zeros_like(scales))
    offsets = scales * np.float32(-8) if info.dtype == "Q4_0" else _halves(blocks[:, 2:4]).reshape(groups)
    codes = np.empty((len(blocks), _BLOCK), np.uint8)
    np.bitwise_and(blocks[:, -16:], 15, out=codes[:, :16])
    np.right_shift(blocks[:, -16:], 4, out=codes[:, 16:])
    return GroupCodes(4, _BLOCK, codes.reshape(rows, columns), scales, offsets)


def _halves(values: NDArray[np.uint8]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view("<f2").astype(np.float32)
