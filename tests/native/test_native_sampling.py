"""Drawing in the library: the same tokens as the numpy sampler from the same logits, whatever is asked for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from native_harness import ISAS

from octavo.backends import numpy_sampling
from octavo.backends.native_backend import NativeBackend
from octavo.backends.ops import SamplingRow
from octavo.core.errors import RowError
from octavo.core.params import SamplingParams

PARAMS = (
    *({}, {"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 1.7}, {"temperature": 1e-9}),
    *({"top_k": 1}, {"top_k": 20}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.05}, {"top_p": 0.9999}),
    *({"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.1, "temperature": 2.5}),
)


def rows_of(rng: random.Random, count: int) -> list[SamplingRow]:
    """Rows of every kind."""
    return [
        SamplingRow(
            SamplingParams(**{"temperature": 1.0} | PARAMS[i % len(PARAMS)]),
            seed=rng.getrandbits(64),
            choice=rng.randrange(4),
            output_index=rng.randrange(500),
            purpose=rng.randrange(2),
        )
        for i in range(count)
    ]


def logits_of(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Rows of different sharpness, with ties and banned tokens."""
    x = rng.normal(size=(count, vocab)) * rng.choice([0.3, 2.0, 8.0], size=(count, 1))
    x = np.where(rng.random((count, vocab)) < 0.02, -np.inf, np.round(x, 2))
    return x.astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_draws_equal_the_numpy_sampler(isa: str) -> None:
    backend = NativeBackend(isa, 2)
    for seed, vocab in enumerate((7, 333, 5000)):
        rows = rows_of(random.Random(seed), 8 * len(PARAMS))
        logits = logits_of(np.random.default_rng(seed), len(rows), vocab)
        assert backend.sample(logits, rows) == numpy_sampling.sample(logits, rows)


def test_rows_that_cannot_be_drawn_are_named() -> None:
    backend = NativeBackend(threads=2)
    logits = np.zeros((6, 40), np.float32)
    logits[1] = -np.inf
    logits[2, 5] = np.nan
    logits[3] = np.inf
    logits[4, 7] = np.inf
    for params in PARAMS:
        rows = [SamplingRow(SamplingParams(**{"temperature": 1.0} | params), seed=1) for _ in logits]
        with pytest.raises(RowError) as caught:
            backend.sample(logits, rows)
        assert list(caught.value.rows) == [1, 2, 3]
        assert backend.sample(logits[4:5], rows[:1]) == [7]
        few = np.full((1, 40), -np.inf, np.float32)
        few[0, [3, 9]] = np.inf  # infinitely likely tokens share the place of the largest
        assert backend.sample(few, rows[:1]) == numpy_sampling.sample(few, rows[:1])
