"""How each slot samples, as the library's records: written when a sequence takes a slot, copied out by each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.native_program import sampling_record
from octavo.backends.ops import SamplingRow

RECORD = np.dtype(lib.Sampling)


class SlotSampling:
    """Sampling parameters of all slots; only the output index and the row of logits change from step to step."""

    def __init__(self, slots: int = 64) -> None:
        self._records = np.zeros(slots, RECORD)

    def place(self, slot: int, wanted: SamplingRow) -> None:
        """A new sequence takes the slot."""
        if slot >= len(self._records):
            self._records = np.concatenate([self._records, np.zeros(slot + 1, RECORD)])
        self._records[slot] = sampling_record(0, wanted)

    def draws(self, slots: Sequence[int], output_indices: Sequence[int]) -> NDArray[Any]:
        """Records [R]: from row r of the logits, output token `output_indices[r]` of the sequence in `slots[r]`."""
        records = self._records[np.asarray(slots, np.int64)]
        records["row"] = np.arange(len(records))
        records["index"] = output_indices
        return records
