"""Inside a killable worker: limits that the kernel enforces, and questions answered one after the other (`worker.py`).

In: a line that says what it works with, then a question a line. Out: a line when it is ready, then an answer a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["limit_cpu", "serve"]


def serve(prepare: Callable[[Any], Callable[[Any], object]], *, memory_bytes: int, nice: int = 0) -> None:
    """Answer until the input ends. ``prepare``: from the first line to what answers.

    ``memory_bytes``: address space beyond what is in use when it is ready.
    """
    lines = iter(sys.stdin.buffer)
    first = next(lines, None)
    if first is None:
        return
    answer = prepare(json.loads(first))
    _limit_process(memory_bytes, nice)
    _write("ready")
    for line in lines:
        _write(answer(json.loads(line)))


def limit_cpu(seconds: float) -> None:
    """End the process after so much CPU time; 0 stops the clock. (Elsewhere than POSIX the caller's clock must do.)"""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _write(answer: object) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit_process(memory_bytes: int, nice: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the owner, who closes our input
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError):
        os.nice(nice)
