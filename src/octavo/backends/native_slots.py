"""How each slot samples, as the library's records: written when a sequence takes a slot, copied out by each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.native_rows import RowLogprobs, RowRules, logprobs_for, mirostat_of, sampling_record
from octavo.backends.ops import SamplingRow
from octavo.backends.sampling import is_plain
from octavo.core.batch import TokenLogprobs

RECORD = np.dtype(lib.Sampling)


class SlotSampling:
    """Sampling parameters of all slots. From step to step the output index and the row of logits change, and what a
    mask, `min_tokens` or penalties make of the token before: `refresh`.
    """

    def __init__(self, slots: int = 64) -> None:
        self._records = np.zeros(slots, RECORD)
        self._rules: dict[int, RowRules] = {}  # of slots that have any; the records point to them
        self._logprobs: dict[int, RowLogprobs] = {}

    def place(self, slot: int, wanted: SamplingRow) -> None:
        """A new sequence takes the slot."""
        if slot >= len(self._records):
            self._records = np.concatenate([self._records, np.zeros(slot + 1, RECORD)])
        rules, logprobs = None if is_plain(wanted) else RowRules(wanted), logprobs_for(wanted.params)
        self._records[slot] = sampling_record(0, wanted, rules, logprobs)
        self._rules.pop(slot, None)
        self._logprobs.pop(slot, None)
        if rules is not None:
            self._rules[slot] = rules
        if logprobs is not None:
            self._logprobs[slot] = logprobs

    def refresh(self, slot: int, wanted: SamplingRow) -> bool:
        """The next token of the slot's sequence, whose counts, mask or banned ids may be other ones. True if records
        copied out before do not point to them.
        """
        if wanted.params.mirostat:
            self._records["mirostat"][slot] = mirostat_of(wanted)
        rules = self._rules.get(slot)
        if rules is not None:
            rules.refresh(wanted)
            return False
        if is_plain(wanted):
            return False
        rules = self._rules[slot] = RowRules(wanted)
        self._records["rules"][slot] = rules.address
        return True

    def draws(self, slots: Sequence[int], output_indices: Sequence[int]) -> NDArray[Any]:
        """Records [R]: from row r of the logits, output token `output_indices[r]` of the sequence in `slots[r]`."""
        records = self._records[np.asarray(slots, np.int64)]
        records["row"] = np.arange(len(records))
        records["index"] = output_indices
        return records

    def logprobs(self, slot: int) -> TokenLogprobs:
        """Those of the token that the last step drew for a slot whose parameters ask for them."""
        return self._logprobs[slot].answer()
