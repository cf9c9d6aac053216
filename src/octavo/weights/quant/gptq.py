"""GPTQ (Frantar et al., 2022): columns are rounded one after the other, and each error is made good by those to come.

With inputs X the loss of a row is (w - q) H (w - q)^T, H = X^T X. U, the upper Cholesky factor of H^-1, says how much
the columns after k take over of the error at k: `w[k+1:] -= (w[k] - q[k]) / U[k, k] * U[k, k+1:]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput
from octavo.weights.quant.integer import IntegerWeight
from octavo.weights.quant.rounding import Grid, grid_of, group_index
from octavo.weights.quant.targets import Target

__all__ = ["Feedback", "feedback_of", "gptq", "hessian_of"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_BLOCK = 64  # columns whose errors are applied to the rest in one product
_DAMPS = (0.01, 0.1, 1.0)  # of the mean of the diagonal, until the factor exists


def hessian_of(inputs: Floats) -> Doubles:
    """X^T X / T of inputs [T, K]."""
    return (inputs.T @ inputs).astype(np.float64) / max(1, len(inputs))


@dataclass(frozen=True)
class Feedback:
    """How errors spread over the columns to come: U of the description, [K, K]; matrices of one input share it."""

    factor: Floats
    dead: NDArray[np.bool_]  # inputs that are always zero: their weights do not matter


def feedback_of(hessian: Doubles) -> Feedback:
    """The factor of a damped Hessian's inverse. Raises InvalidInput when the Hessian is not finite.

    With H = R R^T, R upper, U is R^-1; R is the Cholesky factor of H turned upside down, turned back.
    """
    diagonal = np.diag(hessian)
    dead = diagonal == 0
    mean = float(np.mean(np.where(dead, 1.0, diagonal)))
    for damp in _DAMPS if np.isfinite(mean) else ():
        held = hessian.copy()
        held[np.diag_indices_from(held)] = np.where(dead, 1.0, diagonal) + damp * mean
        try:
            root = np.linalg.cholesky(held[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        return Feedback(np.triu(np.linalg.inv(root)).astype(np.float32), dead)
    raise InvalidInput("calibration", "activations", "are not finite, or far too large: check the model")


def gptq(matrix: Floats, feedback: Feedback, target: Target) -> IntegerWeight:
    """Quantize a matrix [N, K] for inputs of this feedback. A group's grid is that of its columns as the errors before
    it have left them."""
    work, factor = matrix.astype(np.float32).copy(), feedback.factor
    rows, columns = work.shape
    work[:, feedback.dead] = 0
    size, groups = target.group_size or columns, target.num_groups(columns)
    codes = np.empty((rows, columns), np.uint8)
    scales, zeros = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
    grid: Grid | None = None
    for start in range(0, columns, _BLOCK):
        stop = min(columns, start + _BLOCK)
        errors = np.empty((rows, stop - start), np.float32)
        for k in range(start, stop):
            if grid is None or k % size == 0:
                grid = _grid_at(work, errors, factor, k, start, size, target)
                scales[:, k // size], zeros[:, k // size] = grid.scales, grid.zeros
            codes[:, k] = grid.codes(work[:, k])
            errors[:, k - start] = (work[:, k] - grid.values(codes[:, k])) / factor[k, k]
            work[:, k + 1 : stop] -= np.outer(errors[:, k - start], factor[k, k + 1 : stop])
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return IntegerWeight(target.bits, codes, scales, zeros, group_index(columns, target))


def _grid_at(
    work: Floats, errors: Floats, factor: Floats, k: int, start: int, size: int, target: Target
) -> Grid:  # fmt: skip
    """The grid of the group that begins at column k. What lies beyond this block lacks the block's errors so far."""
    part = work[:, k : k + size]
    beyond = slice(start + errors.shape[1], k + size)
    if k > start and beyond.stop > beyond.start:
        part = part.copy()
        done = slice(0, k - start)
        late = factor[start:k, beyond]
        part[:, part.shape[1] - late.shape[1] :] -= errors[:, done] @ late
    return grid_of(part, target)
