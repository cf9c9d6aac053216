"""Threads of the numeric library, decided before NumPy is imported: it reads them from the environment, once.

Idle threads of OpenBLAS spin. As many as cores leave none to the event loop and to whoever else is there, and a step
then takes several times as long as with one thread; half of the cores lose little where nobody else is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["default_threads", "limit_threads"]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def default_threads() -> int:
    """Half of the cores that this process may use, at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on this system
        cores = os.cpu_count() or 1
    return max(1, cores // 2)


def limit_threads(threads: int, say: Callable[[str], None]) -> None:
    """Have NumPy use ``threads`` threads; for 0 what the environment says, or else `default_threads`.

    Too late once NumPy is imported: ``say`` tells whoever asked for a number.
    """
    if "numpy" in sys.modules:
        if threads and os.environ.get(_VARIABLES[0]) != str(threads):
            say(f"threads = {threads} has no effect: NumPy was imported before; set {_VARIABLES[0]} before it starts")
        return
    if threads:
        os.environ.update(dict.fromkeys(_VARIABLES, str(threads)))
    elif not any(name in os.environ for name in _VARIABLES):
        os.environ.update(dict.fromkeys(_VARIABLES, str(default_threads())))
