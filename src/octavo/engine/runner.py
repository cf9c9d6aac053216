"""ModelRunner: turns a `ScheduleDecision` into arrays, runs the model and the sampler, and answers with plain values.

decision -> slots -> swaps, page copies -> forward -> process_logits -> sample -> logprobs -> StepResult
                                           forward that draws as well -----------> StepResult   (most steps, natively)
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from octavo.backends.ops import NO_ADAPTER, ForwardBatch, SamplingRow
from octavo.backends.sampling import leaves_a_token, refuse_undrawable
from octavo.core.batch import (
    DrawnRows,
    PageTableDelta,
    RowResult,
    ScheduleDecision,
    ScheduledRow,
    SlotInit,
    StepResult,
    StepRows,
)
from octavo.core.errors import InvariantBroken, RowError
from octavo.core.kv_eviction import Voting
from octavo.decoding.speculation import Lookup, accepted
from octavo.engine.adapters import AdapterTable
from octavo.engine.compaction import Compactor
from octavo.engine.constraints import Constraints
from octavo.engine.draws import Answer, Wanted, take_drawn, wanted_of, without
from octavo.engine.followed import Followed
from octavo.engine.output import NOTHING_LEFT
from octavo.engine.pooling import PooledRows
from octavo.engine.slots import Slot
from octavo.engine.tiers import Tiers
from octavo.engine.trees import indices_of, moves_of, positions_of, token_rows, trees_of

_NOT_FINITE = "the model gave no finite logit; check the weights and the prompt"


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
        vocab_size: int = sys.maxsize,
        tiers: Tiers | None = None,
        adapters: AdapterTable | None = None,
        followed: Followed | None = None,
        lookup: tuple[int, int] | None = None,
        voting: Voting | None = None,
        phase_seconds: MutableMapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``phase_seconds["model"]`` grows by the seconds that forward passes take. ``lookup``: tokens that prompt
        lookup compares, at least and at most; with it, the residual verifier draws all tokens.
        """
        self.phase_seconds = {"model": 0.0} if phase_seconds is None else phase_seconds
        self.clock = clock
        self.model = model
        self.backend = backend
        self.weights = weights
        self.kv_pool = kv_pool
        self.tiers = tiers  # where evicted pages go, if they are kept
        self.adapters = adapters
        self.lookup = lookup
        self.num_groups, self.vocab_size = num_groups, vocab_size
        self._slots: dict[int, Slot] = {}
        self._residual: dict[int, None] = {}  # slots whose tokens the residual verifier draws
        self._constraints = Constraints(followed)
        self._changing: dict[int, Slot] = {}  # those in which what is done to the logits changes from token to token
        # what a backend reads where it lies, by slot: page tables, sampling parameters, arrays of plain decodes
        self._compactor = None if voting is None else Compactor(voting, model, backend, weights, kv_pool)
        self._arrays: Any = backend.step_arrays(num_groups) if hasattr(backend, "step_arrays") else None

    def execute(self, decision: ScheduleDecision) -> StepResult:
        """Run one step. Raises ``RowError`` or whatever the model raises; nothing is committed here."""
        for slot in decision.freed_slots:
            self._slots.pop(slot, None)
            self._residual.pop(slot, None)
            self._changing.pop(slot, None)
            self._constraints.leave(slot)
        if self.tiers is not None:
            self.tiers.swap(decision)
        if decision.copies:
            self.backend.copy_pages(self.kv_pool, [(copy.source, copy.target) for copy in decision.copies])
        if not decision.rows:
            return StepResult(decision.step, ())
        rows = decision.rows if isinstance(decision.rows, StepRows) else _as_others(decision.rows)
        if self._compactor is not None:
            self._forget(self._compactor, rows.others)
        drawn = self._draw(rows)
        results = _as_columns(rows, self._answer(tuple(rows))) if drawn is None else drawn
        if rows.others:
            self._compact(rows.others, results[len(rows.slots) :])
        return StepResult(decision.step, results)

    def _forget(self, compactor: Compactor, rows: Sequence[ScheduledRow]) -> None:
        """Keep what stays where that is due, before anything else is computed."""
        for row in rows:
            if row.compaction is None:
                continue
            adapter = NO_ADAPTER
            if row.init is None:
                adapter = self._slots[row.slot].adapter
            elif row.init.adapter and self.adapters is not None:
                adapter = self.adapters.place_of(row.init.adapter)
            places = None if self.adapters is None else self.adapters.places
            self._timed(compactor.compact, row.slot, row.compaction, places, adapter)

    def _compact(self, rows: Sequence[ScheduledRow], results: Sequence[RowResult]) -> None:
        """Have the drafts that were drawn in the slots of their positions, where they were in a tree."""
        moves: list[tuple[int, int]] = []
        for row, result in zip(rows, results, strict=True):
            if row.flags.parent_rows:
                tables = self._slots[row.slot].pages if self._arrays is None else self._arrays.tables.array[:, row.slot]
                moves += moves_of(row, result, tables, self.kv_pool.page_size)
        if moves:
            self.backend.move_slots(self.kv_pool, moves)

    # -- one call for everything: the backend draws as it computes

    def _draw(self, rows: StepRows) -> Sequence[RowResult] | None:
        """The results of a step that draws tokens, with their logprobs; None if more is asked, or a draw fails.

        Then the step runs again in the general way: what it writes is the same.
        """
        if self._arrays is None:
            return None
        slots: Sequence[Slot] = [self._slot(row) for row in rows.others] if rows.others else ()
        if self._residual or (slots and any(row.flags.prompt_logprobs >= 0 for row in rows.others)):
            return None
        for index, deltas in rows.page_deltas.items():
            self._place(rows.slots[index], deltas)
        if slots or self._changing:
            self._follow(rows, slots)
        if not slots:
            batch = self._arrays.decodes(rows.slots, rows.token_ids, rows.starts, rows.output_indices, self.kv_pool)
            ids = self._timed(self.model.draw, batch)
            return None if min(ids) < 0 else DrawnRows(ids)
        draws = [slot.draws(row) for row, slot in zip(rows.others, slots, strict=True)]
        batch = self._mixed_batch(rows, draws)
        ids = self._timed(self.model.draw, batch)
        if min(ids, default=0) < 0:
            return None
        rest = iter(ids[len(rows.slots) :])
        pooled = PooledRows(rows.others, self._slots, len(rows.slots))
        vectors = pooled.results(self.backend, self.model.last_states(batch, pooled.token_rows)) if pooled else {}
        apart = iter(batch.cache["verified"].logprobs if "verified" in batch.cache else ())
        others = [vectors.get(i) or self._drawn_row(row, *draws[i], rest, apart) for i, row in enumerate(rows.others)]
        return DrawnRows(ids[: len(rows.slots)], others)

    def _drawn_row(
        self,
        row: ScheduledRow,
        places: Sequence[int],
        ruled: Sequence[SamplingRow],
        ids: Iterator[int],
        apart: Iterator[Any],
    ) -> RowResult:
        if not row.flags.sample:
            return RowResult()
        if not row.num_drafts:
            logprobs = (self._arrays.logprobs(row.slot),) if _wants_logprobs(row) else ()
            self._slots[row.slot].surprised_by(row.output_index, logprobs)
            return RowResult((next(ids),), logprobs)
        drawn = dict(zip(places, ids, strict=False))
        found = dict(zip(places, islice(apart, len(ruled)), strict=False))
        path = accepted(row.drafts, row.parent_rows, drawn)
        tokens = tuple(drawn[place] for place in path)
        self._slots[row.slot].accept(row, tokens)
        return RowResult(tokens, tuple(found[at].answer() for at in path if found.get(at) is not None))

    def _follow(self, rows: StepRows, slots: Sequence[Slot]) -> None:
        """Tell the backend of the step's tokens where counts or banned ids depend on them."""
        changing = [(i, n) for i, n in enumerate(rows.slots) if n in self._changing] if self._changing else []
        for place, number in changing:
            self._changing[number].follow(rows.starts[place], (rows.token_ids[place],), rows.starts[place] + 1)
        self._constraints.prepare(rows.slots, rows.output_indices, rows.others)
        for place, number in changing:
            self._refresh(number, self._changing[number], rows.choices[place], rows.output_indices[place])
        for row, slot in zip(rows.others, slots, strict=True):
            if row.flags.sample:
                self._refresh(row.slot, slot, row.choice, row.output_index)

    def _refresh(self, number: int, slot: Slot, choice: int, output_index: int) -> None:
        if min(output_index, slot.told + 1) < slot.changes_until:  # steps between may have gone the general way
            self._arrays.refresh(number, slot.sampling_row(choice, output_index))
            slot.told = output_index

    def _mixed_batch(self, rows: StepRows, draws: Sequence[tuple[Sequence[int], list[SamplingRow]]]) -> ForwardBatch:
        """Plain decodes, then the others, each of which samples from the rows of its tree that ``draws`` says."""
        tokens, lens = list(rows.token_ids), [1] * len(rows.slots)
        logit_rows = list(range(len(lens)))
        slots, indices = list(rows.slots), list(rows.output_indices)
        verified: dict[int, list[SamplingRow]] = {}  # by the first draw of a row whose draws differ in more than index
        for row, (places, ruled) in zip(rows.others, draws, strict=True):
            tokens += row.token_ids
            lens.append(len(row.token_ids))
            logit_rows += token_rows(row, len(tokens), places)
            if ruled:
                verified[len(slots)] = ruled
            slots += [row.slot] * len(places)
            indices += indices_of(row, places)
        batch: ForwardBatch = self.backend.batch(
            tokens,
            query_lens=lens,
            page_table=self._arrays.tables.array,
            kv=self.kv_pool,
            **self._places(rows.slots, rows.starts, rows.others),
            table_rows=rows.slots + [row.slot for row in rows.others],
            logit_rows=logit_rows,
            no_write=[False] * len(rows.slots) + [row.flags.no_write for row in rows.others],
            parent_rows=trees_of(len(rows.slots), rows.others),
        )
        if self.adapters is not None:
            self._arrays.attach(batch)
        batch.draws = self._arrays.draws(slots, indices)
        if verified:
            batch.cache["verified"] = self._arrays.put_rows(batch.draws, verified)
        return batch

    # -- step by step: logits, then what is asked of them

    def _answer(self, rows: Sequence[ScheduledRow]) -> Sequence[RowResult]:
        slots = [self._slot(row) for row in rows]
        self._constraints.prepare((), (), rows)
        asked = [slot.sampling_rows(row) for row, slot in zip(rows, slots, strict=True)]
        asks = [ask for each in asked for ask in each.values()]
        wanted = wanted_of(rows, slots, [list(each) for each in asked])
        batch = self._batch(rows, slots, wanted)
        if len(asks) == len(wanted.logit_rows) and not self._residual:  # a backend may draw while it computes
            batch.sampling = tuple(asks)
        answers = [Answer() for _ in rows]
        pooled = PooledRows(rows, self._slots)
        if pooled:
            called = self.model.forward_states, self.backend, self.weights, batch, pooled.token_rows
            logits, states = self._timed(*called)
            for at, result in pooled.results(self.backend, states).items():
                answers[at].hidden, answers[at].error = result.hidden, result.error
        else:
            logits = self._timed(self.model.forward, self.backend, self.weights, batch)
        if wanted.logit_rows:
            self._prompt_logprobs(logits, batch, rows, wanted, answers)
            self._sample(logits, batch, rows, asks, wanted, answers)
        for row, slot, answer in zip(rows, slots, answers, strict=True):
            slot.surprised_by(row.output_index, answer.logprobs)
            if row.num_drafts:
                slot.accept(row, answer.token_ids)
        return tuple(answer.result() for answer in answers)

    def _timed(self, function: Callable[..., Any], *values: Any) -> Any:
        started = self.clock()
        result = function(*values)
        self.phase_seconds["model"] += self.clock() - started
        return result

    def _slot(self, row: ScheduledRow) -> Slot:
        """The slot of a row, with the row's tokens and pages in it."""
        if row.init is not None:
            self._fill_slot(row, row.init)
        slot = self._slots.get(row.slot)
        if slot is None:
            raise InvariantBroken(f"row {row.request_id}/{row.choice} names slot {row.slot}, which was never filled")
        slot.update(row)
        if row.page_deltas:
            self._place(row.slot, row.page_deltas)
        return slot

    def _fill_slot(self, row: ScheduledRow, init: SlotInit) -> None:
        lookup = self._lookup_for(init)
        self._residual.pop(row.slot, None)
        if lookup is not None:
            self._residual[row.slot] = None
        slot = self._slots[row.slot] = Slot(init, self.num_groups, lookup, self.vocab_size)
        self._constraints.enter(row.slot, slot, (row.request_id, row.choice))
        self._changing.pop(row.slot, None)
        if slot.changes_until:
            self._changing[row.slot] = slot
        if self._arrays is not None:
            self._arrays.enter(row.slot, slot.sampling_row(row.choice, row.output_index))
            slot.told = row.output_index
        if init.adapter and self.adapters is not None:
            slot.adapter = self.adapters.place_of(init.adapter)
            if self._arrays is not None:
                self._arrays.adapt(row.slot, slot.adapter)

    def _lookup_for(self, init: SlotInit) -> Lookup | None:
        """Who guesses each token, where the residual verifier draws."""
        asked = init.params.speculative_verifier
        if self.lookup is not None and asked != "exact":
            return Lookup(*self.lookup)
        return Lookup() if asked == "residual" else None

    def _place(self, slot: int, deltas: Sequence[PageTableDelta]) -> None:
        for delta in deltas:
            here = delta if self._compactor is None else self._compactor.take(slot, delta)
            if self._arrays is None:
                self._slots[slot].place(here)
            else:
                self._arrays.tables.place(slot, here.group, here.first, here.pages)
        if self._compactor is not None and self._arrays is not None:
            self._arrays.tables.shift(slot, self._compactor.shift(slot))

    def _places(self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[ScheduledRow]) -> dict[str, Any]:
        """Where the keys of a step's tokens lie, one of each of ``slots`` at ``starts`` and those of ``rows``, and how
        much further they turn: as `batch` wants it.
        """
        positions = [positions_of(row) for row in rows]
        if self._compactor is None:
            return {"positions": [*starts, *(p for each in positions for p in each)]}
        shifts = [self._compactor.shift(slot) for slot in (*slots, *(row.slot for row in rows))]
        spans = zip((*((start,) for start in starts), *positions), shifts, strict=True)
        return {"positions": [p - shift for span, shift in spans for p in span], "shifts": shifts}

    def _batch(self, rows: Sequence[ScheduledRow], slots: Sequence[Slot], wanted: Wanted) -> ForwardBatch:
        where: dict[str, Any] = {}
        if self._arrays is None:
            tables: Any = [[slot.pages[group] for slot in slots] for group in range(self.num_groups)]
        else:
            tables, where = self._arrays.tables.array, {"table_rows": [row.slot for row in rows]}
        batch: ForwardBatch = self.backend.batch(
            [token for row in rows for token in row.token_ids],
            query_lens=[len(row.token_ids) for row in rows],
            page_table=tables,
            kv=self.kv_pool,
            **self._places((), (), rows),
            logit_rows=wanted.logit_rows,
            no_write=[row.flags.no_write for row in rows],
            request_ids=[row.request_id for row in rows],
            parent_rows=trees_of(0, rows),
            **where,
        )
        if self.adapters is not None:
            self.adapters.places.attach(batch, [slot.adapter for slot in slots])
        return batch

    def _select(self, logits: Any, batch: ForwardBatch, indices: Sequence[int], total: int) -> Any:
        """The rows ``indices`` of ``logits`` [total, V], or ``logits`` itself when that is all of them."""
        if len(indices) == total:
            return logits
        return self.backend.select_rows(logits, replace(batch, logit_rows=list(indices), cache={}))

    def _prompt_logprobs(
        self, logits: Any, batch: ForwardBatch, rows: Sequence[ScheduledRow], wanted: Wanted, answers: list[Answer]
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
        asks: Sequence[SamplingRow],
        wanted: Wanted,
        answers: list[Answer],
    ) -> None:
        """Sample the rows that ask for it; a row without a finite logit leaves with an error and the rest go on."""
        left = [i for i, (_, row, _) in enumerate(wanted.sampled) if answers[row].error is None]
        while left:
            raw = self._select(logits, batch, [wanted.sampled[i][0] for i in left], len(wanted.logit_rows))
            asked = batch.sampling if len(batch.sampling) == len(left) else [asks[i] for i in left]
            try:
                processed = self.backend.process_logits(raw, asked)
                ids = self._drawn_from(processed, batch, asked)
            except RowError as error:
                if not error.rows:
                    raise
                lost, size = [left[index] for index in error.rows], len(raw[0])
                for none_left, why in ((True, NOTHING_LEFT), (False, f"{error}: {_NOT_FINITE}")):
                    these = [i for i in lost if leaves_a_token(asks[i], size) is not none_left]
                    left = without(left, these, wanted, why, answers)
                continue
            drawn = take_drawn([wanted.sampled[i][1:] for i in left], ids, rows, answers)
            self._logprobs(raw, batch, rows, drawn, answers)
            return

    def _drawn_from(self, logits: Any, batch: ForwardBatch, asked: Sequence[SamplingRow]) -> Sequence[int]:
        """Each row's id, by its verifier. Raises ``RowError`` naming the rows that have none."""
        if not self._residual:
            return self.backend.sample(logits, asked)
        ids: list[int | None] = [None] * len(asked)
        for is_residual, draw in ((True, _verified), (False, self.backend.sample)):
            rows = [i for i, ask in enumerate(asked) if (ask.guess is not None) is is_residual]
            try:
                found = draw(self._select(logits, batch, rows, len(asked)), [asked[i] for i in rows]) if rows else ()
            except RowError as error:
                lost = {rows[i] for i in error.rows}
                found = [None if i in lost else 0 for i in rows]
            for i, token in zip(rows, found, strict=True):
                ids[i] = token
        refuse_undrawable(ids)
        return [token for token in ids if token is not None]

    def _logprobs(
        self,
        raw: Any,
        batch: ForwardBatch,
        rows: Sequence[ScheduledRow],
        drawn: Sequence[tuple[int, int, int]],
        answers: list[Answer],
    ) -> None:
        """Logprobs of tokens that count: ``drawn`` are (row of ``raw`` logits, decision row, token)."""
        asking = [each for each in drawn if _wants_logprobs(rows[each[1]])]
        if not asking:
            return
        found = self.backend.logprobs(
            self._select(raw, batch, [at for at, _, _ in asking], len(raw)),
            [token for _, _, token in asking],
            [max(0, rows[row].flags.logprobs) for _, row, _ in asking],
            [rows[row].flags.logprob_ids for _, row, _ in asking],
        )
        for (_, row, _), logprob in zip(asking, found, strict=True):
            answers[row].logprobs += (logprob,)


def _as_others(rows: Sequence[ScheduledRow]) -> StepRows:
    return StepRows([], [], [], [], [], [], {}, rows)


def _as_columns(rows: StepRows, results: Sequence[RowResult]) -> Sequence[RowResult]:
    """The results with those of plain decodes as a column, unless one has failed."""
    decodes = results[: len(rows.slots)]
    if not decodes or any(len(result.token_ids) != 1 for result in decodes):
        return results
    return DrawnRows([result.token_ids[0] for result in decodes], results[len(decodes) :])


def _wants_logprobs(row: ScheduledRow) -> bool:
    return row.flags.logprobs >= 0 or bool(row.flags.logprob_ids)


def _verified(logits: Any, rows: Sequence[SamplingRow]) -> list[int]:
    from octavo.decoding.speculation.residual import draw  # needs NumPy, as nothing else here does

    return draw(logits, rows)
