"""What the system tells of a client's socket, and is told: is anybody there, and is there room for more."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

__all__ = ["files_left", "has_left", "raise_file_limit", "watch_peer"]

_CLOSED = 7  # TCP_CLOSE: reset by the peer, or given up
_UNSENT = 256 << 10  # bytes that wait in the system before a writer has to


def watch_peer(sock: Any, seconds: float) -> None:
    """Have the system find out within so many seconds (2 at least) that a peer is gone, and hold little for it."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    idle = max(1, int(seconds / 2))
    between = max(1, int(seconds / 8))
    options = {
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": max(1, (int(seconds) - idle) // between),
        "TCP_USER_TIMEOUT": int(1000 * seconds),
        "TCP_NOTSENT_LOWAT": _UNSENT,
    }
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # not every system, and 3.10 does not know the last one's name
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_left(sock: Any) -> bool | None:
    """Whether the peer has refused what was sent to it; None where the system does not say."""
    if sock is None or not hasattr(socket, "TCP_INFO") or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED)
    except OSError:
        return True


def files_left(sock: Any) -> int:
    """How many more files can be opened, if this socket is the last one: the lowest free number is always taken."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return 1 << 20
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) - sock.fileno() - 1


def raise_file_limit(needed: int) -> None:
    """Have so many files be open at once, as far as the system lets us."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard >= 0 else needed, hard))
