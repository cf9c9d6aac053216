"""From logits to tokens in the native library: process_logits, sample and logprobs of the op table.

A step draws its rows itself, under their rules, and finds their logprobs; these methods then hand out what it found.
Rows of other logits go through the same code by calls of their own. Definitions: backends/sampling.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.native_rows import LogitRows, RowLogprobs, RowRecords
from octavo.backends.ops import SamplingRow
from octavo.backends.sampling import check_ids, is_plain, refuse_undrawable
from octavo.core.batch import TokenLogprobs

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Drawn:
    """What a step drew: valid until the next one."""

    logits: Floats  # [R, V]
    ids: list[int]  # [R]; -1: nothing can be drawn
    rows: Sequence[SamplingRow] = ()  # [R] where the draws were asked for as rows
    logprobs: Sequence[RowLogprobs | None] = ()  # [R]


class SamplingOps:
    """The sampling ops of a backend over an engine of the library."""

    engine: Any
    _lib: Any
    _drawn: Drawn | None = None

    def process_logits(self, logits: Floats, rows: Sequence[SamplingRow]) -> Floats:
        """New logits after bias, bans and penalties; the input itself when no row asks for any, or when the step that
        made these logits drew these very rows: `sample` has their tokens.
        """
        if self._drawn_from(logits, rows) is not None or all(map(is_plain, rows)):
            return logits
        base, places = _base(logits)
        asked = RowRecords(rows, places)
        check_row_ids(rows, base.shape[1])
        out = np.empty((len(rows), base.shape[1]), np.float32)
        lib.check(self._lib.octavo_process(*self._where(base), asked.records, len(rows), out.ctypes.data), "sampling")
        return out

    def sample(self, logits: Floats, rows: Sequence[SamplingRow]) -> list[int]:
        """One id per row, drawn during the step where it was asked then. Raises RowError naming undrawable rows."""
        drawn = self._drawn_from(logits, rows)
        ids = self._draw(logits, rows) if drawn is None else drawn.ids
        if ids and min(ids) < 0:
            refuse_undrawable([None if i < 0 else i for i in ids])
        return ids

    def _drawn_from(self, logits: Any, rows: Sequence[SamplingRow]) -> Drawn | None:
        drawn = self._drawn
        return drawn if rows and drawn is not None and drawn.logits is logits and drawn.rows is rows else None

    def _draw(self, logits: Floats, rows: Sequence[SamplingRow]) -> list[int]:
        if not rows:
            return []
        base, places = _base(logits)
        asked, ids = RowRecords(rows, places, rules=False), np.empty(len(rows), np.int32)
        lib.check(self._lib.octavo_sample(*self._where(base), asked.records, len(rows), ids.ctypes.data), "sampling")
        return ids.tolist()

    def _where(self, logits: Floats) -> tuple[int, int, int, int, int]:
        """The arguments that say where rows [R, V] lie."""
        stride = logits.strides[0] // 4 if len(logits) > 1 else logits.shape[1]
        return self.engine.handle, logits.ctypes.data, len(logits), stride, logits.shape[1]

    def logprobs(
        self, logits: Floats, ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs]:
        """Logprobs of ids[r], of the k[r] most likely and of chosen[r], from raw logits; found during the step where a
        row's parameters asked for just these.
        """
        found = self._found(logits, ids, k, chosen)
        return self._ask(logits, ids, k, chosen) if found is None else found

    def _found(
        self, logits: Any, ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs] | None:
        drawn = self._drawn
        base, places = (logits.logits, logits.rows) if isinstance(logits, LogitRows) else (logits, range(len(logits)))
        if drawn is None or not drawn.logprobs or base is not drawn.logits:
            return None
        found = [drawn.logprobs[at] for at in places]
        for at, logprobs, *asked in zip(places, found, ids, k, map(tuple, chosen), strict=True):
            params = drawn.rows[at].params
            if logprobs is None or asked != [drawn.ids[at], params.num_top_logprobs, params.logprob_token_ids]:
                return None
        return [logprobs.answer() for logprobs in found if logprobs is not None]

    def _ask(
        self, logits: Floats, ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs]:
        if not len(ids):
            return []
        base, places = _base(logits)
        tops = [min(max(0, top), base.shape[1]) for top in k]
        asked = [RowLogprobs(top, more, at, i) for top, more, at, i in zip(tops, chosen, places, ids, strict=True)]
        records = (lib.Logprobs * len(asked))(*(row.record for row in asked))
        lib.check(self._lib.octavo_logprobs_of(*self._where(base), records, len(asked)), "logprobs")
        return [row.answer(record) for row, record in zip(asked, records, strict=True)]


def check_row_ids(rows: Iterable[SamplingRow], vocab_size: int) -> None:
    """Raises InvalidInput for a token id outside the vocabulary."""
    for row in rows:
        p = row.params
        check_ids("logit_bias", p.logit_bias, vocab_size)
        check_ids("allowed_token_ids", p.allowed_token_ids or (), vocab_size)
        check_ids("banned_token_ids", p.banned_token_ids + row.banned_now, vocab_size)


def _base(logits: Any) -> tuple[Floats, Sequence[int]]:
    """An array whose rows the library can read, and which of them are meant."""
    places: Sequence[int] = range(len(logits))
    if isinstance(logits, LogitRows):
        logits, places = logits.logits, logits.rows
    rows, columns = logits.strides
    fitting = columns == 4 and rows % 4 == 0 and (rows >= 4 * logits.shape[1] or len(logits) == 1)
    return (logits if fitting else np.ascontiguousarray(logits)), places
