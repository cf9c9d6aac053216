"""Which signals end a server."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["ending_signals"]


def ending_signals() -> Sequence[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP (a terminal that closes), unless that is ignored already, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers
