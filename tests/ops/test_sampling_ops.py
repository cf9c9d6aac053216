"""Sampling: against naive definitions, by distribution, at the edges, and each row as if it were alone."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend, numpy_random
from octavo.backends.ops import SamplingRow
from octavo.backends.random import gumbel, noise_bits
from octavo.backends.sampling import candidates, process_row
from octavo.core.errors import InvalidInput, RowError
from octavo.core.params import SamplingParams

ALL = [create_backend(name) for name in BACKENDS]


def row(seed: int = 1, index: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, output_index=index)


def draw(backend: Any, logits: list[list[float]], rows: list[SamplingRow]) -> list[int]:
    ids: list[int] = backend.sample(backend.process_logits(backend.weight("x", logits), rows), rows)
    return ids


finite = st.floats(-20, 20, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(finite, min_size=1, max_size=30),
    st.sampled_from([0.2, 1.0, 3.0]),
    st.integers(-1, 9),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_survivors_are_those_of_the_naive_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    wanted = row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = [i for _, i in candidates(logits, max(logits), wanted)]

    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp((logits[i] - max(logits)) / temperature) for i in order]
    expected = []
    for place, token_id in enumerate(order):
        before = sum(weights[:place]) / sum(weights)
        if (place == 0 or top_p == 1.0 or before < top_p) and weights[place] >= min_p * weights[0]:
            expected.append(token_id)
    if top_k <= 0 and top_p == 1.0 and min_p == 0.0:  # without cuts: what can still win, in id order
        expected = [i for i, v in enumerate(logits) if (v - max(logits)) / temperature >= -26.1]
    assert got == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=1, max_size=30), st.integers(0, 2**64 - 1), st.sampled_from([0.3, 1.0, 2.0]))
def test_a_draw_is_the_largest_logit_plus_noise(logits: list[float], seed: int, temperature: float) -> None:
    noisy = [v / temperature + gumbel(noise_bits(seed, 0, 5, i)) for i, v in enumerate(logits)]
    best = sorted(noisy)[-2:]
    if len(best) == 2 and best[1] - best[0] < 1e-9:
        return  # rounding of v / T against (v - max) / T decides
    for backend in ALL:
        assert draw(backend, [logits], [row(seed, 5, temperature=temperature)]) == [noisy.index(max(noisy))]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -3.0, 0.9]
    count = 1500
    rows = [row(99, index, **params) for index in range(count)]
    ids = draw(ALL[1], [logits] * count, rows)
    kept = [i for _, i in candidates(logits, max(logits), rows[0])]
    weights = [math.exp(logits[i] / rows[0].params.temperature) for i in kept]
    assert set(ids) <= set(kept)
    expected = [count * w / sum(weights) for w in weights]
    chi_square = sum((ids.count(i) - e) ** 2 / e for i, e in zip(kept, expected, strict=True))
    freedom = len(kept) - 1
    assert chi_square < freedom + 3.5 * math.sqrt(2 * freedom)
    assert draw(ALL[0], [logits] * 50, rows[:50]) == ids[:50]


def test_passing_over_the_hopeless_changes_no_draw() -> None:
    rng = random.Random(12)
    for seed in range(60):
        logits = [rng.gauss(0.0, 1.0) for _ in range(1200)]
        logits[rng.randrange(1200)] += 9.0 * (seed % 2)
        noise = numpy_random.gumbel(numpy_random.noise_bits(seed, 0, 0, np.arange(1200)))
        wanted = int((np.array(logits, np.float32) + noise.astype(np.float64)).argmax())
        assert draw(ALL[1], [logits], [row(seed)]) == [wanted]


def test_equal_scores_and_equal_noise_give_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.backends.sampling.gumbel", lambda bits: 0.5)
    monkeypatch.setattr("octavo.backends.numpy_random.gumbel", lambda bits: np.full(len(bits), 0.5, np.float32))
    for params in ({}, {"top_k": 4}):
        assert [draw(b, [[0.0, 2.0, 1.0, 2.0, 2.0]], [row(**params)]) for b in ALL] == [[1], [1]]


def test_a_row_is_what_it_is_alone() -> None:
    rng = random.Random(4)
    logits = matrix(rng, 20, 50, 2.0)
    rows = [
        row(rng.getrandbits(64), i, temperature=i % 3, top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.7]))
        for i in range(20)
    ]
    for backend in ALL:
        together = draw(backend, logits, rows)
        assert together == [draw(backend, [x], [r])[0] for x, r in zip(logits, rows, strict=True)]
        assert together[::-1] == draw(backend, logits[::-1], rows[::-1])


def test_seed_choice_index_and_purpose_make_different_streams() -> None:
    params = SamplingParams()
    logits = [[0.0] * 5000]
    rows = [
        SamplingRow(params, 1),
        SamplingRow(params, 2),
        SamplingRow(params, 1, choice=1),
        SamplingRow(params, 1, output_index=1),
        SamplingRow(params, 1, purpose=1),
    ]
    ids = draw(ALL[1], logits * 5, rows)
    assert len(set(ids)) == 5
    assert ids == draw(ALL[0], logits * 5, rows)


@pytest.mark.parametrize("backend", ALL, ids=lambda b: b.name)
class TestEdges:
    def test_greedy_takes_the_lowest_id_of_a_tie(self, backend: Any) -> None:
        assert draw(backend, [[1.0, 3.0, 3.0], [0.0, -0.0, 0.0]], [row(temperature=0.0)] * 2) == [1, 0]

    def test_one_candidate(self, backend: Any) -> None:
        logits = [[-5.0, 2.0, 9.0]]
        for params in (
            {"top_k": 1},
            {"top_p": 1e-9},
            {"min_p": 1.0},
            {"banned_token_ids": (0, 1)},
            {"temperature": 1e-9},
        ):
            assert draw(backend, logits, [row(7, **params)]) == [2]
        assert draw(backend, logits, [row(7, allowed_token_ids=(0,))]) == [0]
        assert draw(backend, [[1.5]], [row(7)]) == [0]

    def test_extreme_logits(self, backend: Any) -> None:
        for params in ({}, {"temperature": 0.0}, {"temperature": 1e-6}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}):
            wanted = [row(3, **params)]
            assert draw(backend, [[-math.inf, -1e30, 1e30, 0.0]], wanted) == [2]
            assert draw(backend, [[-math.inf, -3e38, -math.inf]], wanted) == [1]
            assert draw(backend, [[0.0, math.inf, -math.inf]], wanted) == [1]

    def test_nothing_to_draw_names_the_row(self, backend: Any) -> None:
        nothing = [[0.0, 1.0], [-math.inf, -math.inf], [math.nan, 1.0]]
        for params in ({}, {"temperature": 0.0}, {"top_k": 1}):
            with pytest.raises(RowError, match="no token can be drawn") as error:
                draw(backend, nothing, [row(**params)] * 3)
            assert error.value.rows == (1, 2)
        with pytest.raises(RowError):
            draw(backend, [[0.0, 1.0]], [SamplingRow(SamplingParams(banned_token_ids=(0,)), 1, banned_now=(1,))])

    def test_end_ids_are_banned_while_min_tokens_lasts(self, backend: Any) -> None:
        wanted = SamplingRow(SamplingParams(temperature=0.0), 1, banned_now=(2,))
        assert draw(backend, [[0.0, 1.0, 9.0]], [wanted]) == [1]

    def test_grammar_mask(self, backend: Any) -> None:
        logits = [[float(i) for i in range(20)]]
        for mask, expected in ((b"\xff\x02", 9), (b"\x10", 4)):
            wanted = SamplingRow(SamplingParams(temperature=0.0), 1, grammar_mask=mask)
            assert draw(backend, logits, [wanted]) == [expected]

    def test_ids_outside_the_vocabulary_are_refused(self, backend: Any) -> None:
        for params in ({"logit_bias": {3: 1.0}}, {"allowed_token_ids": (0, 3)}, {"banned_token_ids": (3,)}):
            with pytest.raises(InvalidInput, match="token ids are 0 to 2"):
                draw(backend, [[0.0, 1.0, 2.0]], [row(**params)])

    def test_greedy_without_wishes_copies_nothing(self, backend: Any) -> None:
        logits = backend.weight("x", [[1.0, 2.0]])
        out = backend.process_logits(logits, [row()])
        assert out is logits or out[0] is logits[0]

    def test_wishes_do_not_change_the_raw_logits(self, backend: Any) -> None:
        logits = backend.weight("x", [[1.0, 2.0, 3.0]])
        wanted = SamplingRow(
            SamplingParams(logit_bias={0: 9.0}, repetition_penalty=2.0, banned_token_ids=(2,)), 1, output_counts={1: 1}
        )
        processed = backend.process_logits(logits, [wanted])
        assert backend.to_lists(logits) == [[1.0, 2.0, 3.0]]
        assert backend.to_lists(processed) == [[10.0, 1.0, -math.inf]]


def test_penalties_follow_their_definition() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={4: 1.0}, banned_token_ids=(5,)
    )
    wanted = SamplingRow(params, 1, prompt_counts={0: 3, 1: 1}, output_counts={1: 2, 2: 1})
    got = process_row([2.0, -2.0, 4.0, 1.0, 1.0, 1.0], wanted)
    #      prompt only   both: *2 - 2*.5 - .25   output: /2 - .5 - .25   untouched  bias  banned
    assert got == [1.0, -5.25, 1.25, 1.0, 2.0, -math.inf]


def test_bias_does_not_revive_a_banned_token() -> None:
    wanted = row(temperature=0.0, logit_bias={0: 100.0}, banned_token_ids=(0,))
    assert [draw(backend, [[0.0, 1.0]], [wanted]) for backend in ALL] == [[1], [1]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=25), st.data())
def test_logprobs_are_the_log_softmax(logits: list[float], data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(logits) - 1))
    k = data.draw(st.integers(0, 5))
    total = math.fsum(math.exp(v) for v in logits)
    expected = [v - math.log(total) for v in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    for backend in ALL:
        (got,) = backend.logprobs(backend.weight("x", [logits]), [token_id], [k], [(0, token_id)])
        assert got.token_id == token_id and got.rank == order.index(token_id) + 1
        assert got.logprob == pytest.approx(expected[token_id], abs=1e-9)
        assert [i for i, _ in got.top] == order[:k]
        assert [v for _, v in got.top] == pytest.approx([expected[i] for i in order[:k]], abs=1e-9)
        assert got.chosen == ((0, pytest.approx(expected[0], abs=1e-9)), (token_id, got.logprob))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprobs_of_a_row_that_is_not_finite_are_not_numbers(bad: float) -> None:
    for backend in ALL:
        (got,) = backend.logprobs(backend.weight("x", [[0.0, bad, 1.0]]), [0], [0], [()])
        assert math.isnan(got.logprob) or got.logprob == -math.inf
