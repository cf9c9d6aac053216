"""The rows of a step that are pooled: which hidden states they need, and what comes of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.backends.ops import PoolSpan
from octavo.core.batch import RowResult, ScheduledRow
from octavo.core.errors import InvariantBroken
from octavo.engine.slots import Slot

__all__ = ["PooledRows"]

_FINITE = 3.4028234663852886e38  # the largest float32
_NOT_FINITE = "the model gave no finite hidden state; check the weights and the prompt"


class PooledRows:
    """Of the rows ``rows`` of a step, whose first token is token ``first`` of its batch; those that ask for nothing are
    passed over. ``token_rows``: the rows of the batch whose states are needed."""

    def __init__(self, rows: Sequence[ScheduledRow], slots: Mapping[int, Slot], first: int = 0) -> None:
        self.token_rows: list[int] = []
        self._asking: list[tuple[int, ScheduledRow, Slot]] = []  # with its place among the rows
        self._spans: list[PoolSpan] = []
        for place, row in enumerate(rows):
            stop = first + len(row.token_ids)
            if row.flags.hidden:
                self._add(place, row, slots[row.slot], range(first, stop))
            first = stop

    def __bool__(self) -> bool:
        return bool(self._asking)

    def _add(self, place: int, row: ScheduledRow, slot: Slot, tokens: range) -> None:
        kind = slot.params.pooling
        if kind is None:
            raise InvariantBroken(f"row {row.request_id}/{row.choice} is pooled, and its request asks for no vector")
        wanted = tokens if kind == "mean" else tokens[-1:] if kind == "last" else tokens[:1]
        begin = len(self.token_rows)
        self.token_rows += wanted
        self._spans.append(PoolSpan(begin, len(self.token_rows), kind, slot.carried(row.start)))
        self._asking.append((place, row, slot))

    def results(self, backend: Any, states: Any) -> dict[int, RowResult]:
        """By place among the rows; ``states`` are those of ``token_rows``. Where tokens are to come, nothing yet."""
        found = {}
        for (place, row, slot), pooled in zip(self._asking, backend.pool(states, self._spans), strict=True):
            stop = row.start + len(row.token_ids)
            slot.carry(row.start, stop, pooled)
            found[place] = _result(pooled, slot, stop) if stop == row.num_tokens else RowResult()
        return found


def _result(pooled: Any, slot: Slot, count: int) -> RowResult:
    values = list(map(float, pooled))
    if slot.params.pooling == "mean":
        values = [value / count for value in values]
    if not all(map(math.isfinite, values)) or max(map(abs, values)) > _FINITE:
        return RowResult(error=_NOT_FINITE)
    return RowResult(hidden=struct.pack(f"<{len(values)}f", *values))
