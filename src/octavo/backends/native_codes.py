"""Stored matrices on their way into packed panels: their codes as they are where the running format keeps them.

A format keeps codes of its own bits whose groups are whole groups of its own, with scales that it holds exactly:
float16 for groups, float32 for whole rows. Offsets of 4 bits become float16 too: those of GGUF and of symmetric groups
exactly, others (a scale times a zero from 0 to 15) within 1/128 of a step, far nearer than codes rounded anew. Codes
that are not kept are turned into values and those are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends.operand_types import OPERANDS

__all__ = ["PACKED_TYPES", "CodeArrays", "StoredCodes", "StoredRows", "code_arrays", "keeps_codes"]

Floats = NDArray[np.float32]
# GGUF's numbers of the stored types that the library reads: fp32, fp16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K..Q6_K, bf16
PACKED_TYPES = frozenset((0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30))
_NEAR = np.float32(1 / 128)  # of a step: half a unit of float16 in 15 steps


class StoredCodes(Protocol):
    """w[n, k] = scales[n, k // group_size] * codes[n, k] + offsets[n, ...]; the last group may be shorter."""

    @property
    def bits(self) -> int: ...  # 4: codes 0..15; 8: -128..127 and no offset
    @property
    def group_size(self) -> int: ...
    @property
    def codes(self) -> NDArray[Any]: ...  # [N, K]
    @property
    def scales(self) -> Floats: ...  # [N, G]
    @property
    def offsets(self) -> Floats: ...  # [N, G]


class StoredRows(Protocol):
    """The bytes of a matrix as a file holds them, which the library reads itself: nothing is copied."""

    @property
    def shape(self) -> Sequence[int]: ...  # (N, K)
    @property
    def type(self) -> int: ...  # GGUF's number
    @property
    def heads(self) -> int: ...  # 0, or rows lie as interleaved rope wants them
    @property
    def mapped(self) -> bool: ...  # `data` is of a mapped file: its pages may be given back
    @property
    def data(self) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class CodeArrays:
    """What the library takes: one matrix, or the halves of a pair one after the other. `group` 0: kept as they are."""

    codes: NDArray[Any]  # [N, K], a byte each
    scales: Floats  # [N, G]
    offsets: Floats | None  # [N, G]
    group: int


def keeps_codes(kind: str, stored: StoredCodes) -> bool:
    """Whether these codes go into a format as they are."""
    operands = OPERANDS[kind]
    if operands.code_bits != stored.bits or (stored.bits == 8 and bool(stored.offsets.any())):
        return False
    if stored.scales.shape[1] > 1 and (not operands.group or stored.group_size % operands.group):
        return False
    return not operands.group or _fits_half(stored)


def code_arrays(kind: str, halves: Sequence[StoredCodes]) -> CodeArrays | None:
    """A matrix, or a pair, for a format; None for halves that are not stored alike."""
    first = halves[0]
    if any((half.bits, half.group_size) != (first.bits, first.group_size) for half in halves):
        return None
    keep = all(keeps_codes(kind, half) for half in halves)
    own = OPERANDS[kind].group if keep else 0
    scales, offsets = (_joined([_spread(part, half, own) for part, half in parts]) for parts in _tables(halves))
    codes = _joined([half.codes for half in halves])
    return CodeArrays(codes, scales, offsets if first.bits == 4 else None, 0 if keep else first.group_size)


def _tables(halves: Sequence[StoredCodes]) -> tuple[list[tuple[Floats, StoredCodes]], ...]:
    return [(half.scales, half) for half in halves], [(half.offsets, half) for half in halves]


def _spread(table: Floats, stored: StoredCodes, own: int) -> Floats:
    """[N, G] to the groups of the format, of `own` columns (0: as stored)."""
    if not own or own == stored.group_size:
        return table
    groups = -(-stored.codes.shape[1] // own)
    times = groups if table.shape[1] == 1 else stored.group_size // own
    return table.repeat(times, axis=1)[:, :groups]


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _fits_half(stored: StoredCodes) -> bool:
    """Scales exactly, offsets nearly; an infinite one has no place in a packed group."""
    scales, offsets = stored.scales, stored.offsets
    with np.errstate(over="ignore", invalid="ignore"):
        if not (np.isfinite(scales).all() and np.array_equal(scales.astype(np.float16), scales)):
            return False
        return bool((np.abs(offsets.astype(np.float16) - offsets) <= np.abs(scales) * _NEAR).all())
