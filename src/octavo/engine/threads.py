"""Threads of the numeric library, decided before NumPy is imported: it reads them from the environment, once.

Idle threads of OpenBLAS spin. As many as cores leave none to the event loop and to whoever else is there, and a step
then takes several times as long as with one thread; half of the cores lose little where nobody else is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["cores_of", "cpu_quota", "default_threads", "limit_threads", "usable_cores"]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def default_threads() -> int:
    """Half of the cores that this process may use, at least one."""
    cores, quota = usable_cores(), cpu_quota()
    return max(1, int(cores if quota is None else min(cores, quota)) // 2)


def cores_of(backend: object) -> int:
    """Cores that a backend's steps keep busy: its own threads, or those that NumPy was given."""
    own = getattr(getattr(backend, "engine", None), "threads", 0)
    given = os.environ.get(_VARIABLES[0], "") if getattr(backend, "name", "") == "numpy" else ""
    return own or (int(given) if given.isdecimal() else 1)


def usable_cores() -> int:
    """Cores that the system lets this process run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on this system
        return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group allows (version 2, then 1); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return limit / int((root / "cpu/cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


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
