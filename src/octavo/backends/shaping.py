"""The rarer samplers in the standard library: the definition that every backend follows. The order: docs/decoding.md.

Candidates are (score, token id), score = (logit - largest logit) / temperature, ordered by (logit descending, id
ascending); a weight is exp(score). What can be removed here is removed for good: each sampler looks at what the one
before it left.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from octavo.backends.ops import SamplingRow
from octavo.backends.random import XTC_COIN, noise_bits
from octavo.core.params import SamplingParams

BANNED = -math.inf
ZIPF_TOKENS = 100  # of the likeliest, by which version 1 of mirostat tells how steeply chances fall
Candidate = tuple[float, int]  # (logit - largest logit) / temperature, token id


def temperature_of(logits: Sequence[float], top: float, p: SamplingParams) -> float:
    """The temperature of one row: with `dynatemp_range`, the surer the model is the lower. `top`: the largest logit.

    T = low + (high - low) * (entropy / log(tokens that are not banned)) ** exponent, between temperature - range (at
    least 0) and temperature + range; the entropy is that of softmax(logits).
    """
    if p.dynatemp_range <= 0.0:
        return p.temperature
    low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
    behind = [v - top for v in logits if v != BANNED]
    total = math.fsum(math.exp(d) for d in behind)
    entropy = math.log(total) - math.fsum(math.exp(d) * d for d in behind) / total
    return low + (high - low) * share_of_largest(entropy, len(behind)) ** p.dynatemp_exponent


def share_of_largest(entropy: float, tokens: int) -> float:
    """An entropy as a share of the largest that so many tokens can have, 0 to 1; 0 for a single token."""
    return min(1.0, max(0.0, entropy / math.log(tokens))) if tokens > 1 else 0.0


def sigma_floor(logits: Sequence[float], top: float, n: float) -> float:
    """`top_n_sigma` keeps logits from here on: n standard deviations below the largest (Tang et al., 2024)."""
    behind = [v - top for v in logits if v != BANNED]
    mean = math.fsum(behind) / len(behind)
    variance = math.fsum(d * d for d in behind) / len(behind) - mean * mean
    return top - n * math.sqrt(variance) if variance > 0.0 else top


def typical(ordered: list[Candidate], typical_p: float) -> list[Candidate]:
    """Those whose surprise is nearest to the expected one, until their probability reaches typical_p; in their order.

    Locally typical sampling (Meister et al., 2022). |-log p - entropy| is |mean score - score|. Ties: order.
    """
    weights = [math.exp(z) for z, _ in ordered]
    total = sum(weights)
    mean = math.fsum(w * z for w, (z, _) in zip(weights, ordered, strict=True) if w > 0.0) / total
    nearest = sorted(range(len(ordered)), key=lambda place: abs(ordered[place][0] - mean))
    kept, reached = 0, 0.0
    while kept < len(nearest) and (kept == 0 or reached < typical_p * total):
        reached += weights[nearest[kept]]
        kept += 1
    return [ordered[place] for place in sorted(nearest[:kept])]


def without_top_choices(ordered: list[Candidate], threshold: float) -> list[Candidate]:
    """XTC: of the candidates with at least the probability `threshold`, all but the least likely are removed."""
    weights = [math.exp(z) for z, _ in ordered]
    least = threshold * sum(weights)
    likely = sum(weight >= least for weight in weights)
    return ordered[max(0, likely - 1) :]


def mirostat(ordered: list[Candidate], version: int, mu: float) -> list[Candidate]:
    """Mirostat (Basu et al., 2021): version 2 keeps those of at most `mu` bits of surprise, version 1 as many as it
    takes for that by Zipf's law. The likeliest always stays.
    """
    if version == 1:
        return ordered[: zipf_count([z for z, _ in ordered[:ZIPF_TOKENS]], len(ordered), mu)]
    weights = [math.exp(z) for z, _ in ordered]
    least = sum(weights) * 2.0 ** -max(0.0, mu)
    return ordered[: max(1, sum(weight >= least for weight in weights))]


def zipf_count(scores: Sequence[float], tokens: int, mu: float) -> int:
    """How many of so many tokens make up `mu` bits, if chances fall by rank as those of the likeliest do: 1 or more.

    `scores` are those of the likeliest, falling.
    """
    if len(scores) < 2:
        return len(scores)
    ranks = [math.log((i + 2) / (i + 1)) for i in range(len(scores) - 1)]
    falls = [min(high - low, 1e9) for high, low in itertools.pairwise(scores)]
    steep = math.fsum(map(operator.mul, ranks, falls)) / math.fsum(rank * rank for rank in ranks)
    over = steep - 1.0
    share = over / (1.0 - tokens**-over) if abs(over) > 1e-9 else 1.0 / math.log(tokens)
    bits = (math.log2(share) + mu) / max(steep, 1e-9)
    return tokens if bits >= 31.0 else min(tokens, max(1, int(2.0**bits)))


def excludes_top_choices(wanted: SamplingRow) -> bool:
    """XTC's coin: true with `xtc_probability`, by noise of its own, so it depends on the row alone."""
    bits = noise_bits(wanted.seed, wanted.choice, wanted.output_index, 0, XTC_COIN)
    return (bits + 0.5) * 2.0**-32 < wanted.params.xtc_probability
