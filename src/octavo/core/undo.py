"""The undo log of one planned step: what `plan` changed, taken back last in, first out."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.errors import InvariantBroken

__all__ = ["UndoLog"]


class UndoLog:
    """Closures that take back the mutations of one planned step.

    `clear` after a successful commit, `rollback` after a failure. A closure must take back exactly one mutation, and
    must do nothing when the thing it would restore has been given up for good in between (a preempted branch).
    """

    def __init__(self) -> None:
        self._entries: list[Callable[[], None]] = []

    def push(self, undo: Callable[[], None]) -> None:
        """Record how to take back a mutation that has just been made."""
        self._entries.append(undo)

    def mark(self) -> int:
        """A point that `rollback_to` can return to: the number of entries."""
        return len(self._entries)

    def rollback(self) -> None:
        """Take back everything recorded, newest first. Raises `InvariantBroken` if an entry failed (all are run)."""
        self.rollback_to(0)

    def rollback_to(self, mark: int) -> None:
        """Take back what was recorded since `mark`, newest first. Raises `InvariantBroken` if an entry failed."""
        first_error: Exception | None = None
        while len(self._entries) > mark:
            try:
                self._entries.pop()()
            except Exception as error:  # one bad entry must not keep the others from being taken back
                first_error = first_error or error
        if first_error is not None:
            raise InvariantBroken(f"undo failed: {first_error}") from first_error

    def clear(self) -> None:
        """Forget everything: the step was committed."""
        self._entries.clear()
