"""Sink tokens beside a window, against StreamingLLM's own words: keys are turned by their place in the cache."""

from __future__ import annotations

import cmath
import itertools
import math
import random
from typing import Any

import pytest
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend
from octavo.backends.ops import RopeTable
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import sinks_and_recent
from octavo.core.kv_groups import KVGroup

HEADS, KV_HEADS, DIM = 4, 2, 4
ROPE = RopeTable((1.0, 0.1), DIM)


def turned(head: list[float], position: int) -> list[float]:
    half = len(ROPE.inv_freq)
    pairs = [complex(head[i], head[i + half]) for i in range(half)]
    after = [z * cmath.rect(1.0, position * f) for z, f in zip(pairs, ROPE.inv_freq, strict=True)]
    return [z.real for z in after] + [z.imag for z in after]


def streaming(q: Any, k: Any, v: Any, sinks: int, window: int) -> list[list[float]]:
    """Each token's output from a cache of its own: what is in it has the positions 0, 1, 2 ..."""
    out = []
    for p, row in enumerate(q):
        cached = sinks_and_recent(p + 1, sinks, window)
        y: list[float] = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS) * DIM
            query = turned(row[head * DIM : (head + 1) * DIM], len(cached) - 1)
            keys = [turned(k[j][kv : kv + DIM], place) for place, j in enumerate(cached)]
            weights = [math.exp(0.5 * math.fsum(a * b for a, b in zip(query, key, strict=True))) for key in keys]
            total = math.fsum(weights)
            values = [v[j][kv : kv + DIM] for j in cached]
            y += [math.fsum(w * value[d] for w, value in zip(weights, values, strict=True)) / total for d in range(DIM)]
        out.append(y)
    return out


class Run:
    """One sequence of random Q, K, V, before rope."""

    def __init__(self, rng: random.Random, length: int, sinks: int, window: int) -> None:
        self.length, self.sinks, self.window = length, sinks, window
        self.q = matrix(rng, length, HEADS * DIM)
        self.k, self.v = (matrix(rng, length, KV_HEADS * DIM) for _ in range(2))

    def pieces(self, name: str, cuts: list[int], page_size: int, freed: bool = False) -> list[list[float]]:
        """Outputs of all tokens; ``freed``: what no token can see any more is not in the page table."""
        backend = create_backend(name)
        group = KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, window=self.window, sinks=self.sinks)
        pages = -(-self.length // page_size)
        pool = backend.allocate_kv(pages, page_size, (group,))
        out: list[list[float]] = []
        for start, stop in itertools.pairwise([0, *cuts, self.length]):
            table = list(range(pages))[::-1]
            if freed:
                kept, first = group.needed_columns(start, page_size)
                table[kept:first] = [-1] * (first - kept)
            batch = backend.batch(range(start, stop), range(start, stop), [stop - start], [[table]], pool)
            q, k, v = (backend.weight("x", rows[start:stop]) for rows in (self.q, self.k, self.v))
            q, k = backend.rope(q, k, batch, rope=ROPE, head_dim=DIM)
            backend.write_kv(k, v, batch, layer=0)
            options = {"window": self.window, "sink_tokens": self.sinks, "rope": ROPE}
            out += backend.to_lists(backend.attention(q, batch, layer=0, scale=0.5, head_dim=DIM, **options))
        return out


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("sinks", "window"), [(1, 1), (4, 9), (7, 70), (64, 5)])
def test_as_if_keys_were_turned_by_their_place_in_the_cache(name: str, sinks: int, window: int) -> None:
    run = Run(random.Random(sinks), 150, sinks, window)
    expected = streaming(run.q, run.k, run.v, sinks, window)
    for cuts in ([], [3, 64, 65, 130], [2]):
        got = run.pieces(name, cuts, 16, freed=True)
        assert max(abs(a - b) for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True)) < 5e-6


def test_reference_gives_the_same_bits_for_any_cut_and_page_size() -> None:
    rng = random.Random(7)
    for sinks, window in ((3, 6), (5, 40)):
        run = Run(rng, 75, sinks, window)
        whole = run.pieces("reference", [], 16)
        assert run.pieces("reference", list(range(1, 75)), 1, freed=True) == whole
        for page_size in (2, 4, 16):
            cuts = sorted(rng.sample(range(1, 75), rng.randint(1, 6)))
            assert run.pieces("reference", cuts, page_size, freed=True) == whole


@pytest.mark.parametrize("name", BACKENDS)
def test_far_rows_and_near_rows_share_a_step(name: str) -> None:
    """Of 512 positions in the middle no row sees any."""
    backend = create_backend(name)
    pool = backend.allocate_kv(110, 16, (KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM),))
    rows = matrix(random.Random(1), 2, HEADS * DIM)
    keys = matrix(random.Random(2), 1700, KV_HEADS * DIM)
    fill = backend.batch(range(1600), range(1600), [1600], [[list(range(100))]], pool)
    backend.write_kv(backend.weight("k", keys[:1600]), backend.weight("v", keys[:1600]), fill, layer=0)
    far, near = list(range(100)), list(range(100, 110))
    both = backend.batch([0, 0], [1599, 3], [1, 1], [[far, near]], pool)
    few = backend.batch(range(4), range(4), [4], [[near]], pool)
    backend.write_kv(backend.weight("k", keys[:4]), backend.weight("v", keys[:4]), few, layer=0)
    for options in ({}, {"sink_tokens": 4, "rope": ROPE}):
        asked = {"layer": 0, "scale": 0.5, "head_dim": DIM, "window": 8, **options}
        together = backend.to_lists(backend.attention(backend.weight("q", rows), both, **asked))
        for at, (position, table) in enumerate(((1599, far), (3, near))):
            alone = backend.batch([0], [position], [1], [[table]], pool)
            single = backend.to_lists(backend.attention(backend.weight("q", rows[at : at + 1]), alone, **asked))
            assert together[at] == pytest.approx(single[0], abs=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sink_tokens": 65, "window": 4, "rope": ROPE}, "sink_tokens"),
        ({"sink_tokens": 4, "window": 0, "rope": ROPE}, "window"),
        ({"sink_tokens": 4, "window": 4, "rope": RopeTable((1.0, 0.1), DIM, 1.5)}, "rope"),
    ],
)
def test_what_is_not_defined_is_refused(name: str, options: dict[str, Any], field: str) -> None:
    backend = create_backend(name)
    pool = backend.allocate_kv(1, 4, (KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM),))
    batch = backend.batch([0], [0], [1], [[[0]]], pool)
    q = backend.weight("q", matrix(random.Random(1), 1, HEADS * DIM))
    with pytest.raises(InvalidInput) as caught:
        backend.attention(q, batch, layer=0, scale=0.5, head_dim=DIM, **options)
    assert caught.value.field == field
