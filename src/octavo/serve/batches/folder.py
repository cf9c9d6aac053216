"""One folder that is ours alone, and the ways in which it is written: a crash leaves the old state or the new one."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from octavo.core.errors import InvalidInput
from octavo.serve.errors import ApiError

__all__ = ["Folder", "told_of_disk"]

_FIELD = "batch_dir"
_PARTS = ("files", "batches")
_Record = TypeVar("_Record")
_log = logging.getLogger(__name__)


@contextmanager
def told_of_disk() -> Iterator[None]:
    """What the disk refuses, as a client is told of it. Raises ``ApiError`` 503."""
    try:
        yield
    except OSError as error:
        _log.error("the folder of batches: %s", error.strerror)
        message = (
            "The disk of files and batches takes nothing now: send it again when the operator has made room there."
        )
        raise ApiError(503, message, code="disk_failed", headers={"Retry-After": "60"}) from error


class Folder:
    """Holds a folder while it is open. Raises ``InvalidInput`` if it cannot be used, or another server uses it.

    Names are made here, never by clients: ``files/file-0123.data``.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = -1
        try:
            for place in (self.path, *(self.path / part for part in _PARTS)):
                _make_private(place)
            self._hold()
        except OSError as error:
            raise InvalidInput(_FIELD, path, f"cannot be used: {error.strerror}") from error

    def _hold(self) -> None:
        import fcntl

        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise InvalidInput(_FIELD, str(self.path), "another server uses it: choose another folder") from error

    def records(self, part: str) -> list[str]:
        """Names of the records in a part of the folder, in order."""
        return sorted(entry.stem for entry in (self.path / part).iterdir() if entry.suffix == ".json")

    def decoded(self, part: str, kind: type[_Record]) -> dict[str, _Record]:
        """The records in a part of the folder, by name; those that another version wrote may be none of ours."""
        found = {}
        for name in self.records(part):
            try:
                found[name] = msgspec.json.decode(self.read(f"{part}/{name}.json"), type=kind)
            except msgspec.MsgspecError:
                _log.warning("%s/%s.json is left alone: it is no record that this version knows", part, name)
        return found

    def read(self, name: str) -> bytes:
        """All of a small file."""
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file whole. Raises ``OSError``."""
        beside = f"{name}.new"
        with self.create(beside) as file:
            file.write(data)
        self.move(beside, name)

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file; what it holds is safe when the block ends."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return _synced(os.open(self.path / name, flags, 0o600), "wb")

    def append(self, name: str, data: bytes) -> None:
        """Add to a file; it is there when this returns. Raises ``OSError``, and then the file is as it was."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with _synced(os.open(self.path / name, flags, 0o600), "ab") as file:
            before = os.fstat(file.fileno()).st_size
            try:
                file.write(data)
                file.flush()
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise

    def move(self, name: str, to: str) -> None:
        """Rename a file, replacing what is there."""
        os.replace(self.path / name, self.path / to)
        self._sync(to)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)
        self._sync(name)

    def cut(self, name: str, size: int) -> None:
        """Keep the first ``size`` bytes of a file."""
        os.truncate(self.path / name, size)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def _sync(self, name: str) -> None:
        """What a directory says of a name is safe, too."""
        where = os.open((self.path / name).parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(where)
        finally:
            os.close(where)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def _synced(descriptor: int, mode: str) -> Iterator[IO[bytes]]:
    """A file whose bytes are on disk when the block ends."""
    with os.fdopen(descriptor, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidInput(_FIELD, str(folder), "others may look into it: give a folder of your own, mode 0700")
