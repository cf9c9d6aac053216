"""The residual verifier: drafts are kept or replaced so that tokens follow the target's law, whatever drew the drafts.

Chains: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023). Trees: multi-step speculative
sampling of SpecInfer (Miao et al., 2024), for siblings drawn without replacement. The law is that of plain sampling,
the tokens of a seed are not: who wants these takes the exact verifier.

At a node with law p, a draft x drawn from q stays if u < p(x) / q(x). Otherwise p becomes the rest, max(p - q, 0)
renormalised, q loses x, and the next sibling has its turn; after the last one a token is drawn from what is left of p.
Drafts that were not drawn but chosen (prompt lookup, suffix trees) are drawn from a q of one token each: x stays with
probability p(x), and p loses x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.numpy_random import philox4x32
from octavo.backends.numpy_sampling import law
from octavo.backends.ops import SamplingRow
from octavo.backends.random import MASK32
from octavo.backends.sampling import refuse_undrawable
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidInput

__all__ = [
    "ACCEPT_COIN",
    "DRAFT_DRAW",
    "RESIDUAL_DRAW",
    "Verified",
    "draw",
    "expected_tokens",
    "uniforms",
    "verify",
]

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

# purposes of noise
ACCEPT_COIN = 0x414343  # whether a draft stays; of its token id
RESIDUAL_DRAW = 0x524553  # the token after the last draft that stayed; of token id 0
DRAFT_DRAW = 0x445241  # what a draft model draws


@dataclass(frozen=True)
class Verified:
    """Of each of B steps: the last draft that stayed (-1: none) and the token that follows it."""

    last: Ints  # [B]
    token: Ints  # [B]


def uniforms(seeds: Ints, choice: int, output_index: Ints, token_ids: Ints, purpose: int) -> Doubles:
    """A number in (0, 1) for each of B coordinates: `random.noise_bits` + 1/2, over 2^32. Each [B] or a scalar."""
    seeds, index, ids = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (seeds, output_index, token_ids)))
    words = np.empty(seeds.shape, np.uint64)
    for seed in np.unique(seeds):
        rows = seeds == seed
        rest = [np.full(int(rows.sum()), value & MASK32, np.uint64) for value in (choice, purpose)]
        counter = np.stack([ids[rows] >> np.uint64(2), index[rows] & np.uint64(MASK32), *rest])
        found = philox4x32(counter, (int(seed) & MASK32, int(seed) >> 32))
        words[rows] = found[(ids[rows] & np.uint64(3)).astype(np.int64), np.arange(counter.shape[1])]
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def verify(
    target: Doubles,
    draft: Doubles | None,
    token_ids: Ints,
    parents: Sequence[int],
    coins: Doubles,
    draws: Doubles,
) -> Verified:
    """B steps with drafts in one shape of tree, `parents` (n of them, as in DraftTree; a chain: -1, 0, 1, ...).

    `target` [B, n + 1, V]: the law after the sequence, and after each draft: as the sampler would draw, with
    temperature, penalties, masks and cuts of that very history. `draft` [B, n + 1, V]: from which the drafts after it
    were drawn, siblings in order and without replacement; None: they were chosen. `token_ids` [B, n]; `coins` [B, n]
    and `draws` [B, depth + 1] in (0, 1): of ACCEPT_COIN by draft, of RESIDUAL_DRAW by how many drafts stayed.
    Raises InvalidInput for laws that are none, for a draft that its law cannot draw, and for what is no tree.
    """
    _check(target, "target")
    depths = _checked_depths(token_ids, parents)
    if draft is not None:
        _check(draft, "draft")
    steps = np.arange(len(target))
    at = np.full(len(target), -1)
    law = target[:, 0].copy()
    from_law = None if draft is None else draft[:, 0].copy()
    for node, parent in enumerate(parents):
        here = np.flatnonzero(at == parent)
        token = token_ids[here, node]
        q = _one_hot(token, law.shape[1]) if from_law is None else from_law[here]
        p_of, q_of = law[here, token], q[np.arange(len(here)), token]
        if not (q_of > 0.0).all():
            raise InvalidInput("token_ids", int(token[np.argmin(q_of)]), "the draft's law has no such token left")
        stays = coins[here, node] * q_of < p_of
        kept, lost = here[stays], here[~stays]
        at[kept] = node
        law[kept] = target[kept, node + 1]
        law[lost] = _rest(law[lost], q[~stays])
        if from_law is not None and draft is not None:
            from_law[kept] = draft[kept, node + 1]
            from_law[lost] = _without(from_law[lost], token[~stays])
    stayed = np.array([0, *depths])[at + 1]
    return Verified(at, _drawn(law, draws[steps, stayed]))


def draw(logits: Iterable[Sequence[float]], rows: Sequence[SamplingRow]) -> list[int]:
    """One id per row of processed logits: its `guess`, kept or replaced. Raises RowError as `sampling.sample` does."""
    ids = [_draw_row(np.asarray(row), wanted) for row, wanted in zip(logits, rows, strict=True)]
    refuse_undrawable(ids)
    return [i for i in ids if i is not None]


def _draw_row(logits: NDArray[Any], wanted: SamplingRow) -> int | None:
    """All of a chain in the place of one token: every token has a draft, whether or not what follows was computed."""
    p = law(logits, wanted)
    if p is None:
        return None
    guesses = [wanted.guess] if wanted.guess is not None and 0 <= wanted.guess < len(p) else []

    def uniform(token_id: int, purpose: int) -> Doubles:
        place = np.array([wanted.output_index]), np.array([token_id])
        return uniforms(np.array([wanted.seed], np.uint64), wanted.choice, *place, purpose)

    coins = np.array([uniform(guess, ACCEPT_COIN) for guess in guesses]).reshape(1, -1)
    draws = np.repeat(uniform(0, RESIDUAL_DRAW)[None], 1 + len(guesses), axis=1)
    target = np.broadcast_to(p, (1, 1 + len(guesses), len(p)))
    found = verify(target, None, np.array([guesses], np.int64), [-1] * len(guesses), coins, draws)
    return guesses[0] if found.last[0] == 0 else int(found.token[0])


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens of a step whose drafts stay with probability `acceptance` each, if all before did: the drafts that stay
    and one more, (1 - a^(drafts + 1)) / (1 - a). Leviathan et al., equation 1, where a = E[sum of min(p, q)]; a chosen
    draft's a is p of it.
    """
    return sum(acceptance**i for i in range(drafts + 1))


def _check(law: Doubles, name: str) -> None:
    sums = law.sum(axis=2)
    if not np.isfinite(sums).all() or (law < 0.0).any() or (np.abs(sums - 1.0) > 1e-6).any():
        raise InvalidInput(name, "a row", "give laws: probabilities of at least 0 that add up to 1")


def _checked_depths(token_ids: Ints, parents: Sequence[int]) -> list[int]:
    if token_ids.shape[1] != len(parents):
        raise InvalidInput("token_ids", token_ids.shape, f"give one for each of {len(parents)} drafts")
    for row in token_ids if len({*parents}) < len(parents) else token_ids[:1]:
        depths = DraftTree(tuple(row.tolist()), tuple(parents)).depths()
    return depths if len(token_ids) else []


def _one_hot(token: Ints, size: int) -> Doubles:
    law = np.zeros((len(token), size))
    law[np.arange(len(token)), token] = 1.0
    return law


def _rest(p: Doubles, q: Doubles) -> Doubles:
    """What is left of p where a draft from q was not taken."""
    rest = np.maximum(p - q, 0.0)
    total = rest.sum(axis=1, keepdims=True)
    # equal laws leave nothing, and reject nothing but by rounding
    return np.where(total > 0.0, rest / np.where(total > 0.0, total, 1.0), p)


def _without(q: Doubles, token: Ints) -> Doubles:
    rest = q.copy()
    rest[np.arange(len(token)), token] = 0.0
    total = rest.sum(axis=1, keepdims=True)
    return rest / np.where(total > 0.0, total, 1.0)


def _drawn(law: Doubles, u: Doubles) -> Ints:
    """The first token at which the sums of the law, by rising id, pass u."""
    sums = np.cumsum(law, axis=1)
    passed = sums > (u * sums[:, -1])[:, None]
    tokens: Ints = passed.argmax(axis=1)
    return tokens
