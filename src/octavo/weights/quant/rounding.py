"""Round to nearest on arrays: the grids and codes of backends/quantization.py, for many rows at once.

`Grid` is one group of columns: a scale and a zero for each row. With float16 scales, a scale is the smallest float16
(not float32) that covers the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantization import SMALLEST
from octavo.weights.quant.integer import IntegerWeight
from octavo.weights.quant.targets import Target

__all__ = ["Grid", "best_grid", "grid_of", "group_index", "quantize_matrix"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)  # parts of the range that are tried
_HALF_MAX, _HALF_SMALLEST = 65504.0, 2.0**-24


@dataclass(frozen=True)
class Grid:
    """Where a group of columns may lie: `scale * (code - zero)`. [N] each."""

    target: Target
    scales: Floats
    zeros: Floats

    def codes(self, part: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Nearest codes of `part` [N] or [N, n]."""
        shape = (-1,) + (1,) * (part.ndim - 1)
        scales, zeros = self.scales.reshape(shape), self.zeros.reshape(shape)
        lowest = 1 if self.target.symmetric else 0
        codes = np.rint(part.astype(np.float64) / scales) + zeros
        return np.clip(codes, lowest, self.target.levels).astype(np.uint8)

    def values(self, codes: NDArray[np.uint8]) -> Floats:
        """What codes stand for."""
        shape = (-1,) + (1,) * (codes.ndim - 1)
        return self.scales.reshape(shape) * (codes - self.zeros.reshape(shape))


def grid_of(part: NDArray[np.floating], target: Target, *, half: bool | None = None, shrink: float = 1.0) -> Grid:
    """The grid that covers each row of `part` [N, n], or `shrink` of its range. `half`: float16 scales."""
    low = np.minimum(part.min(axis=1), 0).astype(np.float64) * shrink
    high = np.maximum(part.max(axis=1), 0).astype(np.float64) * shrink
    half = target.half_scales if half is None else half
    if target.symmetric:
        scales = _scales_up(np.maximum(-low, high) / (target.offset - 1), half)
        return Grid(target, scales, np.full_like(scales, target.offset))
    scales = _scales_up(high / target.levels - low / target.levels, half)
    zeros = np.minimum(target.levels, np.rint(-low / scales)).astype(np.float32)
    return Grid(target, scales, zeros)


def _scales_up(scales: Doubles, half: bool) -> Floats:
    """The smallest stored number that is not below each scale; 1 for a group of zeros."""
    kind, largest, smallest = (np.float16, _HALF_MAX, _HALF_SMALLEST) if half else (np.float32, np.inf, SMALLEST)
    nearest = np.minimum(scales, largest).astype(kind)
    low = nearest.astype(np.float64) < np.minimum(scales, largest)
    nearest[low] = np.nextafter(nearest[low], kind(np.inf))
    stored = np.maximum(nearest.astype(np.float32), np.float32(smallest))
    return np.where(scales == 0, np.float32(1), stored)


def best_grid(part: Floats, target: Target, weights: Floats) -> Grid:
    """Of grids that cover a part of the range, for each row the one of least `sum(weights[n] * error^2)`.

    Outliers are cut where that serves the rest: the clipping search of AWQ (Lin et al., 2023).
    """
    best, least = grid_of(part, target), np.full(len(part), np.inf)
    scales, zeros = best.scales.copy(), best.zeros.copy()
    for shrink in _SHRINKS:
        grid = grid_of(part, target, shrink=shrink)
        error = np.square(grid.values(grid.codes(part)) - part) @ weights
        better = error < least
        scales[better], zeros[better], least[better] = grid.scales[better], grid.zeros[better], error[better]
    return Grid(target, scales, zeros)


def group_index(columns: int, target: Target) -> NDArray[np.intp]:
    """The group of each column."""
    return np.arange(columns) // (target.group_size or columns)


def quantize_matrix(
    matrix: Floats, target: Target, *, half: bool | None = None, weights: Floats | None = None
) -> IntegerWeight:
    """A matrix [N, K], each value to the nearest code; with `weights` [K] the grids are searched (`best_grid`)."""
    rows, columns = matrix.shape
    size, groups = target.group_size or columns, target.num_groups(columns)
    codes = np.empty((rows, columns), np.uint8)
    scales, zeros = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
    for g in range(groups):
        span = slice(g * size, min(columns, (g + 1) * size))
        part = matrix[:, span]
        grid = grid_of(part, target, half=half) if weights is None else best_grid(part, target, weights[span])
        codes[:, span], scales[:, g], zeros[:, g] = grid.codes(part), grid.scales, grid.zeros
    return IntegerWeight(target.bits, codes, scales, zeros, group_index(columns, target))
