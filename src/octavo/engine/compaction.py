"""Prompts of which only some tokens stay (SnapKV, Li et al., 2024): what is looked at, and where rows find their keys.

The last tokens of the prompt are computed once more, from pages that hold all of it: what they look at says what
stays. That depends on the prompt alone, however it was cut into steps. What stays lies in places 0, 1, ... from then
on, turned by the positions that it had; what follows goes behind it, and turns by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.core.batch import Compaction, PageTableDelta
from octavo.core.kv_eviction import SnapKV
from octavo.core.prefix_node import TOMBSTONE

__all__ = ["Compactor"]


class Compactor:
    """Carries compactions out, and knows of each slot how many columns of its table are gone."""

    def __init__(self, policy: SnapKV, model: Any, backend: Any, weights: Mapping[str, Any], kv_pool: Any) -> None:
        self.policy, self.model, self.backend, self.weights, self.kv_pool = policy, model, backend, weights, kv_pool
        self._gone: dict[int, int] = {}  # by slot: columns

    def shift(self, slot: int) -> int:
        """Tokens by which the slot's positions lie beyond its places."""
        return self._gone.get(slot, 0) * int(self.kv_pool.page_size)

    def take(self, slot: int, delta: PageTableDelta) -> PageTableDelta:
        """A change of the slot's page table, as columns of places."""
        if delta.first == 0:
            kept = [page != TOMBSTONE for page in delta.pages]
            gone = self._gone[slot] = kept.index(True) if True in kept else 0
            return replace(delta, pages=delta.pages[gone:])
        return replace(delta, first=delta.first - self._gone.get(slot, 0))

    def compact(self, asked: Compaction, adapters: Any, adapter: int) -> None:
        """Choose what stays of a prompt, and copy it. ``adapters``: `AdapterPlaces` that hold its ``adapter``, if any.

        What is read does not change: doing it again gives the same.
        """
        count, stop = len(asked.token_ids), asked.num_tokens
        batch = self.backend.batch(
            asked.token_ids,
            range(stop - count, stop),
            [count],
            [[list(asked.sources)]],
            self.kv_pool,
            logit_rows=[],
            no_write=[True],
        )
        batch.mass = {}
        if adapters is not None:
            adapters.attach(batch, [adapter])
        self.model.forward(self.backend, self.weights, batch)
        self.backend.compact(self.kv_pool, asked.sources, asked.targets, batch.mass, self.policy)
