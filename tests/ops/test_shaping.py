"""The rarer samplers, each against a second definition: one distribution after another, by the books."""

from __future__ import annotations

import doctest
import itertools
import math
import random
import re
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.backends import BACKENDS, create_backend
from octavo.backends.numpy_shaping import mirostat_count
from octavo.backends.ops import SamplingRow
from octavo.backends.random import XTC_COIN, noise_bits
from octavo.backends.sampling import candidates, draw, logprobs_row
from octavo.backends.shaping import excludes_top_choices
from octavo.core.params import SamplingParams
from octavo.core.samplers import SamplerParams

ALL = [create_backend(name) for name in BACKENDS]
Chances = dict[int, float]

SHAPES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "dynatemp_range": st.sampled_from([0.0, 0.0, 0.2, 3.0]),
        "dynatemp_exponent": st.sampled_from([1.0, 0.0, 0.5, 2.0]),
        "top_n_sigma": st.sampled_from([-1.0, 0.0, 0.7, 1.3, 3.1]),
        "top_k": st.sampled_from([0, 0, 1, 4]),
        "typical_p": st.sampled_from([1.0, 0.93, 0.51, 0.07]),
        "top_p": st.sampled_from([1.0, 0.913, 0.377]),
        "min_p": st.sampled_from([0.0, 0.0503, 0.31]),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.1003, 0.0317, 0.0, 0.6]),
        "mirostat": st.sampled_from([0, 0, 1, 2]),
    }
)
LOGITS = st.lists(
    st.one_of(st.floats(-12, 12, width=32), st.sampled_from([0.0, 1.5, 3.0, -math.inf])), min_size=1, max_size=24
)


class Book:
    """Distributions by id; `margin` is how near any decision was to being another one."""

    def __init__(self) -> None:
        self.margin = math.inf

    def at_least(self, value: float, bound: float) -> bool:
        if value != bound:
            self.margin = min(self.margin, abs(value - bound))
        return value >= bound

    def softmax(self, logits: Chances, temperature: float) -> Chances:
        top = max(logits.values())
        weights = {i: math.exp((v - top) / temperature) for i, v in logits.items()}
        return self.kept(weights, weights)

    def kept(self, chances: Chances, ids: Any) -> Chances:
        total = math.fsum(chances[i] for i in ids)
        return {i: chances[i] / total for i in ids}

    def until(self, chances: Chances, order: list[int], share: float) -> Chances:
        if share >= 1.0:
            return chances
        place = 1
        while place < len(order) and not self.at_least(math.fsum(chances[i] for i in order[:place]), share):
            place += 1
        return self.kept(chances, order[:place])

    def temperature(self, logits: Chances, p: SamplingParams) -> float:
        if not p.dynatemp_range:
            return p.temperature
        chances = self.softmax(logits, 1.0).values()
        share = -math.fsum(c * math.log(c) for c in chances if c) / math.log(len(logits)) if len(logits) > 1 else 0.0
        low = max(0.0, p.temperature - p.dynatemp_range)
        return low + (p.temperature + p.dynatemp_range - low) * min(1.0, share) ** p.dynatemp_exponent

    def shaped(self, row: list[float], p: SamplingParams, coin: bool, mu: float = 0.0) -> tuple[float, Chances]:
        """The temperature, and what may be drawn with what chance; at temperature 0 nothing is."""
        logits = {i: v for i, v in enumerate(row) if v > -math.inf}
        temperature = self.temperature(logits, p)
        if temperature == 0.0:
            return 0.0, {}
        floor = max(logits.values()) - p.top_n_sigma * statistics.pstdev(logits.values())
        if p.top_n_sigma > 0.0:
            logits = {i: v for i, v in logits.items() if self.at_least(v, floor) or v == max(logits.values())}
        by_chance = sorted(logits, key=lambda i: (-logits[i], i))
        by_chance = by_chance[: p.top_k] if p.top_k > 0 else by_chance
        chances = self.softmax({i: logits[i] for i in by_chance}, temperature)
        chances = (
            self.until(chances, self.by_typicality(chances, logits), p.typical_p) if p.typical_p < 1.0 else chances
        )
        chances = self.until(chances, sorted(chances, key=by_chance.index), p.top_p)
        bound = p.min_p * max(chances.values())
        chances = self.kept(chances, [i for i in chances if self.at_least(chances[i], bound)])
        likely = [i for i in by_chance if i in chances and self.at_least(chances[i], p.xtc_threshold)]
        if coin and len(likely) > 1:
            chances = self.kept(chances, [i for i in chances if i not in likely[:-1]])
        chances = {i: chances[i] for i in by_chance if i in chances}
        return temperature, self.mirostat(chances, p.mirostat, mu)

    def mirostat(self, chances: Chances, version: int, mu: float) -> Chances:
        order = list(chances)
        if version == 2:
            likely = [i for i in order if chances[i] and self.at_least(mu, -math.log2(chances[i]))]
            return self.kept(chances, likely or order[:1])
        if version == 0 or len(order) == 1:
            return chances
        t = [math.log((i + 1) / i) for i in range(1, min(100, len(order)))]
        b = [math.log(chances[i]) - math.log(chances[j]) for i, j in itertools.pairwise(order[:100])]
        s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
        self.at_least(s, 1e-3)
        self.at_least(s, 1.0)
        if s < 1e-3:
            return chances if mu > math.log2(len(order) - 1) else self.kept(chances, order[:1])
        k = ((s - 1) / (1 - len(order) ** (1 - s)) * 2 ** min(mu, 99)) ** (1 / s)
        self.margin = min(self.margin, abs(k - round(k)))
        return self.kept(chances, order[: max(1, int(min(k, 1e9)))])

    def by_typicality(self, chances: Chances, logits: Chances) -> list[int]:
        entropy = -math.fsum(c * math.log(c) for c in chances.values() if c)
        off = {i: abs(-math.log(c) - entropy) if c else math.inf for i, c in chances.items()}
        for i in off:
            for j in off:
                if logits[i] != logits[j]:
                    self.margin = min(self.margin, abs(off[i] - off[j]))
        return sorted(off, key=lambda i: off[i])


@settings(max_examples=200, deadline=None)
@given(LOGITS, SHAPES, st.integers(0, 2**64 - 1), st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.5, 1.7, 3.3, 1e6]))
def test_what_may_be_drawn_is_what_the_books_say(
    row: list[float], shape: dict[str, Any], seed: int, index: int, mu: float
) -> None:
    assume(max(row) > -math.inf)
    wanted = SamplingRow(SamplingParams(**shape), seed, output_index=index, mu=mu)
    book = Book()
    coin = wanted.params.xtc_probability > 0.0 and excludes_top_choices(wanted)
    temperature, chances = book.shaped(row, wanted.params, coin, mu)
    got = candidates(row, max(row), wanted)
    if temperature == 0.0:
        assert got == [(0.0, row.index(max(row)))]
    else:
        assume(book.margin > 1e-9)
        plain = (
            not wanted.params.shapes
            and wanted.params.top_k <= 0
            and wanted.params.top_p == 1
            and not wanted.params.min_p
        )
        expected = [i for i in sorted(chances) if chances[i] > 0] if plain else sorted(chances)
        seen = sorted(i for _, i in got)
        assert set(seen) <= set(expected) if plain else seen == expected
        top = max(row[i] for i in chances)
        for z, i in got:
            assert z - max(z for z, _ in got) == pytest.approx((row[i] - top) / temperature, abs=1e-9)
    for backend in ALL:
        made = backend.weight("x", [row])
        assert backend.sample(backend.process_logits(made, [wanted]), [wanted]) == [draw(got, wanted)], backend.name


def test_typical_may_pass_over_the_likeliest() -> None:
    row = [math.log(c) for c in (0.4, 0.2, 0.2, 0.1, 0.1)]  # the entropy is 1.47; -log: 0.92, 1.61, 1.61, 2.3, 2.3
    wanted = SamplingRow(SamplingParams(typical_p=0.3), 1)
    assert [i for _, i in candidates(row, max(row), wanted)] == [1, 2]


def test_sigma_does_not_care_for_temperature() -> None:
    row = [5.0, 4.0, 1.0, 0.0, -2.0]  # sigma 2.6
    for temperature in (0.2, 1.0, 9.0):
        wanted = SamplingRow(SamplingParams(top_n_sigma=1.0, temperature=temperature), 1)
        assert [i for _, i in candidates(row, 5.0, wanted)] == [0, 1]


def test_min_p_is_of_the_likeliest_that_is_left() -> None:
    row = [math.log(c) for c in (0.4, 0.2, 0.2, 0.1, 0.1)]
    for backend in ALL:  # 0.9 of 0.4 would leave nothing
        wanted = SamplingRow(SamplingParams(typical_p=0.3, min_p=0.9), 4)
        assert backend.sample(backend.weight("x", [row]), [wanted])[0] in (1, 2)


def test_the_coin_of_xtc_falls_as_often_as_it_should_and_is_the_rows_own() -> None:
    params = SamplingParams(xtc_probability=0.3)
    rows = [SamplingRow(params, 5, output_index=index) for index in range(4000)]
    falls = [excludes_top_choices(row) for row in rows]
    assert abs(sum(falls) - 1200) < 4 * math.sqrt(4000 * 0.21)
    assert [noise_bits(5, 0, i, 0, XTC_COIN) / 2**32 < 0.3 for i in range(4000)] == falls
    other = [excludes_top_choices(SamplingRow(params, 5, choice=1, output_index=i)) for i in range(4000)]
    assert other != falls


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_as_many_of_long_rows_as_the_books(version: int) -> None:
    rng = random.Random(6)
    for index in range(60):
        row = [rng.gauss(0.0, rng.choice((0.5, 1.0, 2.0))) for _ in range(300)]
        wanted = SamplingRow(SamplingParams(mirostat=version), 7, output_index=index, mu=rng.uniform(0.0, 11.0))
        kept = candidates(row, max(row), wanted)
        book = Book()
        _, chances = book.shaped(row, wanted.params, False, wanted.mu)
        assert len(kept) == len(chances) or book.margin < 1e-9
        assert mirostat_count(np.array(sorted(row)[::-1]) - max(row), version, wanted.mu) == len(kept)
        for backend in ALL:
            assert backend.sample(backend.weight("x", [row]), [wanted]) == [draw(kept, wanted)], backend.name


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise(version: int) -> None:
    rng = random.Random(4)
    p = SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2)
    mu, bits = p.mirostat_start, []
    for index in range(600):
        row = [rng.gauss(0.0, 2.0) for _ in range(300)]
        token = draw(candidates(row, max(row), wanted := SamplingRow(p, 7, output_index=index, mu=mu)), wanted)
        logprob = logprobs_row(row, token, 0, ()).logprob
        mu = p.mirostat_after(mu, logprob)
        bits.append(-logprob / math.log(2))
    assert abs(statistics.fmean(bits[100:]) - 3.0) < 0.06
    assert p.mirostat_after(mu, math.nan) == mu == p.mirostat_after(mu, -math.inf)


def test_a_row_is_what_it_is_alone() -> None:
    rng = random.Random(9)
    logits = [[rng.gauss(0.0, 2.0) for _ in range(40)] for _ in range(24)]
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
    kinds: list[dict[str, Any]] = [
        {"typical_p": 0.6},
        {"top_n_sigma": 1.0},
        xtc,
        {"dynatemp_range": 0.7},
        {"mirostat": 1},
    ]
    rows = [SamplingRow(SamplingParams(**kinds[i % 5]), rng.getrandbits(64), output_index=i) for i in range(24)]
    for backend in ALL:
        together = backend.sample(backend.weight("x", logits), rows)
        alone = [backend.sample(backend.weight("x", [x]), [row])[0] for x, row in zip(logits, rows, strict=True)]
        assert together == alone
        assert together[::-1] == backend.sample(backend.weight("x", logits[::-1]), rows[::-1])


@pytest.mark.parametrize("backend", ALL, ids=lambda b: b.name)
def test_extremes(backend: Any) -> None:
    shapes: list[dict[str, Any]] = [
        {"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"xtc_probability": 1.0}, {"dynatemp_range": 1.0},
        {"mirostat": 1}, {"mirostat": 2}, {"mirostat": 2, "min_p": 0.5, "xtc_probability": 1.0},
        {"typical_p": 0.9, "min_p": 1.0, "xtc_probability": 1.0, "top_n_sigma": 0.1, "dynatemp_range": 3.0},
    ]  # fmt: skip
    for shape in shapes:
        wanted = [SamplingRow(SamplingParams(**shape), 3)]
        for row, expected in (([2.5], 0), ([-math.inf, -3e38, -math.inf], 1), ([0.0, math.inf, -math.inf], 1)):
            assert backend.sample(backend.weight("x", [row]), wanted) == [expected], (shape, row)


def test_the_page_holds_what_the_code_says() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "decoding.md"
    section = page.read_text().split("## Samplers\n")[1].split("\n## ")[0]
    example = doctest.DocTestParser().get_doctest(section.replace("```", ""), {}, "samplers", str(page), 0)
    assert len(example.examples) == 10
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0
    named = re.findall(r"^\| \d+ \|[^|]*\|([^|]*)\|", section, re.MULTILINE)
    parameters = [name for cell in named for name in re.findall(r"`(\w+)`", cell)]
    beside = {
        "logit_bias",
        "allowed_token_ids",
        "banned_token_ids",
        "min_tokens",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }
    beside |= {"repetition_penalty", "frequency_penalty", "presence_penalty"}
    own = {item.name for item in fields(SamplerParams)} - {
        "dry_breaker_ids",
        "banned_sequences",
        "repetition_detection",
    }
    assert set(parameters) == own | beside
