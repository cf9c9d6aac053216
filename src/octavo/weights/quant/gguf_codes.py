"""The GGUF types whose blocks are groups of 32 codes with a scale and an offset: Q4_0 and Q4_1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.integer import GroupCodes
from octavo.weights.tensors import TensorInfo

__all__ = ["gguf_codes"]

_BLOCK = 32
_BYTES = {"Q4_0": 18, "Q4_1": 20}


def gguf_codes(raw: NDArray[np.uint8], info: TensorInfo) -> GroupCodes | None:
    """Codes of a matrix `[N, K]` from its stored bytes; None for a type that is not of this kind.

    Q4_0: d, 16 bytes; w = d * code - 8 * d. Q4_1: d, m, 16 bytes; w = d * code + m. The low nibbles are values 0-15.
    """
    if info.dtype not in _BYTES:
        return None
    rows, columns = info.shape
    blocks = raw.reshape(-1, _BYTES[info.dtype])
    scales = _halves(blocks[:, :2])
    offsets = scales * np.float32(-8) if info.dtype == "Q4_0" else _halves(blocks[:, 2:4])
    packed = blocks[:, -16:]
    codes = np.concatenate((packed & 15, packed >> 4), axis=1).reshape(rows, columns)
    groups = (rows, columns // _BLOCK)
    return GroupCodes(4, _BLOCK, codes, scales.reshape(groups), offsets.reshape(groups))


def _halves(values: NDArray[np.uint8]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view("<f2").astype(np.float32)
