"""From hidden states to one vector for each sequence, on arrays: sums in one order, whatever NumPy's own would be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.ops import PoolSpan

__all__ = ["normed", "pool"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def pool(x: Floats, spans: Sequence[PoolSpan]) -> list[Doubles]:
    """The op of the table: x [T, H] to a vector [H] for each span."""
    return [_pooled(x[span.first : span.stop], span) for span in spans]


def _pooled(rows: Floats, span: PoolSpan) -> Doubles:
    if span.kind == "last":
        return rows[-1].astype(np.float64)
    total = rows[0].astype(np.float64) if span.carried is None else span.carried.copy()
    for row in () if span.kind == "cls" else rows[span.carried is None :]:
        total += row
    return np.asarray(total)


def normed(x: Floats, weight: Doubles, eps: float) -> Floats:
    """rms_norm of each row of x [T, H], in float64, its squares summed one after the other."""
    out = np.empty_like(x)
    for row, into in zip(x.astype(np.float64), out, strict=True):
        mean = np.add.accumulate(row * row)[-1] / len(row)
        into[:] = row / np.sqrt(mean + eps) * weight
    return out
