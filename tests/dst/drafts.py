"""Drafts of a run: recorded before their step, no way past the bound on gaps, and gone with their pages if wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dst.invariants import Broken
from octavo.core.batch import ScheduleDecision, ScheduledRow
from octavo.core.scheduler import ContinuousBatchScheduler
from octavo.core.step_model import StepWork, work_of

EPSILON = 1e-9  # seconds, and their share: sums in another order


class Drafts:
    """Watches the steps of one scheduler."""

    def __init__(self, scheduler: ContinuousBatchScheduler) -> None:
        self.scheduler = scheduler
        self._recorded: dict[tuple[str, int], list[list[int]]] = {}  # tokens, and the parents of a tree
        scheduler.timeline.listen(self._hear)

    def _hear(self, kind: str, t: float, values: Mapping[str, Any]) -> None:
        if kind == "drafts":
            self._recorded = {(request, choice): rest for request, choice, *rest in values["drafts"]}

    def planned(self, decision: ScheduleDecision) -> None:
        """A step is about to run."""
        drafted = [row for row in decision.rows if row.num_drafts]
        for row in drafted:
            recorded, *trees = self._recorded.get((row.request_id, row.choice), [[]])
            parents = trees[0] if trees else range(-1, len(recorded) - 1)
            told = list(zip(parents, recorded, strict=True))[: row.num_drafts]
            if [(parent - 1, token) for parent, token in zip(row.parent_rows[1:], row.drafts, strict=True)] != told:
                raise Broken("DRAFT", f"{row.request_id}/{row.choice} has drafts {row.drafts}, recorded {told}")
        if self.scheduler.gap is not None and drafted:
            self._check_bound(decision.rows, drafted)

    def _check_bound(self, rows: Sequence[ScheduledRow], drafted: Sequence[ScheduledRow]) -> None:
        """A step with drafts that cost time is foretold to keep to the bound."""
        gap, model = self.scheduler.gap, self.scheduler.step_model
        if any(len(row.token_ids) == 1 and not row.reason.startswith("decode") for row in rows):
            return  # of a prompt: foretold as a chunk, priced as a decode
        costs = [
            model.predict(StepWork().with_chunk(row.start, len(row.token_ids)))
            - model.predict(StepWork(1, row.start + 1))
            for row in drafted
        ]
        taken = model.predict(work_of(rows)._replace(scored=0))  # decodes are not priced for their logprobs
        if max(costs) > EPSILON and taken > gap.budget * (1 + EPSILON) + EPSILON:
            raise Broken("DRAFT", f"a step with drafts takes {taken} s, and {gap.budget} s are left of the bound")

    def rested(self) -> None:
        """No step is planned or runs: nobody has a page for more than what is resident."""
        kv = self.scheduler.kv
        for branch in self.scheduler._roster.running:
            held = kv._branches.get(branch.key)
            if held is not None and held.num_columns > -(-branch.num_resident_tokens // kv.page_size):
                raise Broken("DRAFT", f"{branch} has pages beyond its {branch.num_resident_tokens} tokens")
