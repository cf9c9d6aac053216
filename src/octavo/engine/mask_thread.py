"""A thread that makes masks: whoever needs some waits for a while, and goes on without those that take longer."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["MaskThread"]

Job = Callable[[], None]
_NICE = 19  # of a thread that was left behind: it has what the others leave
_MOST_BEHIND = 32


class MaskThread:
    """One at a time. A thread that is late is left behind with its job, and another one does what comes next."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()  # that nobody has begun
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: end
        self._first: threading.Thread | None = None
        self._behind: list[threading.Thread] = []

    def run(self, jobs: Iterable[Job], seconds: float) -> None:
        """Do jobs, each once and at some time; return when all are done, or after ``seconds``. A job raises nothing.

        Called with none it sees to it that those before do not wait for one that is late.
        """
        ended, until = threading.Event(), time.monotonic() + seconds
        waits = bool(self._jobs)
        self._jobs.extend(jobs)
        self._jobs.append(ended.set)
        if self._first is None:
            self._begin()
        elif waits:
            self._leave_behind()
        self._wake.put(True)
        if not ended.wait(max(0.0, until - time.monotonic())):
            self._leave_behind()

    @property
    def has_waiting(self) -> bool:
        """Whether there are jobs that nobody has begun."""
        return bool(self._jobs)

    def close(self) -> None:
        """No jobs come. Idempotent; what runs is not waited for."""
        if self._first is not None:
            self._first = None
            self._wake.put(False)

    def _begin(self) -> None:
        self._first = threading.Thread(target=self._work, name="octavo-masks", daemon=True)
        self._first.start()

    def _leave_behind(self) -> None:
        self._behind = [thread for thread in self._behind if thread.is_alive()]
        late = self._first
        if late is None or len(self._behind) >= _MOST_BEHIND:
            return
        self._behind.append(late)
        if late.native_id is not None and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, late.native_id, _NICE)
        self._begin()
        self._wake.put(True)

    def _work(self) -> None:
        while self._wake.get():
            with contextlib.suppress(IndexError):
                while self._first is threading.current_thread():
                    self._jobs.popleft()()
            if self._first is not threading.current_thread():
                self._wake.put(True)  # it may have been another one's
                return
