"""Adapters in memory for backends that run op by op: a place for each, with its factors as the backend's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.backends.ops import NO_ADAPTER, ForwardBatch, RowAdapters

__all__ = ["NO_ADAPTERS", "AdapterPlaces", "AdapterRoom", "Factors"]

Factors = Mapping[str, tuple[Any, Any, float]]  # projection -> A [r, K], B [N, r], scale


@dataclass(frozen=True)
class AdapterRoom:
    """How many adapters there is room for, and up to which rank."""

    places: int = 0
    rank: int = 16

    def num_values(self, projections: Mapping[str, Sequence[int]]) -> int:
        """What all places hold for a model with these projections (`[N, K]` each)."""
        return self.places * self.rank * sum(map(sum, projections.values()))


NO_ADAPTERS = AdapterRoom()


class AdapterPlaces:
    """Adapters by place. One is written while no row of a step names it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._held: dict[int, Factors] = {}

    def pack(self, factors: Factors) -> Factors:
        """An adapter as the backend wants it; in any thread."""
        weight = self._backend.weight
        return {name: (weight(name, a), weight(name, b), scale) for name, (a, b, scale) in factors.items()}

    def put(self, place: int, packed: Factors) -> None:
        """Have a place hold what `pack` gave."""
        self._held[place] = packed

    def clear(self, place: int) -> None:
        """Forget what is there. Idempotent."""
        self._held.pop(place, None)

    def attach(self, batch: ForwardBatch, places: Sequence[int]) -> None:
        """Give a step the adapters of its sequences, [S]."""
        held = {place: self._held[place] for place in sorted(set(places) - {NO_ADAPTER})}
        if not held:
            return
        spans = pairwise(int(start) for start in batch.cu_seqlens_q)
        rows = [place for place, (start, stop) in zip(places, spans, strict=True) for _ in range(start, stop)]
        batch.adapters = {
            name: RowAdapters(rows, {place: factors[name] for place, factors in held.items() if name in factors})
            for name in _names(held.values())
        }


def _names(held: Iterable[Factors]) -> list[str]:
    return list(dict.fromkeys(name for factors in held for name in factors))
