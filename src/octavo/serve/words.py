"""Lines for the operator, who may have closed the terminal, or have filled the disk that a log is on."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["complain", "tell"]

_GONE = (errno.EPIPE, errno.EIO)


def tell(line: str) -> None:
    """Print a line. A server goes on when nobody can read what it says."""
    _print(line, sys.stdout)


def complain(line: str) -> None:
    """The same, as a line about trouble."""
    _print(line, sys.stderr)


def _print(line: str, stream: TextIO | None) -> None:
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError) as error:
        if stream is not None and isinstance(error, OSError) and error.errno in _GONE:
            _forget(stream)


def _forget(stream: TextIO) -> None:
    """Nobody reads any more: what is left unwritten must not be met with again, neither here nor at the exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
