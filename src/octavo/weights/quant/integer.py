"""One matrix of integers: `w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])`, g = the group of column k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupCodes", "IntegerWeight", "pack_words", "unpack_words"]

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class GroupCodes:
    """What native packing takes: `w[n, k] = scale[n, k // group_size] * code[n, k] + offset[n, ...]`, exactly.

    Codes are 0..15 in 4 bits, int8 in 8 bits (then every offset is 0). The last group of a row may be shorter.
    """

    bits: int
    group_size: int
    codes: NDArray[Any]  # [N, K] uint8 (4 bits) or int8
    scales: Floats  # [N, groups]
    offsets: Floats  # [N, groups]

    def reordered(self, order: Callable[[NDArray[Any]], NDArray[Any]]) -> GroupCodes:
        """The same rows in another order."""
        return GroupCodes(
            self.bits, self.group_size, *(order(part) for part in (self.codes, self.scales, self.offsets))
        )

    def dequantize(self) -> Floats:
        """The values, [N, K]."""
        columns = self.codes.shape[1]
        scales, offsets = (part.repeat(self.group_size, 1)[:, :columns] for part in (self.scales, self.offsets))
        return scales * self.codes + offsets


@dataclass(frozen=True)
class IntegerWeight:
    """Codes are never negative; `groups[k]` is the group of column k."""

    bits: int
    codes: Codes  # [N, K]
    scales: Floats  # [N, G]
    zeros: Floats  # [N, G], whole numbers
    groups: NDArray[np.intp]  # [K]

    def dequantize(self) -> Floats:
        """The exact values, rounded once to float32. [N, K]."""
        out = np.empty(self.codes.shape, np.float32)
        for start in range(0, len(out), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            steps = self.codes[part] - self.zeros[part][:, self.groups]  # exact: small whole numbers
            with np.errstate(over="ignore", invalid="ignore"):  # a stored scale may be anything
                np.multiply(steps, self.scales[part][:, self.groups], out=out[part])
        return out

    def group_codes(self) -> GroupCodes | None:
        """Codes, scales and offsets that give the same float32 values, or None where there are none.

        None: columns of a group that do not lie together (act-order), 8 bits with a zero other than 128, groups of
        unequal size, 4 bits with scales longer than 16 bits (float16 and bfloat16 are shorter).
        """
        size = self._even_groups()
        if size is None:
            return None
        if self.bits == 8:
            if not np.all(self.zeros == 128):
                return None
            codes: NDArray[Any] = (self.codes ^ 128).view(np.int8)
            offsets = np.zeros_like(self.scales)
        else:
            if np.any(np.ascontiguousarray(self.scales).view(np.uint32) & 0xFF):
                return None  # 16 bits times 4 are exact, and so is the sum
            codes, offsets = self.codes, -self.scales * self.zeros
        return GroupCodes(self.bits, size, codes, self.scales, offsets)

    def _even_groups(self) -> int | None:
        """The size of groups that are runs of columns; the last may be shorter."""
        size = int(np.count_nonzero(self.groups == 0))
        return size if size and np.array_equal(self.groups, np.arange(len(self.groups)) // size) else None


def unpack_words(words: NDArray[Any], bits: int) -> Codes:
    """`[R, C] int32` to `[R, C * 32 / bits]`, the lowest bits of a word first. `bits` divides 32."""
    if bits == 8:
        return np.ascontiguousarray(words, "<i4").view(np.uint8)
    nibbles = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return np.stack((nibbles & 15, nibbles >> 4), axis=2).reshape(len(words), -1)


def pack_words(codes: Codes, bits: int) -> NDArray[np.int32]:
    """`[R, C]` to `[R, ceil(C * bits / 32)] int32`: the inverse of `unpack_words`, padded with zeros."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(padded).view("<i4")
