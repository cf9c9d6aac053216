"""What every process under the supervisor begins with, and what it dies by.

Its standard input is a pipe from the supervisor: one line of settings, then nothing, and its end when the supervisor
has died. Who is left then leaves at once, and takes the folder of sockets along.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from octavo.core.errors import InvalidInput, OctavoError, shorten
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig
from octavo.serve.links.messages import Beat, EngineFacts, Failed, Link, Ready, ToChild, ToSupervisor
from octavo.serve.logs import set_up_logging
from octavo.serve.roles.sockets import Place, send
from octavo.serve.words import tell

__all__ = ["Child", "Settings", "main"]

ORPHANED = 70  # exit code of a process whose supervisor has died
_MAX_LINE = 1 << 20


class Settings(msgspec.Struct):
    """What a process is told at its start."""

    seat: str
    epoch: int
    folder: str
    control: str  # the supervisor's address
    engine: EngineConfig
    server: ServeConfig
    listener: int = -1  # file descriptor of the listening socket, for a front end

    @property
    def is_full(self) -> bool:
        """Whether the detokenizer is a process of its own."""
        return self.server.resolved_layout == "full"

    @property
    def silence(self) -> float:
        """Seconds without a sign of life, after which a process counts as dead."""
        return self.server.silence_timeout

    @property
    def beat(self) -> float:
        """Seconds between signs of life."""
        return min(1.0, self.silence / 15.0)


class Child:
    """One life of one process: its settings, its line to the supervisor, its signs of life."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.epoch, self.place = settings.epoch, Place(Path(settings.folder), settings.server.link_address)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.place.connected(self.context, settings.control, self.epoch)
        self.link: Link[ToSupervisor, ToChild] = Link(ToChild)
        self.progress: float | None = None  # when the main thread last came round, if it says so
        self.patience = settings.silence  # seconds that it may take to come round again
        self._ended = threading.Event()

    def say(self, line: str) -> None:
        """A line for the operator."""
        tell(line)

    def tell(self, message: ToSupervisor) -> None:
        """A message to the supervisor; from the main thread only."""
        send(self.control, self.link.pack(message, self.epoch))

    def ready(self, facts: EngineFacts | None = None, address: str = "") -> None:
        """It serves, and can be connected to at this address."""
        self.tell(Ready(facts, address))

    def failed(self, error: OctavoError | OSError) -> None:
        """It cannot start, and says why."""
        if not isinstance(error, InvalidInput):
            self.tell(Failed("", None, _worded(error)[:4000]))
            return
        value = error.value if isinstance(error.value, int | float | bool | str) else shorten(error.value)
        value = value[:4000] if isinstance(value, str) else value
        self.tell(Failed(error.field[:4000], value, error.remedy[:4000]))

    def beat_in_thread(self) -> None:
        """Signs of life while the main thread is busy: a stopped process gives none, a long step does."""
        threading.Thread(target=self._beat, name="octavo-beat", daemon=True).start()

    def _beat(self) -> None:
        socket = self.place.connected(self.context, self.settings.control, self.epoch, b"B")
        while not self._ended.wait(self.settings.beat):
            if self.progress is not None and time.monotonic() - self.progress > self.patience:
                continue  # the main thread hangs
            send(socket, self.link.pack(Beat(), self.epoch))
        socket.close()

    def close(self) -> None:
        """Send the last words, and let go of all sockets."""
        self._ended.set()
        self.control.close()
        self.context.term()


def main(name: str) -> None:
    """Be what the supervisor says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor hears them, and says what follows
    settings = msgspec.json.decode(_read_line(), type=Settings)
    set_up_logging(settings.server)
    threading.Thread(target=_die_with_parent, args=(settings.folder,), name="octavo-lifeline", daemon=True).start()
    child = Child(settings)
    child.beat_in_thread()
    code = 1
    try:
        code = _role(settings.seat)(child)
    except (OctavoError, OSError) as error:
        child.failed(error)
        code = 2 if isinstance(error, InvalidInput) else 1
    except (ImportError, MemoryError) as error:
        child.failed(OctavoError(f"{settings.seat} has no memory, or a part of it is not there: {_last_line(error)}"))
    finally:
        child.close()
    sys.exit(code)


def _last_line(error: ImportError | MemoryError) -> str:
    """The libraries put their advice before their reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _worded(error: OctavoError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}"
    return str(error)


def _role(seat: str) -> Callable[[Child], int]:
    if seat == "engine":
        from octavo.serve.roles.engine import run_engine

        return run_engine
    if seat == "detokenizer":
        from octavo.serve.roles.detokenizer import run_detokenizer

        return run_detokenizer
    if seat.startswith("tokenizer"):
        from octavo.serve.roles.tokenizer import run_tokenizer

        return run_tokenizer
    from octavo.serve.roles.api import run_api

    return run_api


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        line += piece
        if not piece or len(line) > _MAX_LINE:
            sys.exit(ORPHANED)
    return line


def _die_with_parent(folder: str) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)
