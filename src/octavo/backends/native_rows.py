"""What rows ask of the sampler, as records of the library (octavo_native.h), and the rows of logits it works on."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.counts import TokenCounts
from octavo.backends.ops import SamplingRow
from octavo.backends.random import MASK32
from octavo.backends.sampling import has_penalties, is_plain
from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams

MASK64 = (1 << 64) - 1


def sampling_record(
    row: int, wanted: SamplingRow, rules: RowRules | None, logprobs: RowLogprobs | None
) -> tuple[Any, ...]:
    """The octavo_sampling record of a draw from one row of the logits; it points to the last two, if they are there."""
    p = wanted.params
    return (
        *(row, max(0, p.top_k), p.temperature, p.top_p, p.min_p, wanted.seed & MASK64),
        *(wanted.choice & MASK32, wanted.output_index & MASK32, wanted.purpose & MASK32, mirostat_of(wanted)),
        *(0 if rules is None else rules.address, 0 if logprobs is None else logprobs.address),
        _shape(p) if p.shapes else _NO_SHAPE,
    )


_NO_SHAPE = (0.0,) * 6
_LEAST, _MOST = 1e-30, 1e30  # of mirostat, in float32


def _shape(p: SamplingParams) -> tuple[float, ...]:
    """The octavo_shape of a row."""
    cuts = p.typical_p if p.typical_p < 1.0 else 0.0, max(0.0, p.top_n_sigma)
    return (*cuts, p.xtc_probability, p.xtc_threshold, p.dynatemp_range, p.dynatemp_exponent)


def mirostat_of(wanted: SamplingRow) -> float:
    """octavo_sampling.mirostat of a row."""
    allowed = min(max(wanted.mu, _LEAST), _MOST)
    return (0.0, -allowed, allowed)[wanted.params.mirostat]


class RowRules:
    """The octavo_rules of one sequence: lists written once, what changes from token to token by `refresh`."""

    def __init__(self, wanted: SamplingRow) -> None:
        p = wanted.params
        self.record = r = lib.Rules()
        self._bias_ids, self._bias = _ids_of(p.logit_bias), np.array(list(p.logit_bias.values()))
        r.bias_ids, r.bias, r.num_bias = self._bias_ids.ctypes.data, self._bias.ctypes.data, len(self._bias)
        r.repetition, r.frequency, r.presence = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        self._allowed = None if p.allowed_token_ids is None else _bits(p.allowed_token_ids)
        if self._allowed is not None:
            r.allowed, r.allowed_bytes = self._allowed.ctypes.data, len(self._allowed)
        self._counts = has_penalties(p)
        self._banned_now: tuple[int, ...] | None = None
        self._banned = np.empty(0, np.int32)
        self._lists: tuple[Any, Any] = (None, None)
        self.refresh(wanted)

    @property
    def address(self) -> int:
        """Where the record lies: as long as this object lives."""
        return ctypes.addressof(self.record)

    def refresh(self, wanted: SamplingRow) -> None:
        """Take the ids banned now, the mask and the counts; the parameters are still those of the start."""
        r = self.record
        if self._banned_now != wanted.banned_now:
            self._banned_now = wanted.banned_now
            self._banned = np.array(wanted.params.banned_token_ids + wanted.banned_now, np.int32)
            r.banned, r.num_banned = self._banned.ctypes.data, len(self._banned)
        if wanted.penalties or r.num_penalised:
            self._penalties = _ids_of(wanted.penalties), np.array(list(wanted.penalties.values()))
            r.penalised, r.penalties = (values.ctypes.data for values in self._penalties)
            r.num_penalised = len(wanted.penalties)
        r.mask, r.mask_bytes = wanted.grammar_mask, len(wanted.grammar_mask or b"")
        if not self._counts:
            return
        prompt, output = _pairs(wanted.prompt_counts), _pairs(wanted.output_counts)
        (r.prompt, prompt_length), (r.output, output_length) = prompt.buffer_info(), output.buffer_info()
        r.num_prompt, r.num_output = prompt_length // 2, output_length // 2
        self._lists = prompt, output  # alive while the library reads them


def _ids_of(by_id: Mapping[int, float]) -> NDArray[np.int32]:
    return np.array(list(by_id), np.int32)


def _bits(token_ids: Sequence[int]) -> NDArray[np.uint8]:
    """A bit for each id, up to the largest one."""
    marks = np.zeros(max(token_ids, default=-1) + 1, np.uint8)
    marks[list(token_ids)] = 1
    return np.packbits(marks, bitorder="little")


def _pairs(counts: Mapping[int, int]) -> array[int]:
    """Ids and counts in turn: where they lie, if they do."""
    return (counts if isinstance(counts, TokenCounts) else TokenCounts.of(counts)).pairs


def wants_logprobs(params: SamplingParams) -> bool:
    """Whether tokens come with logprobs."""
    return params.draws_logprobs


class RowLogprobs:
    """The octavo_logprobs of one row, and the memory that the library writes them to."""

    def __init__(self, top: int, chosen: Sequence[int], row: int = 0, token: int = 0) -> None:
        self._chosen, self._chosen_ids = chosen, np.array(chosen, np.int32)
        self._top_ids, self._values = np.empty(top, np.int32), np.empty(1 + top + len(chosen))
        places = (self._chosen_ids.ctypes.data, self._top_ids.ctypes.data, self._values.ctypes.data)
        self.record = lib.Logprobs(row, token, top, len(chosen), *places)

    @property
    def address(self) -> int:
        """Where the record lies: as long as this object lives."""
        return ctypes.addressof(self.record)

    def answer(self, record: Any = None) -> TokenLogprobs:
        """What the library found: it filled this record, or a copy of it."""
        r, values = record or self.record, self._values.tolist()
        top = tuple(zip(self._top_ids[: r.found].tolist(), values[1:], strict=False))
        chosen = tuple(zip(self._chosen, values[1 + r.top :], strict=True))
        return TokenLogprobs(r.token, values[0], r.rank, top, chosen)


class RowRecords:
    """The octavo_sampling records of `rows`: from row places[i] of the logits each (or row i), with their rules and,
    where their parameters ask for them, logprobs.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        places: Sequence[int] | None = None,
        *,
        rules: bool = True,
        logprobs: bool = False,
    ) -> None:
        self.rules = [RowRules(row) if rules and not is_plain(row) else None for row in rows]
        self.logprobs = [logprobs_for(row.params) if logprobs else None for row in rows]
        given = zip(range(len(rows)) if places is None else places, rows, self.rules, self.logprobs, strict=True)
        self.records = (lib.Sampling * len(rows))(*(lib.Sampling(*sampling_record(*row)) for row in given))


def logprobs_for(params: SamplingParams) -> RowLogprobs | None:
    """Room for what the parameters ask for; None: nothing."""
    return RowLogprobs(params.num_top_logprobs, params.logprob_token_ids) if wants_logprobs(params) else None


class LogitRows:
    """Some rows of a step's logits, [R, V], not copied; an array where one is asked for."""

    def __init__(self, logits: NDArray[np.float32], rows: Sequence[int]) -> None:
        self.logits, self.rows = logits, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self.logits[row] for row in self.rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        taken = self.logits.take(self.rows, axis=0)
        return taken if dtype is None else taken.astype(dtype)

    def take(self, rows: Sequence[int]) -> LogitRows:
        """Some of these rows."""
        return LogitRows(self.logits, [self.rows[row] for row in rows])
