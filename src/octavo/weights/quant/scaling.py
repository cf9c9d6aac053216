"""AWQ and SmoothQuant: a factor for each input channel moves from the activations into the weights, or back.

    x W^T = (x / s) (W s)^T

s > 1 gives a channel's weights a finer grid (AWQ: channels whose inputs are large matter most; Lin et al., 2023), or
takes its outliers out of quantized activations (SmoothQuant; Xiao et al., 2022). What makes x absorbs 1 / s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.rounding import quantize_matrix
from octavo.weights.quant.targets import Target

__all__ = ["awq_scales", "even_scales", "smooth_scales"]

Floats = NDArray[np.float32]
Tied = Callable[[Floats], Floats]

_STEPS = 10  # exponents that are tried, from 0 (no scaling) on
_MOST_ROWS = 256  # inputs, and outputs of a matrix, that the search looks at
_LEAST, _MOST = 1e-4, 1e4


def _free(values: Floats) -> Floats:
    """Every channel has its own factor."""
    return values


def awq_scales(inputs: Floats, matrices: Sequence[Floats], target: Target, tied: Tied = _free) -> Floats:
    """s [K] = mean|x|^e, with the exponent of least output error over matrices [N, K] that share `inputs` [T, K].

    `tied` makes values equal where channels must share a factor.
    """
    seen = _some(inputs)
    rows = [_some(matrix) for matrix in matrices]
    size = tied(np.abs(inputs).mean(axis=0)) + np.float32(1e-8)
    best, least = np.ones(inputs.shape[1], np.float32), np.inf
    for step in range(_STEPS):
        scales = _centred(size ** np.float32(step / _STEPS))
        error = sum(_output_error(seen, matrix, scales, target) for matrix in rows)
        if error < least:
            best, least = scales, error
    return best


def _some(rows: Floats) -> Floats:
    return rows[:: -(-len(rows) // _MOST_ROWS)]


def _output_error(inputs: Floats, matrix: Floats, scales: Floats, target: Target) -> float:
    rounded = quantize_matrix(matrix * scales, target).dequantize() / scales
    return float(np.square(inputs @ (rounded - matrix).T).sum())


def smooth_scales(inputs: Floats, matrices: Sequence[Floats], alpha: float, tied: Tied = _free) -> Floats:
    """s [K] = max|x|^alpha / max|W|^(1 - alpha); 1 for a channel that is always zero."""
    most = tied(np.abs(inputs).max(axis=0))
    weights = tied(np.max([np.abs(matrix).max(axis=0) for matrix in matrices], axis=0))
    live = (most > 0) & (weights > 0)
    scales = np.ones_like(most)
    scales[live] = most[live] ** alpha / weights[live] ** (1 - alpha)
    return np.clip(scales, _LEAST, _MOST).astype(np.float32)


def even_scales(scales: Floats) -> Floats:
    """The nearest powers of two: what absorbs them keeps its bits."""
    return np.exp2(np.rint(np.log2(scales))).astype(np.float32)


def _centred(scales: Floats) -> Floats:
    """Scaled so that the largest and the smallest are equally far from 1."""
    middle = np.sqrt(scales.max() * scales.min())
    return np.clip(scales / middle, _LEAST, _MOST).astype(np.float32)
