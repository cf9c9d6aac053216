"""The null model of a simulation: salted by namespace, with scripted failures, and pages that know who wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from null_model import NullModel

from dst.faults import Faults
from dst.odd import OddKV, Unit
from dst.scenario import VOCAB
from octavo.core.batch import DrawnRows, RowResult, ScheduleDecision, ScheduledRow, StepResult
from octavo.core.errors import CorruptPages


class SimModel(NullModel):
    """Executes decisions; ``namespace_of`` gives the namespace of a request."""

    def __init__(
        self, kv: OddKV, faults: Faults, namespace_of: Callable[[str], str], salt: Callable[[str], int]
    ) -> None:
        super().__init__(kv, VOCAB)
        self.odd, self.faults = kv, faults
        self.namespace_of = namespace_of
        self.salt_of = lambda request_id: salt(namespace_of(request_id))
        self.fault = lambda decision: faults(decision.rows)
        self.corrupt = faults.bad_pages
        kv.model = self
        kv.store.forget = self.forget

    def __call__(self, decision: ScheduleDecision) -> StepResult:
        """Execute one step; nothing of it is kept."""
        self.faults.before(decision.rows)
        result = super().__call__(decision)
        self.decisions.clear()
        if "short_keys" in self.odd.switches:
            moves = (replace(move, token_ids=tuple(map(Unit, move.token_ids))) for move in result.moves)
            return StepResult(result.step, _with_units(result.rows), tuple(moves))
        return result

    def forget(self, page: int) -> None:
        """A free page holds nothing that may be read."""
        self.pages.pop(page, None)
        self.odd.page_namespace.pop(page, None)

    def _swap_pages(self, decision: ScheduleDecision) -> None:
        try:
            super()._swap_pages(decision)
        except CorruptPages as error:
            self.faults.raised = error
            raise
        spaces = self.odd.page_namespace  # host page h is -1 - h there
        spaces.update((-1 - move.target, spaces.get(-1 - move.source, "?")) for move in decision.sinks)
        spaces.update((-1 - move.target, spaces.get(move.source, "?")) for move in decision.swap_outs)
        spaces.update((move.target, spaces.get(-1 - move.source, "?")) for move in decision.swap_ins)

    def _copy_pages(self, decision: ScheduleDecision) -> None:
        super()._copy_pages(decision)
        for copy in decision.copies:
            self.odd.page_namespace[copy.target] = self.odd.page_namespace.get(copy.source, "?")

    def _write(self, row: ScheduledRow, garbage: bool) -> None:
        super()._write(row, garbage)
        if row.flags.no_write:
            return
        slot, namespace = self.slots[row.slot], self.namespace_of(row.request_id)
        first, end = row.start // self.page_size, -(-(row.start + row.num_scheduled_tokens) // self.page_size)
        for table in slot.tables:
            for page in table[first:end]:
                self.odd.page_namespace[page] = namespace


def _with_units(rows: object) -> object:
    if isinstance(rows, DrawnRows):
        return DrawnRows([Unit(token) for token in rows.ids], [_with_unit(row) for row in rows.others])
    return tuple(_with_unit(row) for row in rows)


def _with_unit(row: RowResult) -> RowResult:
    row.token_ids = tuple(Unit(token) for token in row.token_ids)
    return row
