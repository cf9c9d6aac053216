"""Noise: Philox4x32-10 and a Gumbel function, defined here in the standard library; other backends are bit-equal to it.

A number depends on its coordinates alone (seed; choice, output index, token id, purpose): never on the batch, the order
of calls or the backend. Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from array import array

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF

# A Gumbel value lies within these, so a candidate further behind than their distance can never win.
GUMBEL_MIN, GUMBEL_MAX = -3.2, 22.9

XTC_COIN = 0x585443  # a purpose: whether XTC acts on a token; of its token id 0

# 2^32 / sqrt(2): from here on the uniform is near 1 and its distance from 1 is what is kept
UPPER = 3037000500


def round32(value: float) -> float:
    """The nearest float32, as a Python float."""
    return array("f", (value,))[0]


LN2 = round32(math.log(2.0))
SQRT_HALF = round32(math.sqrt(0.5))
# 2 atanh(s) = 2 s (1 + s^2/3 + s^4/5 + ...); |s| <= 0.172 here, so the first dropped term is below 2^-28 of the sum
SERIES = tuple(round32(1.0 / n) for n in (9, 7, 5, 3))


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter and a 64-bit key (both as 32-bit words, low first)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & MASK32, (even >> 32) ^ c3 ^ k1, even & MASK32
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def noise_bits(seed: int, choice: int, output_index: int, token_id: int, purpose: int = 0) -> int:
    """The 32 random bits of one coordinate. The low 64 bits of the seed are the key.

    Four neighbouring ids share a Philox call:
    counter (token_id // 4, output_index, choice, purpose), word token_id % 4.
    """
    counter = (token_id >> 2, output_index & MASK32, choice & MASK32, purpose & MASK32)
    return philox4x32(counter, (seed & MASK32, seed >> 32 & MASK32))[token_id & 3]


def gumbel(bits: int) -> float:
    """-log(-log(u)) for u = (bits + 1/2) / 2^32, as a float32: every intermediate is rounded to float32.

    Always finite, within GUMBEL_MIN and GUMBEL_MAX; within 3e-6 of the exact value.
    """
    f = array("f", (0.0,))  # storing into it rounds
    if bits < UPPER:
        f[0] = (bits + 0.5) * 2.0**-32
        log_u = log32(f[0])
    else:
        f[0] = (MASK32 - bits + 0.5) * 2.0**-32  # 1 - u, exact to float32 however near u is to 1
        distance = f[0]
        f[0] = 2.0 - distance
        f[0] = -distance / f[0]
        log_u = _log_of_ratio(f[0], f)
    return -log32(-log_u)


def log32(value: float) -> float:
    """Natural logarithm of a positive float32, by a fixed sequence of float32 operations."""
    f = array("f", (0.0,))
    mantissa, exponent = math.frexp(value)
    if mantissa < SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    f[0] = mantissa - 1.0
    numerator = f[0]
    f[0] = mantissa + 1.0
    f[0] = numerator / f[0]
    fraction = _log_of_ratio(f[0], f)
    f[0] = exponent * LN2
    f[0] = f[0] + fraction
    return f[0]


def _log_of_ratio(s: float, f: array[float]) -> float:
    """log((1 + s) / (1 - s)) for |s| <= 0.172."""
    f[0] = s * s
    square = f[0]
    total = SERIES[0]
    for coefficient in SERIES[1:]:
        f[0] = total * square
        f[0] = f[0] + coefficient
        total = f[0]
    f[0] = total * square
    f[0] = f[0] * s
    f[0] = f[0] + s
    return 2.0 * f[0]
