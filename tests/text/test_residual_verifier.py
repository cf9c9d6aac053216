"""The residual verifier: tokens follow the target's law (chi-square, 10^5 draws), as many as the formula says."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.random import noise_bits
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidInput
from octavo.decoding.speculation.residual import (
    ACCEPT_COIN,
    DRAFT_DRAW,
    RESIDUAL_DRAW,
    Verified,
    expected_tokens,
    uniforms,
    verify,
)
from octavo.decoding.speculation.without_law import check_params
from octavo.engine.fixture import load_fixture
from octavo.engine.parts import parts_from_fixture

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

FIXTURES = Path(__file__).parents[2] / "fixtures"
DRAWS = 100_000
PROMPT = (5, 9, 23, 11)
TREES = {"chain": (-1, 0), "tree": (-1, -1, 0, 1), "wide": (-1, -1, -1)}


def softmax(logits: Doubles, temperature: float) -> Doubles:
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    law: Doubles = weights / weights.sum(axis=-1, keepdims=True)
    return law


@cache
def tiny_logits(depth: int) -> Doubles:
    """Of the tiny model after PROMPT and `depth` more tokens, every one of them: [V] * depth + [V]."""
    parts = parts_from_fixture(
        load_fixture(Path(__file__).parents[2] / "fixtures" / "tiny_model.json"), backend="numpy"
    )
    size = parts.config.vocab_size
    texts = [[*PROMPT, *more] for more in itertools.product(range(size), repeat=depth)]
    length = len(texts[0])
    kv = parts.backend.allocate_kv(len(texts), length, parts.model.kv_groups())
    tables = [[[page] for page in range(len(texts))]] * len(kv.groups)
    flat = [token for text in texts for token in text]
    batch = parts.backend.batch(flat, [*range(length)] * len(texts), [length] * len(texts), tables, kv)
    logits = parts.model.forward(parts.backend, parts.weights, batch)
    return np.asarray(logits, np.float64).reshape(*[size] * depth, size)


@cache
def tiny_laws(kind: str, depth: int) -> Doubles:
    """The target's, or those of a worse model that drafts."""
    logits = tiny_logits(depth)
    return softmax(logits, 0.8) if kind == "target" else 0.9 * softmax(logits, 1.4) + 0.1 / logits.shape[-1]


def tiny_law(kind: str, texts: Ints) -> Doubles:
    """After each text [B, depth]: [B, V]."""
    laws = tiny_laws(kind, texts.shape[1])
    return laws[tuple(texts.T)] if texts.shape[1] else np.tile(laws, (len(texts), 1))


def drawn(law: Doubles, u: Doubles) -> Ints:
    return np.minimum((np.cumsum(law, axis=1) < u[:, None]).sum(axis=1), law.shape[1] - 1)


def coins(seed: int, requests: Ints, token_ids: Ints, output_index: int, purpose: int) -> Doubles:
    """One for each of some requests, which `output_index` tells apart."""
    return uniforms(seed, 0, requests * 8 + output_index, token_ids, purpose)


def drafts_of(
    parents: tuple[int, ...], chosen: bool, seed: int, requests: Ints
) -> tuple[Ints, Doubles, Doubles | None]:
    """Token ids [B, n], and the laws of target and draft at every node [B, n + 1, V]."""
    rows = np.arange(len(requests))
    texts: dict[int, Ints] = {-1: np.zeros((len(rows), 0), np.int64)}
    left: dict[int, Doubles] = {}
    for node, parent in enumerate(parents):
        law = left[parent] if parent in left else tiny_law("draft", texts[parent])
        u = coins(seed, requests, np.full(len(rows), node), len(texts[parent].T), DRAFT_DRAW)
        token = law.argmax(axis=1) if chosen else drawn(law, u)
        law = law.copy()
        law[rows, token] = 0.0
        left[parent] = law / law.sum(axis=1, keepdims=True)
        texts[node] = np.concatenate([texts[parent], token[:, None]], axis=1)
    token_ids = np.stack([texts[node][:, -1] for node in range(len(parents))], axis=1)
    target, draft = (
        np.stack([tiny_law(kind, texts[node]) for node in range(-1, len(parents))], axis=1)
        for kind in ("target", "draft")
    )
    return token_ids, target, None if chosen else draft


def played(parents: tuple[int, ...], chosen: bool, seed: int) -> tuple[Ints, Verified, Ints]:
    """Drafts [DRAWS, n], what came of them, and how many stayed [DRAWS]; some thousands at a time."""
    parts = [_play(parents, chosen, seed, requests) for requests in np.arange(DRAWS).reshape(-1, 5000)]
    token_ids, last, token, stayed = (np.concatenate(part) for part in zip(*parts, strict=True))
    return token_ids, Verified(last, token), stayed


def _play(parents: tuple[int, ...], chosen: bool, seed: int, requests: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    token_ids, target, draft = drafts_of(parents, chosen, seed, requests)
    depths = DraftTree(tuple(range(len(parents))), parents).depths()
    accept = [coins(seed, requests, token_ids[:, n], depth - 1, ACCEPT_COIN) for n, depth in enumerate(depths)]
    zeros = np.zeros(len(requests), np.int64)
    draws = [coins(seed, requests, zeros, depth, RESIDUAL_DRAW) for depth in range(max(depths) + 1)]
    found = verify(target, draft, token_ids, parents, np.stack(accept, axis=1), np.stack(draws, axis=1))
    return token_ids, found.last, found.token, np.array([0, *depths])[found.last + 1]


def texts_of(parents: tuple[int, ...], token_ids: Ints, found: Verified, seed: int) -> Ints:
    """The first two tokens of each step; where it gave one, the second is drawn plainly. [DRAWS, 2]"""
    tree, texts = DraftTree(tuple(range(len(parents))), parents), np.full((DRAWS, 2), -1)
    for last in range(-1, len(parents)):
        rows = np.flatnonzero(found.last == last)
        given = [*(token_ids[rows, node] for node in tree.path(last)), found.token[rows]]
        for place, token in enumerate(given[:2]):
            texts[rows, place] = token
    short = np.flatnonzero(texts[:, 1] < 0)
    u = coins(seed, short, np.zeros(len(short), np.int64), 1, 0)
    texts[short, 1] = drawn(tiny_law("target", texts[short, :1]), u)
    return texts


def assert_follows(counts: Doubles, law: Doubles) -> None:
    """Chi-square at p > 0.01 (Wilson and Hilferty's approximation); cells below 5 go together."""
    expected = law.ravel() * counts.sum()
    rare = expected < 5.0
    seen, want = (np.append(x.ravel()[~rare], x.ravel()[rare].sum()) for x in (counts, expected))
    seen, want = seen[want > 0.0], want[want > 0.0]
    degrees = len(want) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 2.3263 * math.sqrt(2 / (9 * degrees))) ** 3
    assert ((seen - want) ** 2 / want).sum() < limit


@pytest.mark.parametrize(
    ("shape", "chosen"), [("chain", False), ("chain", True), ("tree", False), ("tree", True), ("wide", False)]
)
def test_tokens_follow_the_law_of_the_target(shape: str, chosen: bool) -> None:
    parents = TREES[shape]
    token_ids, found, stayed = played(parents, chosen, seed=11)
    assert 0.2 < (stayed > 0).mean() < 0.99  # drafts stay, and are rejected
    texts = texts_of(parents, token_ids, found, seed=11)
    first = tiny_law("target", np.zeros((1, 0), np.int64))[0]
    joint = first[:, None] * softmax(tiny_logits(1), 0.8)
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(texts.T), 1.0)
    assert_follows(counts.sum(axis=1), first)
    assert_follows(counts, joint)


def test_the_tokens_of_a_step_are_those_of_the_formula() -> None:
    """A chain whose laws do not depend on the text: each draft stays with the same probability."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20))
    acceptance, drafts = float(np.minimum(p, q).sum()), 4
    zeros, requests, rows = np.zeros(DRAWS, np.int64), np.arange(DRAWS), np.tile(q, (DRAWS, 1))
    token_ids = np.stack([drawn(rows, coins(3, requests, zeros, d, DRAFT_DRAW)) for d in range(drafts)], axis=1)
    accept = np.stack([coins(3, requests, token_ids[:, d], d, ACCEPT_COIN) for d in range(drafts)], axis=1)
    draws = np.full((DRAWS, drafts + 1), 0.5)
    laws = [np.broadcast_to(law, (DRAWS, drafts + 1, 20)) for law in (p, q)]
    found = verify(laws[0], laws[1], token_ids, (-1, 0, 1, 2), accept, draws)
    assert (found.last + 2).mean() == pytest.approx(expected_tokens(acceptance, drafts), rel=0.03)
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)


def test_the_tokens_of_a_step_of_the_tiny_model_are_those_of_its_laws() -> None:
    """1 + E[a1] + E[a1 a2] over all texts, where a is the sum of min(p, q) at its place."""
    root = np.zeros((1, 0), np.int64)
    p, q = tiny_law("target", root)[0], tiny_law("draft", root)[0]
    after = np.arange(len(p))[:, None]
    second = np.minimum(tiny_law("target", after), tiny_law("draft", after)).sum(axis=1)
    both = np.minimum(p, q)
    want = 1.0 + both.sum() + (both * second).sum()
    _, _, stayed = played(TREES["chain"], False, seed=12)
    assert (stayed + 1).mean() == pytest.approx(want, rel=0.03)


def test_siblings_stay_as_often_as_an_enumeration_says() -> None:
    """Two siblings without replacement: over all ordered pairs of drafts."""
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    want = 0.0
    for x, y in itertools.permutations(range(8), 2):
        chance = q[x] * q[y] / (1.0 - q[x])
        first = min(1.0, p[x] / q[x])
        rest = np.maximum(p - q, 0.0)
        rest /= rest.sum()
        again = np.where(np.arange(8) == x, 0.0, q) / (1.0 - q[x])
        want += chance * (first + (1.0 - first) * min(1.0, rest[y] / again[y]))
    laws = [np.tile(law, (DRAWS, 3, 1)) for law in (p, q)]
    x = drawn(laws[1][:, 0], rng.random(DRAWS))
    left = laws[1][:, 0].copy()
    left[np.arange(DRAWS), x] = 0.0
    y = drawn(left / left.sum(axis=1, keepdims=True), rng.random(DRAWS))
    found = verify(*laws, np.stack([x, y], axis=1), (-1, -1), rng.random((DRAWS, 2)), rng.random((DRAWS, 2)))
    assert (found.last >= 0).mean() == pytest.approx(want, rel=0.01)


def test_siblings_drawn_without_replacement_follow_the_law() -> None:
    """Three of four tokens, from a law that is far off: whoever is tested against the wrong law shows."""
    rng = np.random.default_rng(4)
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.55, 0.3, 0.1, 0.05])
    laws = [np.tile(law, (DRAWS, 4, 1)) for law in (p, q)]
    order = np.argsort(np.log(q) + rng.gumbel(size=(DRAWS, 4)), axis=1)[:, ::-1]
    found = verify(*laws, order[:, :3], (-1, -1, -1), rng.random((DRAWS, 3)), rng.random((DRAWS, 2)))
    first = np.where(found.last >= 0, order[np.arange(DRAWS), found.last], found.token)
    assert_follows(np.bincount(first, minlength=4).astype(np.float64), p)


def test_noise_is_that_of_the_house() -> None:
    seeds, index, ids = [7, 2**63 + 1, 7, 12], [0, 3, 2**31, 9], [0, 5, 7, 49151]
    got = uniforms(np.array(seeds, np.uint64), 2, np.array(index), np.array(ids), ACCEPT_COIN)
    want = [noise_bits(*place, ACCEPT_COIN) for place in zip(seeds, [2] * 4, index, ids, strict=True)]
    assert got.tolist() == [(bits + 0.5) * 2.0**-32 for bits in want]
    assert len({ACCEPT_COIN, RESIDUAL_DRAW, DRAFT_DRAW, 0}) == 4


def one(p: list[float], q: list[float] | None, token: int, parents: tuple[int, ...] = (-1,)) -> Verified:
    n = len(parents)
    laws = [None if law is None else np.tile(np.array(law), (1, n + 1, 1)) for law in (p, q)]
    assert laws[0] is not None
    return verify(laws[0], laws[1], np.full((1, n), token), parents, np.full((1, n), 0.5), np.full((1, n + 1), 0.5))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("target", lambda: one([0.5, 0.6], None, 0)),
        ("target", lambda: one([1.5, -0.5], None, 0)),
        ("target", lambda: one([math.nan, 1.0], None, 0)),
        ("draft", lambda: one([0.5, 0.5], [0.5, 0.4], 0)),
        ("token_ids", lambda: one([0.5, 0.5], [0.0, 1.0], 0)),
        ("token_ids", lambda: one([0.5, 0.5], None, 0, (-1, -1))),
        ("parents", lambda: one([0.5, 0.5], None, 0, (0,))),
        ("use_beam_search", lambda: check_params(SimpleNamespace(use_beam_search=True))),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(field: str, call: Any) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    assert error.value.field == field


def test_a_certain_draft_stays_and_an_impossible_one_never() -> None:
    assert one([1.0, 0.0], [1.0, 0.0], 0).last.tolist() == [0]
    found = one([1.0, 0.0], None, 1)
    assert (found.last.tolist(), found.token.tolist()) == ([-1], [0])
    check_params(SimpleNamespace(use_beam_search=False, temperature=1.0))
