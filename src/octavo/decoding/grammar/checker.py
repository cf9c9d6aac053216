"""Checking grammars of strangers under limits, in a process that can be killed (`check_worker.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar

__all__ = ["GrammarChecker"]

_WALL_SECONDS = 10.0  # for a machine so busy that CPU time says nothing; includes starting the process
_MAX_KEPT = 1024  # verdicts, of 1 KiB at most each
_MAX_FIELD = 200  # characters
_BY_ITSELF = (-27, -6)  # of its limits: SIGPROF for time, SIGABRT for memory


class GrammarChecker:
    """One worker process, started at the first use and again after a grammar for which it had to be killed.

    Limits: ``cpu_seconds`` of CPU time for a grammar, 256 MiB of memory. A grammar is compiled for single bytes and the
    texts of ``special`` tokens, so nothing depends on a model. Thread-safe: one grammar at a time. ``check`` may wait
    for the worker, so call it from a thread where an event loop runs.
    """

    def __init__(self, special: Sequence[str] = (), cpu_seconds: float = 2.0) -> None:
        self.cpu_seconds = cpu_seconds
        self._special = list(special)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[str, str] | None] = OrderedDict()  # by digest
        self._worker: subprocess.Popen[bytes] | None = None
        self._is_new = False  # it has not been told the special tokens yet
        self._end: weakref.finalize[..., GrammarChecker] | None = None  # also runs when the interpreter exits

    def check(self, grammar: Grammar) -> None:
        """Raises ``InvalidInput``: what the grammar's fault is, or the limit that it passed."""
        key = hashlib.sha256(f"{grammar.kind}:{grammar.source}".encode()).digest()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._verdict(grammar)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            found = self._kept[key]
        if found is not None:
            raise InvalidInput(found[0], None, found[1])

    def kill(self) -> None:
        """End the worker without waiting for what it does: a check that runs ends as one that took too long."""
        worker = self._worker
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End the worker. A later check starts a new one."""
        with self._lock:
            self._stop()

    def _verdict(self, grammar: Grammar) -> tuple[str, str] | None:
        """(field, remedy) of a refusal; None for a grammar that is fine. Another end of the worker proves nothing."""
        for _ in range(2):
            worker = self._started()
            clock = threading.Timer(_WALL_SECONDS, worker.kill)
            clock.start()
            self._greet(worker)
            answer = _ask(worker, {**grammar.to_dict(), "seconds": self.cpu_seconds})
            in_time = clock.is_alive()
            clock.cancel()
            if answer.endswith(b"\n"):
                found = json.loads(answer)
                return None if found is None else (found[0][-_MAX_FIELD:], found[1])
            self._stop()
            if worker.wait() in _BY_ITSELF or not in_time:
                break
        return grammar.kind, f"compiling took more than {self.cpu_seconds:g} s or 256 MiB; give a simpler one"

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._stop()
        command = [sys.executable, "-m", "octavo.decoding.grammar.check_worker"]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        pipe = subprocess.PIPE
        self._worker = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )
        self._end = weakref.finalize(self, _end, self._worker, os.getpid())
        self._is_new = True
        return self._worker

    def _greet(self, worker: subprocess.Popen[bytes]) -> None:
        if self._is_new:
            _ask(worker, self._special)
        self._is_new = False

    def _stop(self) -> None:
        self._worker = None
        if self._end is not None:
            self._end()


def _ask(worker: subprocess.Popen[bytes], message: object) -> bytes:
    """The worker's answer; no whole line if it ended before it answered."""
    if worker.stdin is None or worker.stdout is None:
        return b""
    try:
        worker.stdin.write(json.dumps(message).encode() + b"\n")
        worker.stdin.flush()
        return worker.stdout.readline()
    except OSError:
        return b""


def _end(worker: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():  # a fork of the process has no child to end
        worker.kill()
        worker.communicate()
