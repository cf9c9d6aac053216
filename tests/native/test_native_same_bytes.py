"""Promise 1 on native: a position's logits are the same bytes whatever the batch, chunks, pages or threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from native_harness import ISAS, PAIRS, compiled, prompt, run

NAMES = ("llama-biases", "gemma3-long", "qwen3-moe", "gemma2")


def cut(rng: random.Random, length: int) -> list[int]:
    """`length` as random chunks, many of one token."""
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(length - sum(sizes), rng.choice([1, 1, 2, rng.randint(1, 90), 300])))
    return sizes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "kv_dtype"), PAIRS)
def test_alone_equals_any_schedule(isa: str, kind: str, kv_dtype: str) -> None:
    rng = random.Random(f"{isa} {kind} {kv_dtype}")
    name = rng.choice(NAMES)
    lengths = [rng.randint(60, 150), rng.randint(1, 40), rng.randint(100, 200), rng.choice([64, 65, 128])]
    prompts = [prompt(f"{name} {i}", length) for i, length in enumerate(lengths)]
    alone = compiled(name, kind, kv_dtype, isa)
    expected = [run(alone, [ids], [[len(ids)]])[0] for ids in prompts]
    for threads in (1, 2, 3, 4):
        loaded = compiled(name, kind, kv_dtype, isa, threads)
        page_size = rng.choice([16, 32, 64])
        got = run(loaded, prompts, [cut(rng, length) for length in lengths], page_size)
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert np.array_equal(a, b), (name, threads, page_size, index, np.flatnonzero((a != b).any(axis=1))[:3])


def test_a_context_of_several_chunks() -> None:
    """Attention combines chunks of 512 positions: across their borders, by tokens and at once."""
    ids = prompt("long", 1100)
    for kind, kv_dtype in PAIRS[:5]:
        expected = run(compiled("llama-tied-one-kv-head", kind, kv_dtype), [ids], [[500, 600]])[0]
        chunks = [[300, 211, *[1] * 5, 508, 75, 1], [1100 - 32, 32]]
        got = run(compiled("llama-tied-one-kv-head", kind, kv_dtype, threads=2), [ids, ids], chunks, 64)
        assert all(np.array_equal(expected, each) for each in got), (kind, kv_dtype)
