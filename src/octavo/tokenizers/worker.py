"""A process that does what strangers ask for, under limits, and can be killed (its own side: `worker_process.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

from octavo.core.errors import OctavoError

__all__ = ["KillableWorker", "WorkerEnded"]

_WALL_SECONDS = 10.0  # for a machine so busy that CPU time says nothing; includes starting the process
_BY_ITSELF = (-27, -6)  # of its limits: SIGPROF for time, SIGABRT for memory
# not -m, which would have the files of the working folder hide modules
_BEGIN = "import importlib, sys; sys.path.pop(0); importlib.import_module(sys.argv[1]).main()"


class WorkerEnded(OctavoError):
    """It had to be killed for what it was asked, or met one of its limits."""


class KillableWorker:
    """One process, started at the first question and again after it has ended; questions and answers are JSON values.

    ``module``: whose ``main`` it runs. ``first``: what it is told before the first question. Thread-safe: one question
    at a time, so ask from a thread where an event loop runs.
    """

    def __init__(self, module: str, first: object = None) -> None:
        self._command = [sys.executable, "-c", _BEGIN, module]
        self._first = first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1
        self._end: weakref.finalize[..., KillableWorker] | None = None  # also runs when the interpreter exits

    def ask(self, question: object) -> Any:
        """The answer. Raises ``WorkerEnded``; who kills the process otherwise proves nothing, so it is asked again."""
        with self._lock:
            for _ in range(2):
                process, answer, in_time = self._exchange(question)
                if answer.endswith(b"\n"):
                    return json.loads(answer)
                self._stop()
                if process.returncode in _BY_ITSELF or not in_time:
                    break
        raise WorkerEnded("it took too long, or too much memory")

    def kill(self) -> None:
        """End the process without waiting for what it does."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. A later question starts a new one."""
        with self._lock:
            self._stop()

    def _exchange(self, question: object) -> tuple[subprocess.Popen[bytes], bytes, bool]:
        """The process, its answer (no whole line if it ended before), and whether it ended within `_WALL_SECONDS`."""
        process, is_new = self._started()
        clock = threading.Timer(_WALL_SECONDS, process.kill)
        clock.start()
        try:
            if is_new:
                _tell(process, self._first)
            answer = _tell(process, question)
            return process, answer, clock.is_alive()
        finally:
            clock.cancel()

    def _started(self) -> tuple[subprocess.Popen[bytes], bool]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process, False
        self._stop()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        return self._process, True

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _tell(process: subprocess.Popen[bytes], message: object) -> bytes:
    """The answer; no whole line if it ended before it answered."""
    if process.stdin is None or process.stdout is None:
        return b""
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:
        return b""


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():  # a fork of the process has no child to end
        process.kill()
        process.communicate()
