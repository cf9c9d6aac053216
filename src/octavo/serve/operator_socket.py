"""The unix socket that the operator's routes are on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.errors import InvalidInput

__all__ = ["operator_socket"]


@contextmanager
def operator_socket(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at this path, which nobody else may open, while the block runs.

    Raises ``InvalidInput``, also where another server listens; what a dead one left there is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        if path.is_socket():
            _remove_left(path)
        listener.bind(str(path))
        listener.listen()
        ours = path.stat()
    except OSError as error:
        listener.close()
        raise InvalidInput("admin_socket", str(path), f"cannot be listened on: {error.strerror or error}") from error
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    try:
        yield listener
    finally:
        listener.close()
        if path.exists() and os.path.samestat(path.stat(), ours):
            path.unlink()


def _remove_left(path: Path) -> None:
    """Remove a socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its queue is full, so somebody has it
    raise InvalidInput("admin_socket", str(path), "another server listens there; choose another path, or stop it")
