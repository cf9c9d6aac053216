"""Is a server there? Answered within a deadline, so that an unreachable source costs seconds, not minutes."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import urllib.request
from urllib.parse import urlsplit

__all__ = ["unreachable_reason"]


def unreachable_reason(url: str, deadline_s: float) -> str | None:
    """None when the server of `url` (or the proxy that leads to it) answers within `deadline_s`, else why not.

    Answering means accepting a connection and, for https, speaking TLS. A server that does both is reached, however
    slow it is afterwards. `file:` addresses need no network.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}", scheme="http")
    return _answer_in_time(parts.scheme, parts.hostname or "", parts.port, deadline_s)


def _answer_in_time(scheme: str, host: str, port: int | None, deadline_s: float) -> str | None:
    answers: queue.Queue[str | None] = queue.Queue()

    def knock() -> None:
        try:
            _connect(scheme, host, port or (443 if scheme == "https" else 80), deadline_s)
        except OSError as error:
            answers.put(f"cannot reach {host} ({error.strerror or error})")
        else:
            answers.put(None)

    # Name resolution cannot be interrupted: it is left behind in a daemon thread.
    threading.Thread(target=knock, daemon=True, name="octavo-reach").start()
    try:
        return answers.get(timeout=deadline_s)
    except queue.Empty:
        return f"cannot reach {host} (no answer in {deadline_s:.1f} s)"


def _connect(scheme: str, host: str, port: int, timeout_s: float) -> None:
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        if scheme != "https":
            return
        context = ssl.create_default_context()
        # Nothing is sent and nothing is believed: whoever fetches afterwards verifies the certificate.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with context.wrap_socket(connection, server_hostname=host):
            return
