"""The rarer samplers in the standard library: the definition that every backend follows. The order: docs/decoding.md.

Candidates are (score, token id), score = (logit - largest logit) / temperature, ordered by (logit descending, id
ascending); a weight is exp(score). What can be removed here is removed for good: each sampler looks at what the one
before it left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.backends.ops import SamplingRow
from octavo.backends.random import XTC_COIN, noise_bits
from octavo.core.params import SamplingParams

BANNED = -math.inf
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


def excludes_top_choices(wanted: SamplingRow) -> bool:
    """XTC's coin: true with `xtc_probability`, by noise of its own, so it depends on the row alone."""
    bits = noise_bits(wanted.seed, wanted.choice, wanted.output_index, 0, XTC_COIN)
    return (bits + 0.5) * 2.0**-32 < wanted.params.xtc_probability
