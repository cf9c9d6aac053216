"""Attention against its formula, and the reference's promise: the same bits however a sequence is cut or batched."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend, numpy_attention
from octavo.backends.list_attention import blocks_of
from octavo.core.errors import InvariantBroken, UseAfterRelease
from octavo.core.kv_groups import KVGroup

HEADS, KV_HEADS, DIM = 4, 2, 4


def naive(q: Any, k: Any, v: Any, window: int, soft_cap: float, sinks: Any) -> list[list[float]]:
    """The formula, one token and head at a time, over a plain K/V list."""
    out = []
    for p, row in enumerate(q):
        y: list[float] = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS) * DIM
            query = row[head * DIM : (head + 1) * DIM]
            seen = range(max(0, p - window + 1) if window else 0, p + 1)
            scores = [0.5 * math.fsum(a * b for a, b in zip(query, k[j][kv : kv + DIM], strict=True)) for j in seen]
            if soft_cap:
                scores = [soft_cap * math.tanh(s / soft_cap) for s in scores]
            extra = [sinks[head]] if sinks else []
            total = math.fsum(math.exp(s) for s in scores + extra)
            y += [
                math.fsum(math.exp(s) * v[j][kv + d] for s, j in zip(scores, seen, strict=True)) / total
                for d in range(DIM)
            ]
        out.append(y)
    return out


class Run:
    """One sequence of random Q, K, V through a backend in pieces."""

    def __init__(self, rng: random.Random, length: int, **options: Any) -> None:
        self.length, self.options = length, options
        self.q = matrix(rng, length, HEADS * DIM)
        self.k, self.v = (matrix(rng, length, KV_HEADS * DIM) for _ in range(2))

    def pieces(self, name: str, cuts: list[int], page_size: int, companion: Run | None = None) -> list[list[float]]:
        """Outputs of all tokens; with a companion, its last token rides along in every step."""
        backend = create_backend(name)
        group = KVGroup((0,), num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM)
        pages = -(-600 // page_size)
        pool = backend.allocate_kv(2 * pages, page_size, (group,))
        table, other = list(range(pages))[::-1], list(range(pages, 2 * pages))
        if companion:
            companion.step(backend, pool, [other], [(0, companion.length)])
        out: list[list[float]] = []
        for start, stop in zip([0, *cuts], [*cuts, self.length], strict=True):
            if companion:
                tail = (companion.length - 1, companion.length)
                both = self.step(backend, pool, [other, table], [tail, (start, stop)], companion)
                out += both[1:]
            else:
                out += self.step(backend, pool, [table], [(start, stop)])
        return out

    def step(self, backend: Any, pool: Any, tables: Any, spans: Any, first: Run | None = None) -> list[list[float]]:
        runs = [first, self] if first else [self]
        rows = [
            [getattr(run, name)[p] for run, span in zip(runs, spans, strict=True) for p in range(*span)]
            for name in "qkv"
        ]
        positions = [p for span in spans for p in range(*span)]
        batch = backend.batch(positions, positions, [b - a for a, b in spans], [tables], pool)
        q, k, v = (backend.weight("x", values) for values in rows)
        backend.write_kv(k, v, batch, layer=0)
        y = backend.attention(q, batch, layer=0, scale=0.5, head_dim=DIM, **self.options)
        result: list[list[float]] = backend.to_lists(y)
        return result


OPTIONS = [
    {},
    {"window": 5},
    {"window": 70, "soft_cap": 2.0},
    {"sinks": [0.5, -1.0, 3.0, 0.0]},
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_formula(name: str, options: dict[str, Any]) -> None:
    run = Run(random.Random(3), 150, **options)
    got = run.pieces(name, [64, 65, 130], 16)
    full = {"window": 0, "soft_cap": 0.0, "sinks": None} | options
    expected = naive(run.q, run.k, run.v, **full)
    assert max(abs(a - b) for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True)) < 2e-6


def test_reference_gives_the_same_bits_for_any_cut_page_size_and_company() -> None:
    rng = random.Random(7)
    for options in OPTIONS:
        run, friend = Run(rng, 75, **options), Run(rng, 9)
        whole = run.pieces("reference", [], 16)
        assert run.pieces("reference", list(range(1, 75)), 1) == whole
        for page_size in (2, 4, 16):
            cuts = sorted(rng.sample(range(1, 75), rng.randint(1, 6)))
            assert run.pieces("reference", cuts, page_size, rng.choice([None, friend])) == whole


def test_blocks_and_chunks_lie_at_absolute_positions() -> None:
    lanes = [([[float(p)]], [[float(-p)]]) for p in range(40, 600)]
    blocks = list(blocks_of(70, 600, 40, lanes, 0))
    firsts = [int(keys[0][0]) for _, keys, _ in blocks]
    assert firsts == [70, 128, 192, 256, 320, 384, 448, 512, 576]
    assert [chunk for chunk, _, _ in blocks] == [0] * 7 + [1, 1]
    assert [len(keys) for _, keys, _ in blocks] == [58] + [64] * 7 + [24]
    assert blocks[-1][2] == [tuple(float(-p) for p in range(576, 600))]


def test_more_than_one_chunk_gives_the_same_bits_and_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(numpy_attention, "_token_by_token")  # finite values do not need it
    run = Run(random.Random(8), 530)
    tail = [run.length - 2, run.length - 1]
    whole, cut = run.pieces("reference", [500], 16), run.pieces("reference", [511, 512, *tail], 4)
    assert whole == cut
    vector = run.pieces("numpy", [500], 16)
    assert max(abs(a - b) for x, y in zip(whole, vector, strict=True) for a, b in zip(x, y, strict=True)) < 2e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_token_that_is_not_finite_does_not_reach_earlier_ones(name: str, bad: float) -> None:
    run = Run(random.Random(9), 12)
    clean = run.pieces(name, [4], 4)
    run.v[9][0] = run.k[9][1] = bad
    dirty = run.pieces(name, [4], 4)
    for x, y in zip(clean[:9], dirty[:9], strict=True):
        assert all(abs(a - b) < 1e-6 for a, b in zip(x, y, strict=True))
    assert not all(map(math.isfinite, dirty[9]))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_huge_score_does_not_overflow(name: str) -> None:
    run = Run(random.Random(2), 6)
    run.q = [[v * 1e6 for v in row] for row in run.q]
    assert all(math.isfinite(v) for row in run.pieces(name, [3], 2) for v in row)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [0, 5])
def test_scores_far_below_zero_do_not_give_way_to_hidden_lanes(name: str, window: int) -> None:
    rng = random.Random(10)
    run = Run(rng, 70, window=window)
    run.q = [[10.0] * (HEADS * DIM) for _ in range(run.length)]
    run.k = [[rng.randint(-8, 8) / 32 - 10.0 for _ in row] for row in run.k]  # scores of -205 to -195, exact in float32
    got, expected = run.pieces(name, [40, 69], 4), naive(run.q, run.k, run.v, window, 0.0, None)
    assert max(abs(a - b) for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True)) < 2e-6


def test_reference_refuses_what_was_never_written_or_forgotten() -> None:
    backend = create_backend("reference")
    pool = backend.allocate_kv(2, 4, (KVGroup((0, 1), num_kv_heads=1, k_dim=2, v_dim=2),))
    pool.write(1, 3, [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    assert pool.read(1, 3) == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    pool.forget(1)
    with pytest.raises(UseAfterRelease):
        pool.read(1, 3)
    with pytest.raises(InvariantBroken, match="pages 0 to 1"):
        pool.lanes(-1, 0)
    batch = backend.batch([0], [1], [1], [[[0]]], pool)
    backend.write_kv([[1.0, 1.0]], [[1.0, 1.0]], batch, layer=0)
    with pytest.raises(InvariantBroken, match="position 0 of sequence 0"):
        backend.attention([[1.0, 1.0]], batch, layer=0, scale=1.0, head_dim=2)


def test_access_log_names_request_page_position() -> None:
    backend = create_backend("reference")
    backend.access_log = []
    pool = backend.allocate_kv(4, 2, (KVGroup((0,), num_kv_heads=1, k_dim=2, v_dim=2),))
    batch = backend.batch([0] * 4, [0, 1, 2, 0], [3, 1], [[[3, 1], [0]]], pool, request_ids=["a", "b"])
    backend.write_kv([[1.0, 1.0]] * 4, [[1.0, 1.0]] * 4, batch, layer=0)
    backend.attention([[1.0, 1.0]] * 4, batch, layer=0, scale=1.0, head_dim=2)
    a, b = [("a", 3, 0), ("a", 3, 1), ("a", 1, 2)], [("b", 0, 0)]
    assert backend.access_log == [(*x, "write") for x in a + b] + [(*x, "read") for x in a + b]
