"""Recordings as files: an engine's events written as they happen, and read back.

A file may hold several epochs: a process that finds a recording goes on with it, one epoch higher, after what it can
read of it. The prompts are in it, so nobody but its owner may read it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.core.errors import InvalidInput
from octavo.core.recording import MAGIC, FrameWriter, RecordingReader
from octavo.core.timeline import Timeline

__all__ = ["Epoch", "Recorder", "read_epochs", "read_recording"]

_FLUSH_AFTER = 0.5  # seconds of the events' clock: what a crash may lose

Epoch = list[dict[str, Any]]


class Recorder:
    """Writes every event of a timeline into a file, from a ``start`` with ``facts`` to `close`.

    Trouble with the file (a full disk) ends the recording and never the engine: ``problem`` then says what it was, and
    ``warn`` was told once. Raises ``InvalidInput`` for a file that is no recording or that another process writes.
    """

    def __init__(
        self, path: str | Path, timeline: Timeline, facts: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        self._warn = warn
        self._lock = threading.Lock()
        self._flushed = 0.0  # when, on the events' clock
        self._file = _open(self.path)
        self._frames = FrameWriter(self._file.write)
        known = {"version": __version__, "unix_time": time.time(), **facts}
        try:
            timeline.epoch = _go_on(self._file, self.path)
            self._frames.add("start", 0.0, {"process": timeline.process, "epoch": timeline.epoch, "facts": known})
            self._frames.flush()
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise InvalidInput("record", str(path), f"cannot be written: {error.strerror}") from error
            raise
        self._stop = timeline.listen(self._hear)

    @property
    def num_events(self) -> int:
        """Events taken so far, the start included."""
        return self._frames.num_events

    def _hear(self, kind: str, t: float, values: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._guarded(self._add, kind, t, values)

    def _add(self, kind: str, t: float, values: Mapping[str, Any]) -> None:
        self._frames.add(kind, t, values)
        if kind == "decision" and not 0.0 <= t - self._flushed < _FLUSH_AFTER:
            self._frames.flush()
            self._flushed = t

    def flush(self) -> None:
        """Write what has been gathered: when the engine has nothing else to do."""
        with self._lock:
            if not self._file.closed:
                self._guarded(self._frames.flush)

    def close(self) -> None:
        """Write the ``end``. Idempotent."""
        with self._lock:
            if not self._file.closed:
                self._guarded(self._end)
                self._file.close()
                self._stop()

    def _end(self) -> None:
        self._frames.add("end", 0.0, {})
        self._frames.flush()

    def _guarded(self, action: Callable[..., None], *values: Any) -> None:
        try:
            action(*values)
        except (OSError, InvalidInput, MemoryError) as error:
            self.problem = f"{self.path}: {error}"
            self._file.close()
            self._warn(f"the recording ends here, the engine goes on: {self.problem}")


def _open(path: Path) -> Any:
    """The file, unbuffered, held by this process alone. Raises ``InvalidInput``."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    except OSError as error:
        raise InvalidInput("record", str(path), f"cannot be written: {error.strerror}") from error
    file = os.fdopen(descriptor, "r+b", buffering=0)
    if not _lock(descriptor):
        file.close()
        raise InvalidInput("record", str(path), "another process records into it; choose another file")
    return file


def _lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _go_on(file: Any, path: Path) -> int:
    """Stand behind what can be read of the file, and the epoch to go on with; a damaged end is cut off."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size == 0:
        file.write(MAGIC)
        return 0
    try:
        reader = RecordingReader(file.read)
    except InvalidInput as error:
        raise InvalidInput(
            "record", str(path), "is there and is no recording of this version; choose another"
        ) from error
    last = -1
    for event in reader:
        last = event["epoch"]
    file.seek(reader.num_bytes)
    file.truncate()
    return last + 1


@contextmanager
def read_recording(path: str | Path) -> Iterator[RecordingReader]:
    """The events of a file. Raises ``InvalidInput`` for one that is not there or is no recording."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise InvalidInput("recording", str(path), f"cannot be read: {error.strerror}") from error
    with file:
        yield RecordingReader(file.read)


def read_epochs(path: str | Path) -> tuple[list[Epoch], str | None]:
    """The events of a file, epoch by epoch, each with its ``start`` first; and what is wrong with the end, if anything.

    Raises ``InvalidInput`` for a file that is not there, is no recording, or has nothing in it.
    """
    epochs: list[Epoch] = []
    with read_recording(path) as reader:
        for event in reader:
            if event["kind"] == "start":
                epochs.append([])
            epochs[-1].append(event)
    if not epochs:
        raise InvalidInput("recording", str(path), reader.damage or "holds no event")
    return epochs, reader.damage
