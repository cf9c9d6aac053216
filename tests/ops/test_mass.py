"""What rows look at: against the plainest definition, and however a prompt was cut before."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import H2O, SnapKV, kept_after_prompt
from octavo.core.kv_groups import KVGroup

HEADS, KV_HEADS, DIM = 4, 2, 4


def plain(q: Any, k: Any, first: int) -> list[list[float]]:
    """[kv heads][keys]: the weights that the rows from ``first`` on give each key."""
    found = [[0.0] * len(k) for _ in range(KV_HEADS)]
    for p in range(first, len(k)):
        for head in range(HEADS):
            at = head // (HEADS // KV_HEADS)
            query = q[p][head * DIM : (head + 1) * DIM]
            keys = [k[j][at * DIM : (at + 1) * DIM] for j in range(p + 1)]
            weights = [math.exp(0.5 * math.fsum(a * b for a, b in zip(query, key, strict=True))) for key in keys]
            for j, weight in enumerate(weights):
                found[at][j] += weight / math.fsum(weights)
    return found


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("length", "window", "page_size"), [(5, 1, 1), (70, 7, 4), (150, 33, 16)])
def test_each_key_has_the_weights_that_the_rows_give_it(name: str, length: int, window: int, page_size: int) -> None:
    rng = random.Random(length)
    q, (k, v) = matrix(rng, length, HEADS * DIM), (matrix(rng, length, KV_HEADS * DIM) for _ in range(2))
    backend = create_backend(name)
    pages = -(-length // page_size)
    pool = backend.allocate_kv(pages, page_size, (KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM),))
    table = [[rng.sample(range(pages), pages)]]
    whole = backend.batch(range(length), range(length), [length], table, pool)
    backend.write_kv(backend.weight("k", k), backend.weight("v", v), whole, layer=0)
    first = length - window
    batch = backend.batch(range(window), range(first, length), [window], table, pool, no_write=[True])
    batch.mass = {}
    asked = {"layer": 0, "scale": 0.5, "head_dim": DIM}
    y = backend.to_lists(backend.attention(backend.weight("q", q[first:]), batch, **asked))
    got, expected = backend.to_lists(batch.mass[0]), plain(q, k, first)
    assert all(g == pytest.approx(e, abs=3e-6) for g, e in zip(got, expected, strict=True))
    assert sum(map(sum, got)) == pytest.approx(HEADS * window, abs=1e-4)
    batch.mass, batch.cache = None, {}
    assert backend.to_lists(backend.attention(backend.weight("q", q[first:]), batch, **asked)) == y


@pytest.mark.parametrize("name", BACKENDS)
def test_where_it_is_not_defined_it_is_refused(name: str) -> None:
    backend = create_backend(name)
    pool = backend.allocate_kv(4, 4, (KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM),))
    two = backend.batch([0, 0], [0, 0], [1, 1], [[[0], [1]]], pool)
    tree = backend.batch([0, 0], [0, 0], [2], [[[0]]], pool, parent_rows=[[-1, -1]])
    one = backend.batch([0], [0], [1], [[[0]]], pool)
    for batch, window in ((two, 0), (tree, 0), (one, 3)):
        batch.mass = {}
        rows = backend.weight("q", matrix(random.Random(1), len(batch.token_ids), HEADS * DIM))
        with pytest.raises(InvalidInput) as caught:
            backend.attention(rows, batch, layer=0, scale=0.5, head_dim=DIM, window=window)
        assert caught.value.field == "mass"


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_turn_further_than_to_where_their_keys_lie(name: str) -> None:
    from octavo.backends.ops import RopeTable

    backend, rope = create_backend(name), RopeTable((1.0, 0.1), DIM)
    pool = backend.allocate_kv(8, 4, (KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM),))
    q, k = (backend.weight("x", matrix(random.Random(at), 3, n * DIM)) for at, n in enumerate((HEADS, KV_HEADS)))
    tables = [[[0], [1, 2]]]
    moved = backend.batch([1, 2, 3], [1, 2, 6], [2, 1], tables, pool, shifts=[8, 0])
    far = backend.batch([1, 2, 3], [9, 10, 6], [2, 1], [[[0, 0, 3], [1, 2]]], pool)
    got, expected = (backend.rope(q, k, batch, rope=rope, head_dim=DIM) for batch in (moved, far))
    assert list(map(backend.to_lists, got)) == list(map(backend.to_lists, expected))
    assert backend.to_lists(moved.slot_mapping[0]) == [1, 2, 10]


@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(0, 9), st.sampled_from([1, 3, 5]), st.integers(1, 40))
def test_all_heads_at_once_choose_as_each_by_itself(seed: int, window: int, more: int, kernel: int, rest: int) -> None:
    np = pytest.importorskip("numpy")
    from octavo.backends.numpy_eviction import kept_of

    policy = SnapKV(window + more, window, kernel, block=1)
    count, rng = policy.capacity + rest, random.Random(seed)
    spread = rng.choice([1, 3, 1000])  # few values: ties are common
    mass = {layer: [[rng.randint(0, spread) / 7 for _ in range(count)] for _ in range(2)] for layer in range(3)}
    for chosen in (policy, H2O(more + 1, window, block=1)):
        kept = kept_of(np.array([mass[at] for at in range(3)], np.float64), chosen)
        assert kept.tolist() == [[list(chosen.kept(scores)) for scores in mass[at]] for at in range(3)]
    assert policy.kept(mass[0][0]) == kept_after_prompt(mass[0][0], policy.capacity, window, kernel)
    stays = (
        *sorted(range(count - window), key=lambda at: (-mass[0][0][at], at))[: more + 1],
        *range(count - window, count),
    )
    assert H2O(more + 1, window, block=1).kept(mass[0][0]) == tuple(sorted(stays))
