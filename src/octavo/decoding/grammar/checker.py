"""Checking grammars of strangers under limits, in a process that can be killed (`check_worker.py`)."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.tokenizers.worker import KillableWorker, WorkerEnded

__all__ = ["GrammarChecker"]

_MAX_KEPT = 1024  # verdicts, of 1 KiB at most each
_MAX_FIELD = 200  # characters


class GrammarChecker:
    """Tries grammars out in one process, and remembers what came of it.

    Limits: ``cpu_seconds`` of CPU time for a grammar, 256 MiB of memory. A grammar is compiled for single bytes and the
    texts of ``special`` tokens, so nothing depends on a model. Thread-safe: one grammar at a time. ``check`` may wait
    for the worker, so call it from a thread where an event loop runs.
    """

    def __init__(self, special: Sequence[str] = (), cpu_seconds: float = 2.0) -> None:
        self.cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[str, str] | None] = OrderedDict()  # by digest
        self._worker = KillableWorker("octavo.decoding.grammar.check_worker", list(special))

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
        self._worker.kill()

    def close(self) -> None:
        """End the worker. A later check starts a new one."""
        self._worker.close()

    def _verdict(self, grammar: Grammar) -> tuple[str, str] | None:
        """(field, remedy) of a refusal; None for a grammar that is fine."""
        try:
            found = self._worker.ask({**grammar.to_dict(), "seconds": self.cpu_seconds})
        except WorkerEnded:
            return grammar.kind, f"compiling took more than {self.cpu_seconds:g} s or 256 MiB; give a simpler one"
        return None if found is None else (found[0][-_MAX_FIELD:], found[1])
