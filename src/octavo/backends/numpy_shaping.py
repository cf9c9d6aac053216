"""backends/shaping.py on arrays. Scores [N] are ordered by (logit descending, id ascending)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.backends.shaping import ZIPF_TOKENS, share_of_largest, zipf_count
from octavo.core.params import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def temperature_of(row: Floats, top: float, p: SamplingParams) -> float:
    """`shaping.temperature_of` of a row [V]."""
    low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
    behind = _behind(row, top)
    weights = np.exp(behind)
    total = float(weights.sum())
    entropy = math.log(total) - float((weights * behind).sum()) / total
    return low + (high - low) * share_of_largest(entropy, len(behind)) ** p.dynatemp_exponent


def sigma_floor(row: Floats, top: float, n: float) -> float:
    """`shaping.sigma_floor` of a row [V]."""
    behind = _behind(row, top)
    mean = float(behind.mean())
    variance = float((behind * behind).mean()) - mean * mean
    return top - n * math.sqrt(variance) if variance > 0.0 else top


def typical(scores: Doubles, typical_p: float) -> NDArray[np.int64]:
    """The places of what `shaping.typical` keeps, ascending."""
    weights = np.exp(scores)
    total = weights.sum()
    able = weights > 0.0
    mean = (weights[able] * scores[able]).sum() / total
    nearest = np.argsort(np.abs(scores - mean), kind="stable")
    before = np.concatenate(([-1.0], np.cumsum(weights[nearest])[:-1]))  # the nearest always stays
    return np.sort(nearest[before < typical_p * total])


def after_top_choices(scores: Doubles, threshold: float) -> int:
    """The place of the first that `shaping.without_top_choices` keeps."""
    weights = np.exp(scores)
    return max(0, int(np.count_nonzero(weights >= threshold * weights.sum())) - 1)


def mirostat_count(scores: Doubles, version: int, mu: float) -> int:
    """How many `shaping.mirostat` keeps."""
    if version == 1:
        return zipf_count(scores[:ZIPF_TOKENS].tolist(), len(scores), mu)
    weights = np.exp(scores)
    return max(1, int(np.count_nonzero(weights >= weights.sum() * 2.0 ** -max(0.0, mu))))


def _behind(row: Floats, top: float) -> Doubles:
    behind: Doubles = row[row > -np.inf].astype(np.float64) - top
    return behind
