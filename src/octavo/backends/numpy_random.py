"""Vector forms of backends/random.py, bit-equal to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.backends.random import (
    KEY_STEPS,
    LN2,
    MASK32,
    MULTIPLIERS,
    ROUNDS,
    SERIES,
    SQRT_HALF,
    UPPER,
)

CALLS_AT_ONCE = 4096  # whose temporaries stay in the second-level cache

_32 = np.uint64(32)
_LOW = np.uint64(MASK32)


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Four 32-bit words for each counter: [4, N] -> [4, N], each word in a uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c2 = (odd >> _32) ^ c1 ^ np.uint64(k0), (even >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = odd & _LOW, even & _LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return np.stack((c0, c1, c2, c3))


def noise_bits(
    seed: int, choice: int, output_index: int, token_ids: NDArray[np.int64], purpose: int = 0
) -> NDArray[np.uint64]:
    """The 32 random bits of each token id [N]."""
    if not len(token_ids):
        return np.empty(0, np.uint64)
    calls = which = token_ids >> 2
    if len(calls) > int(calls.max()):  # dense: each call once, instead of once per id
        calls = np.arange(int(calls.max()) + 1)
    else:
        which = np.arange(len(token_ids))
    counter = np.empty((4, len(calls)), np.uint64)
    counter[0] = calls
    counter[1:] = np.array([[output_index & MASK32], [choice & MASK32], [purpose & MASK32]], np.uint64)
    key = (seed & MASK32, seed >> 32 & MASK32)
    words = np.concatenate(
        [philox4x32(counter[:, i : i + CALLS_AT_ONCE], key) for i in range(0, len(calls), CALLS_AT_ONCE)], axis=1
    )
    return words[token_ids & 3, which]


def gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """-log(-log(u)) for u = (bits + 1/2) / 2^32: [N] -> [N]."""
    upper = bits >= np.uint64(UPPER)
    kept = np.where(upper, np.uint64(MASK32) - bits, bits)  # 1 - u where u is near 1, else u
    value = ((kept.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    near_one = _log_of_ratio(-value / (np.float32(2.0) - value))
    return -log32(-np.where(upper, near_one, log32(value)))


def log32(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithm of positive float32 values, by the float32 operations of `random.log32`."""
    mantissa, exponent = np.frexp(value)
    small = mantissa < np.float32(SQRT_HALF)
    mantissa = np.where(small, mantissa * np.float32(2.0), mantissa)
    exponent = (exponent - small).astype(np.float32)
    one = np.float32(1.0)
    fraction = _log_of_ratio((mantissa - one) / (mantissa + one))
    return exponent * np.float32(LN2) + fraction


def _log_of_ratio(s: NDArray[np.float32]) -> NDArray[np.float32]:
    square = s * s
    total = np.full_like(s, SERIES[0])
    for coefficient in SERIES[1:]:
        total = total * square + np.float32(coefficient)
    return np.float32(2.0) * (total * square * s + s)
