"""GGUF tensor types and their exact dequantization.

A quantized row is a run of blocks; each block is a few packed fields. Every decoder takes `[n, block bytes] u8`
and returns `[n, block values] f32`, with the multiplications in the order of ggml's reference so that the result is
equal to the last bit. Layouts: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GGUF_TYPES", "UNSUPPORTED_TYPES", "TensorType", "dequantize"]

Bytes = NDArray[np.uint8]  # [n, block bytes]
Floats = NDArray[np.float32]  # [n, block values]

_CHUNK_VALUES = 1 << 18  # decoded at a time: temporaries stay in the cache, memory stays flat
_NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


@dataclass(frozen=True)
class TensorType:
    """One storage type: `block` values in `size` bytes. `decode` is None for plain numbers of dtype `plain`."""

    name: str
    block: int
    size: int
    decode: Callable[[Bytes], Floats] | None = None
    plain: str = ""


def _half(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of every block: `[n, 1] f32`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _split(packed: Bytes, width: int, shifts: NDArray[np.uint8], mask: int) -> Bytes:
    """Unpack fields: `[n, k * width] u8 -> [n, k * len(shifts), width]`, the fields of `width` bytes in shift order."""
    n = len(packed)
    fields = (packed.reshape(n, -1, 1, width) >> shifts) & np.uint8(mask)
    return fields.reshape(n, -1, width)


def _low_high(blocks: Bytes, at: int) -> Bytes:
    """16 bytes of nibbles at `at`: values 0-15 are the low halves, 16-31 the high ones. `[n, 32] u8`."""
    return _split(blocks[:, at : at + 16], 16, _NIBBLES, 15).reshape(len(blocks), 32)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits at `at`, least significant first, each as 0 or 16. `[n, 32] u8`."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_low_high(blocks, 2).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _low_high(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = _low_high(blocks, 6) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    values = _low_high(blocks, 8) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q2_k(blocks: Bytes) -> Floats:
    """scales[16] (low: scale, high: minimum), 2-bit values[64], d, dmin."""
    scales = blocks[:, :16]
    scale = _half(blocks, 80) * (scales & 15).astype(np.float32)  # [n, 16]
    lowest = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    values = _split(blocks[:, 16:80], 32, _PAIRS, 3).reshape(len(blocks), 16, 16)
    return (scale[..., None] * values.astype(np.float32) - lowest[..., None]).reshape(len(blocks), 256)


def _q3_scales(packed: Bytes) -> Floats:
    """16 six-bit scales in 12 bytes: low nibbles in bytes 0-7, upper pairs in bytes 8-11. `[n, 16] f32`."""
    low = _split(packed[:, :8], 8, _NIBBLES, 15).reshape(-1, 16)
    high = _split(packed[:, 8:], 4, _PAIRS, 3).reshape(-1, 16)
    return (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)


def _q3_k(blocks: Bytes) -> Floats:
    """high bits[32] (one plane per bit; a clear bit means minus 4), 2-bit values[64], scales[12], d."""
    scale = _half(blocks, 108) * _q3_scales(blocks[:, 96:108])
    low = _split(blocks[:, 32:96], 32, _PAIRS, 3).reshape(len(blocks), 16, 16)
    high = _split(blocks[:, :32], 32, _BITS, 1).reshape(len(blocks), 16, 16)
    values = (low | (high << np.uint8(2))).astype(np.float32) - np.float32(4)
    return (scale[..., None] * values).reshape(len(blocks), 256)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """8 six-bit scales and 8 six-bit minima in 12 bytes: `([n, 8], [n, 8]) f32`."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    lowest = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scale.astype(np.float32), lowest.astype(np.float32)


def _affine_k(blocks: Bytes, values: Bytes) -> Floats:
    """`d * scale * value - dmin * minimum` for `[n, 8, 32]` values; d, dmin and 12 scale bytes start the block."""
    scale, lowest = _k_scales(blocks[:, 4:16])
    scale, lowest = _half(blocks, 0) * scale, _half(blocks, 2) * lowest
    return (scale[..., None] * values.astype(np.float32) - lowest[..., None]).reshape(len(blocks), 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _affine_k(blocks, _split(blocks[:, 16:], 32, _NIBBLES, 15))


def _q5_k(blocks: Bytes) -> Floats:
    high = _split(blocks[:, 16:48], 32, _BITS, 1) << np.uint8(4)
    return _affine_k(blocks, _split(blocks[:, 48:], 32, _NIBBLES, 15) | high)


def _q6_k(blocks: Bytes) -> Floats:
    """low nibbles[128], upper pairs[64], i8 scales[16], d."""
    low = _split(blocks[:, :128], 64, _NIBBLES, 15).reshape(len(blocks), 8, 32)
    high = _split(blocks[:, 128:192], 32, _PAIRS, 3) << np.uint8(4)
    values = (low | high).reshape(len(blocks), 16, 16).astype(np.float32) - np.float32(32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[..., None] * values).reshape(len(blocks), 256)


# The numbers are ggml's, and part of the file format.
GGUF_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, plain="<f4"),
    1: TensorType("F16", 1, 2, plain="<f2"),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    10: TensorType("Q2_K", 256, 84, _q2_k),
    11: TensorType("Q3_K", 256, 110, _q3_k),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    24: TensorType("I8", 1, 1, plain="i1"),
    25: TensorType("I16", 1, 2, plain="<i2"),
    26: TensorType("I32", 1, 4, plain="<i4"),
    27: TensorType("I64", 1, 8, plain="<i8"),
    28: TensorType("F64", 1, 8, plain="<f8"),
    30: TensorType("BF16", 1, 2, plain="bf16"),
}
# Known to the format, not to us: named so that the refusal can say which.
UNSUPPORTED_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def dequantize(raw: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    """All values of a tensor: `[bytes] u8 -> [bytes // size * block] f32`, always a new array."""
    if kind.decode is None:
        return _widen(raw, kind.plain)
    blocks = raw.reshape(-1, kind.size)
    out = np.empty((len(blocks), kind.block), np.float32)
    step = max(1, _CHUNK_VALUES // kind.block)
    with np.errstate(all="ignore"):  # a scale may be any half, infinities and NaN included
        for start in range(0, len(blocks), step):
            out[start : start + step] = kind.decode(blocks[start : start + step])
    return out.reshape(-1)


def _widen(raw: NDArray[np.uint8], plain: str) -> NDArray[np.float32]:
    if plain == "bf16":
        wide = raw.view("<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    stored: NDArray[Any] = raw.view(plain)
    with np.errstate(all="ignore"):
        return stored.astype(np.float32)
