"""What stays of a prompt, in NumPy: the same choice as `core.kv_eviction.kept_after_prompt`, of all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.kv_eviction import SnapKV

__all__ = ["kept_of"]


def kept_of(mass: Mapping[int, Any], policy: SnapKV) -> NDArray[np.int64]:
    """[layers, kv heads, kept] places, ascending. ``mass``: by layer, [kv heads, tokens]."""
    scores = np.stack([np.asarray(mass[layer], np.float64) for layer in sorted(mass)])
    *heads, count = scores.shape
    first, kept = count - policy.window, count - policy.dropped(count)
    order = np.argsort(-_pooled(scores[..., :first], policy.kernel), axis=-1, kind="stable")  # ties: the older place
    places = np.empty((*heads, kept), np.int64)
    places[..., : kept - policy.window] = np.sort(order[..., : kept - policy.window], axis=-1)
    places[..., kept - policy.window :] = np.arange(first, count)
    return places


def _pooled(scores: NDArray[np.float64], kernel: int) -> NDArray[np.float64]:
    """`core.kv_eviction.pooled` along the last axis: each sum goes from left to right."""
    reach, count = kernel // 2, scores.shape[-1]
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(reach, reach)])
    total = padded[..., :count].copy()
    for offset in range(1, kernel):
        total += padded[..., offset : offset + count]
    return total / kernel
