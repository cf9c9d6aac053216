"""ModelRunner: turns a `ScheduleDecision` into arrays, runs the model and the sampler, and answers with plain values.

decision -> slots -> page copies -> forward -> process_logits -> sample -> logprobs -> StepResult
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.backends.ops import ForwardBatch, SamplingRow
from octavo.core.batch import RowResult, ScheduleDecision, ScheduledRow, StepResult, TokenLogprobs
from octavo.core.errors import InvariantBroken, RowError
from octavo.engine.slots import Slot

_NOT_FINITE = "the model gave no finite logit; check the weights and the prompt"


@dataclass
class _Wanted:
    """Which logits the step's rows need. Indices are into the logits, in the order of ``logit_rows``."""

    logit_rows: list[int] = field(default_factory=list)  # token rows of the batch
    sampled: list[tuple[int, int]] = field(default_factory=list)  # (logits index, decision row)
    prompt: list[tuple[int, int, int]] = field(default_factory=list)  # (logits index, decision row, prompt token id)


@dataclass
class _Answer:
    """A ``RowResult`` in the making."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def result(self) -> RowResult:
        if self.error is not None:
            return RowResult(error=self.error)
        return RowResult(self.token_ids, self.logprobs, tuple(self.prompt_logprobs))


class ModelRunner:
    """Runs one model on one backend. Holds the per-slot state; owns no scheduling decision.

    ``execute`` is idempotent for a decision that is sent again. An exception from the model leaves through it; a row
    whose logits are not finite gets an error of its own, and the others their tokens.
    """

    def __init__(
        self,
        model: Any,
        backend: Any,
        weights: Mapping[str, Any],
        kv_pool: Any,
        *,
        num_groups: int = 1,
    ) -> None:
        self.model = model
        self.backend = backend
        self.weights = weights
        self.kv_pool = kv_pool
        self.num_groups = num_groups
        self._slots: dict[int, Slot] = {}
        # a backend that reads page tables where they lie keeps them itself, by slot
        self._tables = backend.page_tables(num_groups) if hasattr(backend, "page_tables") else None

    def execute(self, decision: ScheduleDecision) -> StepResult:
        """Run one step. Raises ``RowError`` or whatever the model raises; nothing is committed here."""
        for slot in decision.freed_slots:
            self._slots.pop(slot, None)
        slots = [self._slot(row) for row in decision.rows]
        if decision.copies:
            self.backend.copy_pages(self.kv_pool, [(copy.source, copy.target) for copy in decision.copies])
        if not decision.rows:
            return StepResult(decision.step, ())
        wanted = _wanted(decision.rows, slots)
        batch = self._batch(decision.rows, slots, wanted)
        if len(wanted.sampled) == len(wanted.logit_rows):  # a backend may draw while it computes
            batch.sampling = tuple(self._sampling_row(decision.rows[row], slots[row]) for _, row in wanted.sampled)
        logits = self.model.forward(self.backend, self.weights, batch)
        answers = [_Answer() for _ in decision.rows]
        if wanted.logit_rows:
            self._prompt_logprobs(logits, batch, decision.rows, wanted, answers)
            self._sample(logits, batch, decision.rows, slots, wanted, answers)
        return StepResult(decision.step, tuple(answer.result() for answer in answers))

    def _slot(self, row: ScheduledRow) -> Slot:
        if row.init is not None:
            self._slots[row.slot] = Slot(row.init, self.num_groups)
            if self._tables is not None:
                self._tables.clear(row.slot)
        slot = self._slots.get(row.slot)
        if slot is None:
            raise InvariantBroken(f"row {row.request_id}/{row.choice} names slot {row.slot}, which was never filled")
        slot.update(row)
        if self._tables is not None:
            for delta in row.page_deltas:
                self._tables.place(row.slot, delta.group, delta.first, delta.pages)
        return slot

    def _batch(self, rows: Sequence[ScheduledRow], slots: Sequence[Slot], wanted: _Wanted) -> ForwardBatch:
        where: dict[str, Any] = {}
        if self._tables is None:
            tables: Any = [[slot.pages[group] for slot in slots] for group in range(self.num_groups)]
        else:
            tables, where = self._tables.array, {"table_rows": [row.slot for row in rows]}
        batch: ForwardBatch = self.backend.batch(
            [token for row in rows for token in row.token_ids],
            [position for row in rows for position in range(row.start, row.start + len(row.token_ids))],
            [len(row.token_ids) for row in rows],
            tables,
            self.kv_pool,
            logit_rows=wanted.logit_rows,
            no_write=[row.flags.no_write for row in rows],
            request_ids=[row.request_id for row in rows],
            **where,
        )
        return batch

    def _select(self, logits: Any, batch: ForwardBatch, indices: Sequence[int], total: int) -> Any:
        """The rows ``indices`` of ``logits`` [total, V], or ``logits`` itself when that is all of them."""
        if len(indices) == total:
            return logits
        return self.backend.select_rows(logits, replace(batch, logit_rows=list(indices), cache={}))

    def _prompt_logprobs(
        self, logits: Any, batch: ForwardBatch, rows: Sequence[ScheduledRow], wanted: _Wanted, answers: list[_Answer]
    ) -> None:
        if not wanted.prompt:
            return
        chosen = self._select(logits, batch, [at for at, _, _ in wanted.prompt], len(wanted.logit_rows))
        ids = [token for _, _, token in wanted.prompt]
        counts = [rows[row].flags.prompt_logprobs for _, row, _ in wanted.prompt]
        found = self.backend.logprobs(chosen, ids, counts, [()] * len(ids))
        for (_, row, _), logprob in zip(wanted.prompt, found, strict=True):
            if math.isnan(logprob.logprob):
                answers[row].error = _NOT_FINITE
            answers[row].prompt_logprobs.append(logprob)

    def _sample(
        self,
        logits: Any,
        batch: ForwardBatch,
        rows: Sequence[ScheduledRow],
        slots: Sequence[Slot],
        wanted: _Wanted,
        answers: list[_Answer],
    ) -> None:
        """Sample the rows that ask for it; a row without a finite logit leaves with an error and the rest go on."""
        left = [(at, row) for at, row in wanted.sampled if answers[row].error is None]
        while left:
            raw = self._select(logits, batch, [at for at, _ in left], len(wanted.logit_rows))
            asked: Sequence[SamplingRow] = batch.sampling
            if len(asked) != len(left):
                asked = [self._sampling_row(rows[row], slots[row]) for _, row in left]
            try:
                ids = self.backend.sample(self.backend.process_logits(raw, asked), asked)
            except RowError as error:
                if not error.rows:
                    raise
                for index in error.rows:
                    answers[left[index][1]].error = f"{error}: {_NOT_FINITE}"
                left = [pair for pair in left if answers[pair[1]].error is None]
                continue
            for (_, row), token in zip(left, ids, strict=True):
                answers[row].token_ids = (int(token),)
            self._logprobs(raw, batch, rows, [row for _, row in left], answers)
            return

    def _logprobs(
        self, raw: Any, batch: ForwardBatch, rows: Sequence[ScheduledRow], left: Sequence[int], answers: list[_Answer]
    ) -> None:
        """Logprobs of the sampled tokens from ``raw`` logits, whose row i belongs to decision row ``left[i]``."""
        asking = [i for i, row in enumerate(left) if _wants_logprobs(rows[row])]
        if not asking:
            return
        owners = [left[i] for i in asking]
        found = self.backend.logprobs(
            self._select(raw, batch, asking, len(left)),
            [answers[row].token_ids[0] for row in owners],
            [max(0, rows[row].flags.logprobs) for row in owners],
            [rows[row].flags.logprob_ids for row in owners],
        )
        for row, logprob in zip(owners, found, strict=True):
            answers[row].logprobs = (logprob,)

    def _sampling_row(self, row: ScheduledRow, slot: Slot) -> SamplingRow:
        params = slot.params
        banned: tuple[int, ...] = ()
        if row.output_index < params.min_tokens:
            banned = params.stop_token_ids + (() if params.ignore_eos else slot.eos_token_ids)
        return SamplingRow(
            params=params,
            seed=slot.seed,
            choice=row.choice,
            output_index=row.output_index,
            prompt_counts=slot.prompt_counts,
            output_counts=slot.output_counts,
            banned_now=banned,
        )


def _wants_logprobs(row: ScheduledRow) -> bool:
    return row.flags.logprobs >= 0 or bool(row.flags.logprob_ids)


def _wanted(rows: Sequence[ScheduledRow], slots: Sequence[Slot]) -> _Wanted:
    """Token rows whose logits are needed: those that predict a prompt token asked about, and those that sample."""
    wanted = _Wanted()
    first = 0
    for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        if row.flags.prompt_logprobs >= 0:
            stop = min(row.start + len(row.token_ids), slot.num_prompt_tokens - 1)
            for position in range(row.start, stop):
                wanted.prompt.append((len(wanted.logit_rows), index, slot.tokens[position + 1]))
                wanted.logit_rows.append(first + position - row.start)
        first += len(row.token_ids)
        if row.flags.sample:
            wanted.sampled.append((len(wanted.logit_rows), index))
            wanted.logit_rows.append(first - 1)
    return wanted
