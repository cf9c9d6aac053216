"""What a runner keeps of its sequences, as the library reads it: by slot, changed where it changes, never rebuilt.

Page tables; sampling parameters as records; and the arrays of steps in which each sequence has one token and draws the
next. As long as the sequences stay, only tokens, positions and output indices of these change, and where they lie not.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.native_pages import NativeKVPool, PageTables
from octavo.backends.native_rows import RowRecords
from octavo.backends.native_slots import SlotSampling
from octavo.backends.ops import NO_ADAPTER, ForwardBatch, SamplingRow
from octavo.core.batch import TokenLogprobs


class StepArrays:
    """One for a runner. A slot is entered before anything else is said of it."""

    def __init__(self, num_groups: int, slots: int = 64) -> None:
        self.tables = PageTables(num_groups)
        self._adapters = np.full(slots, NO_ADAPTER, np.int32)  # place of each slot's adapter
        self._sampling = SlotSampling(slots)
        self._decodes: ForwardBatch | None = None
        self._slots: Sequence[int] = ()  # of `_decodes`
        self._views: tuple[memoryview, memoryview]  # of its tokens, positions and lengths; of its output indices

    def enter(self, slot: int, wanted: SamplingRow) -> None:
        """A new sequence takes the slot: it has no page yet, and samples as `wanted` says."""
        self.tables.clear(slot)
        self._sampling.place(slot, wanted)
        if slot < len(self._adapters):
            self._adapters[slot] = NO_ADAPTER
        self._slots = ()

    def adapt(self, slot: int, place: int) -> None:
        """The sequence that has just entered a slot has an adapter."""
        if slot >= len(self._adapters):
            more = np.full(slot + 1, NO_ADAPTER, np.int32)
            self._adapters = np.concatenate([self._adapters, more])
        self._adapters[slot] = place

    def attach(self, batch: ForwardBatch) -> None:
        """Give a step the adapters of the slots that it names."""
        slots = batch.cache["table_row"]
        places = self._adapters[np.minimum(slots, len(self._adapters) - 1)]
        places[slots >= len(self._adapters)] = NO_ADAPTER
        if places.max(initial=NO_ADAPTER) != NO_ADAPTER:
            batch.cache["adapters"] = places

    def refresh(self, slot: int, wanted: SamplingRow) -> None:
        """Before a step in which the slot's counts, mask or banned ids are other ones than when it was last told."""
        if self._sampling.refresh(slot, wanted):
            self._slots = ()

    def logprobs(self, slot: int) -> TokenLogprobs:
        """Those of the token that the last step drew for a slot whose parameters ask for them."""
        return self._sampling.logprobs(slot)

    def draws(self, slots: Sequence[int], output_indices: Sequence[int]) -> NDArray[Any]:
        """Records [R]: from row r of the logits, output token `output_indices[r]` of the sequence in `slots[r]`."""
        return self._sampling.draws(slots, output_indices)

    def put_rows(self, draws: NDArray[Any], rows: Mapping[int, Sequence[SamplingRow]]) -> RowRecords:
        """Records of their own for draws r, r + 1, ... of `rows[r]`, of which each sees other tokens before it. What is
        returned has the logprobs after the step, and must live until then.
        """
        places = [first + i for first, each in rows.items() for i in range(len(each))]
        apart = RowRecords([row for each in rows.values() for row in each], places, logprobs=True)
        draws[places] = np.frombuffer(memoryview(apart.records).cast("B"), draws.dtype)
        return apart

    def decodes(
        self,
        slots: Sequence[int],
        token_ids: Sequence[int],
        positions: Sequence[int],
        output_indices: Sequence[int],
        kv: NativeKVPool,
    ) -> ForwardBatch:
        """The step in which the sequence in `slots[s]` computes one token and draws the next. Valid until the next."""
        batch = self._decodes
        if batch is None or slots != self._slots or batch.page_table is not self.tables.array or batch.kv is not kv:
            batch = self._decodes = self._new_decodes(slots, output_indices, kv)
            self._slots = slots
        if self.tables.is_shifted:
            positions = (np.array(positions) - self.tables.shifts[batch.cache["table_row"]]).tolist()
            batch.cache["shifts"] = self.tables.shifts
        numbers, indices = self._views
        numbers[:] = array(numbers.format, [*token_ids, *positions, *(place + 1 for place in positions)])
        indices[:] = array(indices.format, output_indices)
        return batch

    def _new_decodes(self, slots: Sequence[int], output_indices: Sequence[int], kv: NativeKVPool) -> ForwardBatch:
        numbers = np.empty(3 * len(slots), np.int32)
        tokens, positions, lens = numbers.reshape(3, -1)
        starts = np.arange(len(slots) + 1, dtype=np.int32)
        draws = self.draws(slots, output_indices)
        batch = ForwardBatch(
            token_ids=tokens,
            positions=positions,
            cu_seqlens_q=starts,
            seq_lens=lens,
            page_table=self.tables.array,
            slot_mapping=None,
            logit_rows=starts[:-1],
            kv=kv,
            draws=draws,
            cache={"table_row": np.asarray(slots, np.int32), "kept": True},
        )
        self._views = numbers.data, draws["index"].data
        self.attach(batch)
        return batch
