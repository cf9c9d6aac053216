"""From logits to tokens in the library: what the numpy sampler and the reference say, whatever is asked for, wherever a
row stands; in a step and outside of one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_harness import ISAS, compiled, prompt

from octavo.backends import numpy_sampling
from octavo.backends.counts import TokenCounts
from octavo.backends.native_backend import NativeBackend, with_sampling
from octavo.backends.native_lib import library
from octavo.backends.native_program import StepLimits
from octavo.backends.native_slots import SlotSampling
from octavo.backends.ops import SamplingRow
from octavo.backends.reference import ReferenceBackend
from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput, RowError
from octavo.core.params import SamplingParams

PARAMS = (
    *({}, {"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 1.7}, {"temperature": 1e-9}),
    *({"top_k": 1}, {"top_k": 20}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.05}, {"top_p": 0.9999}),
    *({"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.1, "temperature": 2.5}),
    *({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 500, "min_p": 0.001}, {"top_p": 0.7, "temperature": 90.0}),
    *({"typical_p": 0.9}, {"typical_p": 0.2, "temperature": 0.6}, {"typical_p": 0.999, "top_k": 300, "top_p": 0.9}),
    *({"top_n_sigma": 1.0}, {"top_n_sigma": 0.3, "top_k": 40}, {"top_n_sigma": 2.0, "top_p": 0.8, "temperature": 3.0}),
    *(
        {"xtc_probability": 1.0},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "min_p": 0.001},
        {"dynatemp_range": 0.5},
    ),
    *({"dynatemp_range": 2.0, "dynatemp_exponent": 0.7, "temperature": 0.0}, {"xtc_probability": 1.0, "top_p": 0.7}),
)


def rules_of(rng: random.Random, vocab: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bias, bans, a mask, penalties: parameters, and what stands beside them in a row."""
    ids = [rng.randrange(vocab) for _ in range(12)]
    params = {
        "logit_bias": rng.choice([{}, {i: rng.uniform(-9, 9) for i in ids[:4]}]),
        "banned_token_ids": rng.choice([(), tuple(ids[4:6])]),
        "allowed_token_ids": rng.choice([None, None, tuple(range(0, vocab, 2)) + tuple(ids)]),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.7]),
        "frequency_penalty": rng.choice([0.0, -0.4]),
    }
    mask = bytes(rng.choice([255, 0b01010111]) for _ in range(rng.choice([vocab // 8 + 1, vocab // 9])))
    beside = {
        "banned_now": rng.choice([(), (ids[6],)]),
        "penalties": rng.choice([{}, {i: rng.uniform(0, 40) for i in ids[3:9]}]),
        "grammar_mask": rng.choice([None, None, mask]),
        "prompt_counts": rng.choice([Counter, TokenCounts])(ids[7:10] + ids[7:8]),
        "output_counts": rng.choice([Counter, TokenCounts])(ids[8:] * 2 + ids[9:]),
    }
    return params, beside


def rows_of(rng: random.Random, count: int, vocab: int = 0) -> list[SamplingRow]:
    """Rows of every kind; with rules in two of three, given a vocabulary."""
    rows = []
    for i in range(count):
        more, beside = rules_of(rng, vocab) if vocab and i % 3 else ({}, {})
        params = SamplingParams(**{"temperature": 1.0} | PARAMS[i % len(PARAMS)] | more)
        where = {"choice": rng.randrange(4), "output_index": rng.randrange(500), "purpose": rng.randrange(2)}
        rows.append(SamplingRow(params, rng.getrandbits(64), **where, **beside))
    return rows


def logits_of(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Rows of different sharpness, with ties and banned tokens; two flat ones, two with values at all scales."""
    x = rng.normal(size=(count, vocab)) * rng.choice([0.3, 2.0, 8.0], size=(count, 1))
    x = np.where(rng.random((count, vocab)) < 0.02, -np.inf, np.round(x, 2))
    x[:2] = 1.5
    x[2:4] *= 10.0 ** rng.integers(-30, 30, size=(2, vocab))
    return x.astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_draws_equal_the_numpy_sampler(isa: str) -> None:
    backend = NativeBackend(isa, 2)
    for seed, vocab in enumerate((7, 333, 5000)):
        rows = rows_of(random.Random(seed), 5 * len(PARAMS))
        logits = logits_of(np.random.default_rng(seed), len(rows), vocab)
        assert backend.sample(logits, rows) == numpy_sampling.sample(logits, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_rules_leave_the_bits_that_numpy_leaves(isa: str) -> None:
    backend = NativeBackend(isa, 3)
    for seed, vocab in enumerate((40, 333, 2000)):
        rows = rows_of(random.Random(seed), 60, vocab)
        logits = logits_of(np.random.default_rng(seed), len(rows), vocab)
        logits[7, 3], logits[8, 5] = np.nan, np.inf
        before = logits.tobytes()
        processed = backend.process_logits(logits, rows)
        expected = numpy_sampling.process_logits(logits, rows)
        assert np.array_equal(processed, expected, equal_nan=True)
        assert logits.tobytes() == before
        able = [i for i in range(len(rows)) if np.isfinite(expected[i].max())]
        chosen, asked = backend.select_rows(processed, _batch(able)), [rows[i] for i in able]
        assert backend.sample(chosen, asked) == numpy_sampling.sample(expected[able], asked)


def _batch(rows: Sequence[int]) -> Any:
    return type("Batch", (), {"logit_rows": list(rows)})


finite = st.floats(-20, 20, width=32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(finite, st.just(-math.inf), st.just(0.0)), min_size=1, max_size=200), st.integers(0, 2**32))
def test_any_row_is_drawn_as_the_reference_draws_it(values: list[float], seed: int) -> None:
    rng = random.Random(seed)
    params = {"temperature": rng.choice([0.3, 1.0, 4.0]), "top_k": rng.choice([0, 1, 3, 100]), "min_p": 0.0}
    params |= {"top_p": rng.choice([1.0, 0.9, 0.313]), "min_p": rng.choice([0.0, 0.07])}
    params |= {"typical_p": rng.choice([1.0, 1.0, 0.91, 0.2]), "top_n_sigma": rng.choice([0.0, 0.0, 0.77, 2.3])}
    params |= {"xtc_probability": rng.choice([0.0, 0.5]), "xtc_threshold": rng.choice([0.07, 0.013])}
    params |= {"dynatemp_range": rng.choice([0.0, 0.0, 0.3, 5.0]), "dynatemp_exponent": rng.choice([1.0, 0.4])}
    row = SamplingRow(SamplingParams(**params), seed, output_index=rng.randrange(9))
    answers: list[Any] = []
    for backend in (_REFERENCE, _NATIVE):
        try:
            answers.append(backend.sample(backend.weight("x", [values]), [row]))
        except RowError as error:
            answers.append(error.rows)
    assert answers[0] == answers[1]


_REFERENCE, _NATIVE = ReferenceBackend(), NativeBackend(threads=2)


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


def test_ids_outside_the_vocabulary_are_refused() -> None:
    backend, logits = NativeBackend(threads=1), np.zeros((1, 3), np.float32)
    asked: tuple[dict[str, Any], ...] = (
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (0, 3)},
        {"banned_token_ids": (3,)},
    )
    rows = [SamplingRow(SamplingParams(**params), 1) for params in asked]
    for row in (*rows, SamplingRow(SamplingParams(), 1, banned_now=(3,))):
        with pytest.raises(InvalidInput, match="token ids are 0 to 2"):
            backend.process_logits(logits, [row])
    wild = SamplingRow(SamplingParams(presence_penalty=1.0), 1, output_counts={-1: 1})
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        backend.process_logits(logits, [wild])


def same_logprobs(got: TokenLogprobs, want: TokenLogprobs) -> None:
    assert (got.token_id, got.rank) == (want.token_id, want.rank)
    assert [i for i, _ in got.top] == [i for i, _ in want.top] and [i for i, _ in got.chosen] == [
        i for i, _ in want.chosen
    ]
    values = [[x.logprob, *(v for _, v in x.top), *(v for _, v in x.chosen)] for x in (got, want)]
    assert values[0] == pytest.approx(values[1], abs=2e-6, rel=2e-6, nan_ok=True)


@pytest.mark.parametrize("isa", ISAS)
def test_logprobs_equal_those_of_numpy(isa: str) -> None:
    backend, rng = NativeBackend(isa, 2), random.Random(3)
    for vocab in (1, 70, 3000):
        logits = logits_of(np.random.default_rng(vocab), 24, vocab)
        logits[:, 0] = 0.5
        ids, k = [rng.randrange(vocab) for _ in logits], [rng.choice([0, 1, 7, 20, vocab + 3]) for _ in logits]
        chosen = [tuple(rng.randrange(vocab) for _ in range(rng.randrange(4))) for _ in logits]
        want = numpy_sampling.process_logits(logits, []) if not len(logits) else logits
        for got, row, *asked in zip(backend.logprobs(logits, ids, k, chosen), want, ids, k, chosen, strict=True):
            same_logprobs(got, numpy_sampling.logprobs_row(row, *asked))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprobs_of_a_row_that_is_not_finite_are_not_numbers(bad: float) -> None:
    logits = np.array([[0.0, bad, 1.0]], np.float32)
    (got,) = NativeBackend(threads=1).logprobs(logits, [0], [2], [()])
    assert math.isnan(got.logprob)
    if bad == math.inf:  # its most likely tokens are listed for all that
        assert [i for i, _ in got.top] == [1, 2]


class Stepper:
    """A tiny model of which any step can be asked for: 12 sequences of one token."""

    def __init__(self, threads: int) -> None:
        self.loaded = compiled("llama-biases", threads=threads)
        self.pool = self.loaded.ops.allocate_kv(12, 16, self.loaded.model.kv_groups())
        self.loaded.model.open(self.pool, StepLimits(16, 12, 16))
        self.slots = SlotSampling()
        self.placed: dict[int, tuple[SamplingParams, int]] = {}

    def run(self, rows: list[SamplingRow], step: int) -> tuple[np.ndarray, list[int], list[TokenLogprobs]]:
        """Logits (a copy), what the step drew and its logprobs, where asked."""
        ops, batch = self.loaded.ops, with_sampling(self.batch(len(rows), step), rows)
        logits = self.loaded.model.forward(ops, {}, batch)
        drawn = ops.sample(ops.process_logits(logits, batch.sampling), batch.sampling)
        assert ops.process_logits(logits, batch.sampling) is logits, "the step has drawn"
        asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        chosen = [rows[i].params.logprob_token_ids for i in asking]
        some = ops.select_rows(logits, replace(batch, logit_rows=asking))
        found = ops.logprobs(some, [drawn[i] for i in asking], [rows[i].params.logprobs for i in asking], chosen)
        return logits.copy(), drawn, found

    def batch(self, count: int, step: int) -> Any:
        """A token for each of `count` sequences."""
        ids, tables = prompt(f"step{step}", count), [[[i] for i in range(count)]]
        return self.loaded.ops.batch(ids, [0] * count, [1] * count, tables, self.pool)

    def run_slots(self, rows: list[SamplingRow], step: int) -> tuple[list[int], list[TokenLogprobs]]:
        """The same by slot: row i in slot i, placed when it comes, then told of what changes."""
        for slot, row in enumerate(rows):
            known = (row.params, row.seed)
            (self.slots.refresh if self.placed.get(slot) == known else self.slots.place)(slot, row)
            self.placed[slot] = known
        batch = self.batch(len(rows), step)
        batch.draws = self.slots.draws(range(len(rows)), [row.output_index for row in rows])
        drawn = self.loaded.model.draw(batch)
        asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        return drawn, [self.slots.logprobs(i) for i in asking]


def test_a_step_draws_what_numpy_draws_from_its_logits() -> None:
    """Step after step: rows come, go and change places, parameters stay or not, counts grow."""
    one, four = Stepper(1), Stepper(4)
    rng, vocab = random.Random(11), 96
    rows = rows_of(rng, 10, vocab)
    for step in range(60):
        if rng.random() < 0.2:  # a row as it was before, in its old place
            rows = [*rows[1:], rows[0]] if step % 2 else [rows[-1], *rows[:-1]]
        if rng.random() < 0.3:
            rows = rng.sample(rows, rng.randint(1, len(rows))) + rows_of(rng, rng.randint(0, 3), vocab)
            rows = rows[:12]
        for i, row in enumerate(rows):
            params = rng.choice(
                [row.params, replace(row.params, logprobs=rng.choice([None, 0, 5]), logprob_token_ids=(3, 1))]
            )
            if isinstance(row.output_counts, TokenCounts):
                row.output_counts.add(rng.randrange(vocab))
            banned = rng.choice([row.banned_now, (), (4, 5)])
            rows[i] = replace(row, output_index=row.output_index + 1, params=params, banned_now=banned)
        logits, drawn, found = one.run(rows, step)
        assert four.run(rows, step)[1:] == (drawn, found)
        assert four.run_slots(rows, step) == (drawn, found)
        assert drawn == numpy_sampling.sample(numpy_sampling.process_logits(logits, rows), rows)
        asked = [(i, row.params) for i, row in enumerate(rows) if row.params.logprobs is not None]
        for (i, p), got in zip(asked, found, strict=True):
            same_logprobs(got, numpy_sampling.logprobs_row(logits[i], drawn[i], p.logprobs, p.logprob_token_ids))
            alone = one.loaded.ops.logprobs(logits[i : i + 1], [drawn[i]], [p.logprobs], [p.logprob_token_ids])
            assert alone == [got]


def test_a_step_with_rules_allocates_nothing_in_the_library() -> None:
    stepper, rows = Stepper(2), rows_of(random.Random(2), 12, 96)
    rows = [replace(row, params=replace(row.params, logprobs=3)) for row in rows]
    stepper.run(rows, 0)
    before = library().octavo_allocations()
    for step in range(3):
        stepper.run(rows, step)
    assert library().octavo_allocations() == before


def test_a_step_names_the_rows_that_it_could_not_draw() -> None:
    stepper = Stepper(2)
    rows = [SamplingRow(SamplingParams(), 1) for _ in range(4)]
    rows[2] = replace(rows[2], grammar_mask=b"")
    with pytest.raises(RowError) as caught:
        stepper.run(rows, 0)
    assert list(caught.value.rows) == [2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_counts_follow_what_comes_and_goes(changes: list[tuple[bool, int]]) -> None:
    counts, expected = TokenCounts([3, 3]), Counter([3, 3])
    for comes, token in changes:
        if comes:
            counts.add(token)
            expected[token] += 1
        elif expected[token]:
            counts.remove(token)
            expected[token] -= 1
    assert counts == +expected
    assert sorted(zip(counts.pairs[::2], counts.pairs[1::2], strict=True)) == sorted((+expected).items())
