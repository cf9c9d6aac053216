"""Steps that fail: with an error of some rows, an error that nobody owns, or messages in the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.batch import ScheduleDecision, ScheduledRow
from octavo.core.errors import RowError

KINDS = ("row error", "error", "messages", "memory error", "early error")
Outcome = Exception | dict[int, str] | None


class Faults:
    """What the next steps are to fail with, and who may be blamed for it."""

    def __init__(self) -> None:
        self.calls = 0
        self.next: list[tuple[str, int]] = []  # (kind or nothing, row by number), one a step
        self.corrupt: list[int] = []  # pages, by number, of the next steps that read some back
        self.poisoned: set[str] = set()  # requests: every step with them fails, and nobody says why
        self.raised: Outcome = None  # in the last step
        self.blamed: set[str] = set()  # requests that may end with an error
        self.is_gang: Callable[[str], object] = lambda request_id: False

    def __call__(self, rows: Sequence[ScheduledRow]) -> Outcome:
        """What this step fails with, if with anything."""
        self.calls += 1
        self.raised = self._draw(rows)
        return self.raised

    def before(self, rows: Sequence[ScheduledRow]) -> None:
        """Raise what this step fails with before it does anything, if it does."""
        if self.next and self.next[0][0] == "early error":
            del self.next[0]
            self.calls += 1
            self._blame_alone(rows)
            self.raised = RuntimeError("no device")
            raise self.raised

    def bad_pages(self, decision: ScheduleDecision) -> list[int]:
        """Pages of the tiers that this step finds to have gone bad; nobody is to blame."""
        if not (self.corrupt and decision.swap_ins):
            return []
        self.calls += 1
        return [decision.swap_ins[self.corrupt.pop(0) % len(decision.swap_ins)].source]

    def _draw(self, rows: Sequence[ScheduledRow]) -> Outcome:
        if any(row.request_id in self.poisoned for row in rows):
            self._blame_alone(rows)
            return RuntimeError("a poisoned request")
        if not self.next:
            return None
        kind, number = self.next.pop(0)
        if not kind:
            return None
        row = number % len(rows)
        if kind == "messages":
            self.blamed.add(rows[row].request_id)
            return {row: "it failed in the middle"}
        if kind == "row error":
            self.blamed.add(rows[row].request_id)
            return RowError([row], "its logits are not finite")
        self._blame_alone(rows)
        return MemoryError("no memory for the step") if kind == "memory error" else RuntimeError("a kernel failed")

    def _blame_alone(self, rows: Sequence[ScheduledRow]) -> None:
        names = {row.request_id for row in rows}
        if len(rows) == 1 or (len(names) == 1 and self.is_gang(rows[0].request_id)):
            self.blamed.add(rows[0].request_id)
