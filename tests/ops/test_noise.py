"""Philox and the Gumbel function: published vectors, exactness between backends, error, range, distribution."""

from __future__ import annotations

import math
import random

import numpy as np

from octavo.backends import numpy_random
from octavo.backends.random import GUMBEL_MAX, GUMBEL_MIN, UPPER, gumbel, noise_bits, philox4x32, round32

# from the Random123 distribution's known-answer vectors for philox4x32 with 10 rounds
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

EDGES = [0, 1, 2, 3, 2**31 - 1, 2**31, UPPER - 1, UPPER, UPPER + 1, 2**32 - 3, 2**32 - 2, 2**32 - 1]


def words() -> list[int]:
    rng = random.Random(5)
    uniform = [rng.getrandbits(32) for _ in range(3000)]
    small = [rng.getrandbits(rng.randint(1, 31)) for _ in range(1500)]
    return EDGES + uniform + small + [2**32 - 1 - bits for bits in small]


def exact(bits: int) -> float:
    u, complement = (bits + 0.5) / 2.0**32, (2**32 - 1 - bits + 0.5) / 2.0**32
    return -math.log(-(math.log(u) if u < 0.5 else math.log1p(-complement)))


def test_philox_known_answers() -> None:
    for counter, key, expected in KNOWN:
        assert philox4x32(counter, key) == expected
        assert tuple(numpy_random.philox4x32(np.array(counter, np.uint64)[:, None], key)[:, 0].tolist()) == expected


def test_noise_bits_depend_on_every_coordinate_and_agree() -> None:
    base = (2**40 + 5, 1, 3, 10, 2)
    values = [noise_bits(*base)]
    for place in range(5):
        changed = list(base)
        changed[place] += 1
        values.append(noise_bits(*changed))
    assert len(set(values)) == 6
    assert noise_bits(2**64 + 7, 0, 0, 0) == noise_bits(7, 0, 0, 0)
    ids = np.array([10, 3, 900, 11, 262143, 10])
    expected = [noise_bits(2**63 + 5, 1, 3, i, 2) for i in ids.tolist()]
    assert numpy_random.noise_bits(2**63 + 5, 1, 3, ids, 2).tolist() == expected


def test_gumbel_error_range_and_exactness() -> None:
    bits = words()
    values = [gumbel(b) for b in bits]
    assert all(value == round32(value) for value in values)
    assert max(abs(value - exact(b)) for value, b in zip(values, bits, strict=True)) < 3e-6
    assert min(values) > GUMBEL_MIN and max(values) < GUMBEL_MAX
    vector = numpy_random.gumbel(np.array(bits, np.uint64))
    assert vector.dtype == np.float32
    assert vector.tolist() == values


def test_gumbel_never_falls_as_its_word_rises() -> None:
    around = [center + step for center in (2**16, 2**31, UPPER, 2**32 - 2**16) for step in range(-300, 300)]
    values = numpy_random.gumbel(np.array(sorted(around), np.uint64)).astype(np.float64)
    assert (np.diff(values) >= -2e-6).all()  # float32 steps only


def test_gumbel_distribution() -> None:
    values = numpy_random.gumbel(numpy_random.noise_bits(11, 0, 0, np.arange(100_000)))
    assert abs(float(values.mean()) - 0.5772) < 0.02
    assert abs(float(values.var()) - math.pi**2 / 6) < 0.04
