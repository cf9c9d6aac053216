"""What stays of a sequence, in NumPy: the choice that the policies of `core.kv_eviction` make, of all heads at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.kv_eviction import Voting

__all__ = ["compact", "kept_of"]

Floats = NDArray[np.float32]


def compact(
    keep: Callable[[Sequence[int], Sequence[int], NDArray[np.int64]], None],
    sources: Sequence[int],
    targets: Sequence[int],
    mass: Mapping[int, Floats],
    policy: Voting,
    carried: Mapping[int, Floats] | None,
) -> dict[int, Floats]:
    """`Backend.compact`, over a pool's ``keep``, which moves the places of [layers, kv heads, kept] between pages."""
    scores = _added(mass, carried)
    if targets:
        kept = kept_of(scores, policy)
        keep(sources, targets, kept)
        scores = np.take_along_axis(scores, kept, axis=2)
    return dict(zip(sorted(mass), scores, strict=True))


def _added(mass: Mapping[int, Any], carried: Mapping[int, Any] | None = None) -> Floats:
    """[layers, kv heads, tokens], of the first ones with what they had. Both: by layer, [kv heads, tokens]."""
    scores: Floats = np.stack([np.asarray(mass[layer], np.float32) for layer in sorted(mass)])
    if carried:
        before = np.stack([carried[layer] for layer in sorted(carried)])
        scores[..., : before.shape[2]] += before
    return scores


def kept_of(scores: NDArray[Any], policy: Voting) -> NDArray[np.int64]:
    """[layers, kv heads, kept] places, ascending, of scores [layers, kv heads, tokens]."""
    *heads, count = scores.shape
    first, kept = count - policy.window, count - policy.dropped(count)
    smooth = _pooled(scores[..., :first].astype(np.float64), policy.kernel)
    order = np.argsort(-smooth, axis=-1, kind="stable")  # of equals the older
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
