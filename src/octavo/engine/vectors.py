"""What a pooled state becomes on its way out: cut, brought to length 1, compared, packed.

Sums are exact (`math.fsum`), so the same state gives the same vector under every Python.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from operator import mul

from octavo.core.errors import InvalidInput

__all__ = ["check_dimensions", "cosine", "packed", "vector_of"]


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise ``InvalidInput`` unless a vector of ``size`` values can be cut to so many."""
    if dimensions is not None and not 1 <= dimensions <= size:
        raise InvalidInput("dimensions", dimensions, f"give a number from 1 to {size}, the size of this model's states")


def vector_of(hidden: bytes, *, normalize: bool, dimensions: int | None = None) -> list[float]:
    """The first ``dimensions`` values (all, if None) of a pooled state, with length 1 if asked for, as float32 values.

    A vector of zeros stays one.
    """
    values: Sequence[float] = struct.unpack(f"<{len(hidden) // 4}f", hidden)
    kept = list(values if dimensions is None else values[:dimensions])
    length = _length(kept) if normalize else 1.0
    if length in (0.0, 1.0):
        return kept
    return list(struct.unpack(f"<{len(kept)}f", packed([value / length for value in kept])))


def packed(vector: Sequence[float]) -> bytes:
    """As float32, little-endian."""
    return struct.pack(f"<{len(vector)}f", *vector)


def cosine(a: bytes, b: bytes) -> float:
    """The cosine of the angle between two pooled states, from -1 to 1; 0 where one of them is zero."""
    x, y = (vector_of(hidden, normalize=False) for hidden in (a, b))
    lengths = _length(x) * _length(y)
    return max(-1.0, min(1.0, math.fsum(map(mul, x, y)) / lengths)) if lengths else 0.0


def _length(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(map(mul, values, values)))
