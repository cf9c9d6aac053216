"""Sequences of which only some tokens stay, by attention weights: what is looked at, and where rows find their keys.

SnapKV (Li et al., 2024) chooses once, when a prompt is complete; H2O (Zhang et al., 2023) after every block of tokens.
The last tokens are computed once more, from pages that hold all that they saw: what they look at is counted. That
depends on the sequence alone, however it was cut into steps. What stays lies in places 0, 1, ... from then on, turned
by the positions that it had; what follows goes behind it, and turns by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.core.batch import Compaction, PageTableDelta
from octavo.core.errors import InvariantBroken
from octavo.core.kv_eviction import Voting
from octavo.core.prefix_node import TOMBSTONE

__all__ = ["Compactor"]


class Compactor:
    """Carries compactions out, and knows of each slot how many columns of its table are gone."""

    def __init__(self, policy: Voting, model: Any, backend: Any, weights: Mapping[str, Any], kv_pool: Any) -> None:
        self.policy, self.model, self.backend, self.weights, self.kv_pool = policy, model, backend, weights, kv_pool
        self._gone: dict[int, int] = {}  # by slot: columns
        self._carried: dict[int, dict[int, Any]] = {}  # by slot, by tokens: what their keys were given until then

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

    def compact(self, slot: int, asked: Compaction, adapters: Any, adapter: int) -> None:
        """Choose what stays, and copy it. ``adapters``: `AdapterPlaces` that hold the ``adapter``, if any.

        What is read does not change: doing it again gives the same.
        """
        begin = asked.num_tokens - len(asked.token_ids)
        batch = self.backend.batch(
            asked.token_ids,
            range(begin - asked.first, asked.num_tokens - asked.first),
            [len(asked.token_ids)],
            [[list(asked.sources)]],
            self.kv_pool,
            logit_rows=[],
            no_write=[True],
            shifts=[asked.first],
        )
        batch.mass = {}
        if adapters is not None:
            adapters.attach(batch, [adapter])
        self.model.forward(self.backend, self.weights, batch)
        before = self._before(slot, begin) if self.policy.every else None
        given = self.backend.compact(self.kv_pool, asked.sources, asked.targets, batch.mass, self.policy, before)
        if self.policy.every:
            self._carried[slot] = {begin: before, asked.num_tokens: given}

    def _before(self, slot: int, num_tokens: int) -> Any:
        """What keys were given until there were so many tokens; None: nothing yet."""
        if num_tokens == 0:
            return None
        carried = self._carried.get(slot, {})
        if num_tokens not in carried:
            raise InvariantBroken(f"slot {slot} counted up to {sorted(carried)} tokens, and goes on at {num_tokens}")
        return carried[num_tokens]
