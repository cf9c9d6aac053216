"""A lock between processes: held by an open file, so it ends with its holder however that ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["file_lock"]

_POLL_S = 0.1


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `path` exclusively, against other processes and threads. `on_wait` is called once if it is taken."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        waited = False
        while not _try_lock(handle):
            if not waited:
                on_wait()
            waited = True
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)  # closing releases the lock


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
