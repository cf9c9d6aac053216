"""Faults inside a process of the server: with this folder on PYTHONPATH, SIGUSR1 does what a file says.

The file is ``$OCTAVO_FAULTS/<pid>``: the name of one of the functions below, then its number. A process that has heard
takes the file away.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_true_time, _start = time.time, threading.Thread.start


def hang(seconds: float) -> None:
    """The main thread does not come round; the others do."""
    time.sleep(seconds)


def clock(jump: float) -> None:
    """The wall clock is so many seconds off."""
    time.time = lambda: _true_time() + jump


def stop_clock(jump: float) -> None:
    """The wall clock stands still, so many seconds off."""
    still = _true_time() + jump
    time.time = lambda: still


def no_threads(seconds: float) -> None:
    """For so long no thread can be started."""
    until = time.monotonic() + seconds

    def start(thread: threading.Thread) -> None:
        if time.monotonic() < until:
            raise RuntimeError("can't start new thread")
        _start(thread)

    threading.Thread.start = start  # type: ignore[method-assign]


def fail(number: float) -> None:
    """The next calls of the model, so many, find no memory."""
    from octavo.engine.runner import ModelRunner

    real, left = ModelRunner._draw, [number]

    def draw(runner: Any, rows: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise MemoryError("no memory for a step")
        return real(runner, rows)

    ModelRunner._draw = draw  # type: ignore[method-assign]


def slow_disk(seconds: float) -> None:
    """Every read and write of the disk tier takes so long."""
    read, write = os.pread, os.pwrite

    def pread(*values: Any) -> bytes:
        time.sleep(seconds)
        return read(*values)

    def pwrite(*values: Any) -> int:
        time.sleep(seconds)
        return write(*values)

    os.pread, os.pwrite = pread, pwrite


def repeat(number: float) -> None:
    """Each message that comes over a link comes so many times."""
    _disturb(0.0, int(number))


def late(seconds: float) -> None:
    """Each message that comes over a link comes so much later."""
    _disturb(seconds, 1)


def _disturb(seconds: float, number: int) -> None:
    from octavo.serve.roles import engine, sockets

    receive = sockets.receive
    waiting: dict[Any, deque[tuple[float, Any]]] = {}

    def disturbed(socket: Any) -> Any:
        """In the engine, which asks for messages."""
        queue, now = waiting.setdefault(socket, deque()), time.monotonic()
        while (frames := receive(socket)) is not None:
            queue.extend([(now + seconds, frames)] * number)
        return queue.popleft()[1] if queue and queue[0][0] <= now else None

    def read(loop_socket: Any) -> None:
        """In a front end, whose loop calls."""
        while loop_socket._open and (frames := receive(loop_socket._socket)) is not None:
            for _ in range(number):
                loop_socket._loop.call_later(seconds, _heard, loop_socket, frames)

    engine.receive = disturbed
    sockets.LoopSocket._read = read  # type: ignore[method-assign]


def _heard(loop_socket: Any, frames: Any) -> None:
    if loop_socket._open:
        loop_socket._heard(frames)


FAULTS: dict[str, Callable[[float], None]] = {
    each.__name__: each for each in (hang, clock, stop_clock, no_threads, fail, slow_disk, repeat, late)
}


def _hear(number: int, frame: Any) -> None:
    path = os.path.join(os.environ["OCTAVO_FAULTS"], str(os.getpid()))
    with open(path) as file:
        name, value = file.read().split()
    os.unlink(path)
    FAULTS[name](float(value))


_OURS = any(word.startswith("octavo-") for word in sys.orig_argv) or "serve" in sys.orig_argv
if "OCTAVO_FAULTS" in os.environ and _OURS:
    signal.signal(signal.SIGUSR1, _hear)
