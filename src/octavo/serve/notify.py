"""What systemd is told (Type=notify): a line to the socket that it names; nothing where it names none."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["READY", "STOPPING", "notify"]

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Tell the service manager, if there is one; sd_notify(3). That it does not listen is no reason to stop."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        line.setblocking(False)
        line.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
