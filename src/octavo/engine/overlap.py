"""A thread that runs steps, so that the next one is planned and the last one delivered meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from octavo.core.batch import ScheduleDecision, StepResult

__all__ = ["StepThread"]

Executor = Callable[[ScheduleDecision], StepResult]


class StepThread:
    """Runs one decision at a time: `start` it, and `wait` for what it came to."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._todo: queue.SimpleQueue[ScheduleDecision | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.decision: ScheduleDecision | None = None  # that runs

    def start(self, decision: ScheduleDecision) -> None:
        """Run a decision; `wait` before the next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octavo-step", daemon=True)
            self._thread.start()
        self.decision = decision
        self._todo.put(decision)

    def wait(self) -> StepResult:
        """The result of the decision that runs. Raises what its execution raised."""
        found = self._done.get()
        self.decision = None
        if isinstance(found, BaseException):
            raise found
        return found

    def settle(self) -> None:
        """Wait for what runs, if anything does, and forget what it came to."""
        if self.decision is not None:
            self._done.get()
            self.decision = None

    def close(self) -> None:
        """Let the thread end; what runs is waited for. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()

    def _run(self) -> None:
        while (decision := self._todo.get()) is not None:
            try:
                self._done.put(self._executor(decision))
            except BaseException as error:  # the engine's thread hears of it, whatever it is
                self._done.put(error)
