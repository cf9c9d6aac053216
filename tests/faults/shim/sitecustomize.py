"""Faults inside a process of the server: with this folder on PYTHONPATH, SIGUSR1 does what a file says.

The file is ``$OCTAVO_FAULTS/<pid>``: the name of one of the functions below, then its number. A process that has heard
takes the file away.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_here = time.time


def hang(seconds: float) -> None:
    """The main thread does not come round; the others do."""
    time.sleep(seconds)


FAULTS: dict[str, Callable[[float], None]] = {"hang": hang}


def _hear(number: int, frame: Any) -> None:
    path = os.path.join(os.environ["OCTAVO_FAULTS"], str(os.getpid()))
    with open(path) as file:
        name, value = file.read().split()
    os.unlink(path)
    FAULTS[name](float(value))


if "OCTAVO_FAULTS" in os.environ and any(word.startswith("octavo-") for word in sys.orig_argv):
    signal.signal(signal.SIGUSR1, _hear)
