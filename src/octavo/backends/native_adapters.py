"""Adapters in the native library's memory, in the layout of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.adapters import AdapterRoom, Factors
from octavo.backends.ops import ForwardBatch
from octavo.core.errors import InvalidInput

__all__ = ["NativePlaces", "adapter_bytes"]

Floats = NDArray[np.float32]
Smoothed = Callable[[str], tuple[Floats | None, Floats | None]]  # of a projection's columns [K] and rows [N]
_LANES = 16


@dataclass(frozen=True)
class _Packed:
    """A projection's factors, fp32 or the bits of bf16: a [K, rank padded], b [blocks of 16 outputs, rank, 16]."""

    target: int
    rank: int
    a: NDArray[Any]
    b: NDArray[Any]


def adapter_bytes(room: AdapterRoom, targets: Mapping[str, Sequence[int]], half: bool) -> int:
    """What all places take, for these targets (`[N, K]` each); ``half``: in bf16."""
    rank = room.rank + (room.rank % 2 if half else 0)  # kept by pairs, and inputs by tiles of 32
    values = sum((-(-k // 32) * 32 if half else k) * _padded(rank) + _padded(n) * rank for n, k in targets.values())
    return (2 if half else 4) * room.places * values


class NativePlaces:
    """Adapters by place. One is written while no row of a step names it.

    ``half``: kept in bf16; sums are of float32 always. ``smoothed`` tells what a projection's inputs were divided by
    and its outputs multiplied with (native_smooth.py).
    """

    def __init__(self, room: AdapterRoom, targets: Mapping[str, Sequence[int]], smoothed: Smoothed, half: bool) -> None:
        self._lib = lib.library()
        self._half = half
        self._numbers = {name: number for number, name in enumerate(targets)}
        self._smoothed = smoothed
        records = (lib.Target * len(targets))(*(lib.Target(n, k) for n, k in targets.values()))
        self.handle = self._lib.octavo_adapters_open(room.places, room.rank, records, len(records), half)
        if not self.handle:
            raise InvalidInput("max_loras", room.places, self._lib.octavo_error().decode())
        lib.close_with(self, self._lib.octavo_adapters_close, self.handle)

    def pack(self, factors: Factors) -> list[_Packed]:
        """An adapter as the kernels want it; in any thread."""
        return [self._packed(name, a, b, scale) for name, (a, b, scale) in factors.items()]

    def put(self, place: int, packed: Sequence[_Packed]) -> None:
        """Have a place hold what `pack` gave."""
        self.clear(place)
        for each in packed:
            arrays = each.a.ctypes.data, each.b.ctypes.data
            lib.check(self._lib.octavo_adapters_set(self.handle, place, each.target, each.rank, *arrays), "adapter")

    def clear(self, place: int) -> None:
        """Forget what is there. Idempotent."""
        lib.check(self._lib.octavo_adapters_clear(self.handle, place), "adapter")

    def attach(self, batch: ForwardBatch, places: Sequence[int]) -> None:
        """Give a step the adapters of its sequences, [S]."""
        if max(places, default=-1) >= 0:
            batch.cache["adapters"] = np.asarray(places, np.int32)

    def _packed(self, name: str, a: Any, b: Any, scale: float) -> _Packed:
        columns, rows = self._smoothed(name)
        low, high = np.asarray(a, np.float32), np.asarray(b, np.float32) * np.float32(scale)
        low = low if columns is None else low * columns
        high = high if rows is None else high * rows[:, None]
        rank, blocks = len(low), _padded(len(high)) // _LANES
        inner = np.zeros((low.shape[1], _padded(rank)), np.float32)
        inner[:, :rank] = low.T
        outer = np.zeros((blocks * _LANES, rank), np.float32)
        outer[: len(high)] = high
        outer = np.ascontiguousarray(outer.reshape(blocks, _LANES, rank).swapaxes(1, 2))
        if self._half:
            return _Packed(self._numbers[name], rank, _bf16(inner), _bf16(outer))
        return _Packed(self._numbers[name], rank, inner, outer)


def _bf16(values: Floats) -> NDArray[np.uint16]:
    """The nearest bf16, ties to even, as bits; the values are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _padded(n: int) -> int:
    return -(-n // _LANES) * _LANES
