"""The files of a disk tier: one folder that is ours alone, a page file read and written at offsets, an index replaced
whole. Prompts can be read out of keys and values, so nobody but the owner may look."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from octavo.core.errors import InvalidInput
from octavo.engine.disk_index import MAX_INDEX

__all__ = ["DiskFiles", "is_full"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """True if there was no room to write."""
    return error.errno in _FULL


class DiskFiles:
    """Raises `InvalidInput` for a folder that cannot be used, that others may read, or that another process uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not hasattr(os, "pread"):
            raise InvalidInput("disk_kv", str(folder), "this system cannot read at offsets: leave it empty")
        self._open: list[int] = []
        try:
            _make_private(folder)
            self._hold_lock()
            self._pages = self._descriptor("octavo-kv.pages", os.O_RDWR)
        except OSError as error:
            self.close()
            raise InvalidInput("disk_kv", str(folder), f"cannot be used: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _descriptor(self, name: str, flags: int) -> int:
        found = os.open(self.folder / name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._open.append(found)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise InvalidInput("disk_kv", name, "is no plain file: choose another folder")
        os.fchmod(found, 0o600)
        return found

    def _hold_lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._descriptor("octavo-kv.lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput("disk_kv", str(self.folder), "another process uses it: choose another folder") from error

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the page file; fewer at its end."""
        data = os.pread(self._pages, size, offset)
        while 0 < len(data) < size:
            more = os.pread(self._pages, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, offset: int, data: bytes) -> None:
        """All of the bytes into the page file. Raises `OSError`."""
        _write_all(data, lambda rest, done: os.pwrite(self._pages, rest, offset + done))

    def size(self) -> int:
        """Bytes of the page file."""
        return os.fstat(self._pages).st_size

    def cut(self, size: int) -> None:
        """Let go of what the page file has beyond `size` bytes."""
        if self.size() > size:
            os.ftruncate(self._pages, size)

    def read_index(self) -> bytes | None:
        """All of the index, cut off where it is larger than any index may be; None if there is none."""
        try:
            found = os.open(self.folder / "octavo-kv.index", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(found, "rb") as file:
            return file.read(MAX_INDEX)

    def write_index(self, data: bytes) -> None:
        """Replace the index: after a crash there is the old one or this one. Raises `OSError`."""
        beside = self.folder / "octavo-kv.index.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600)
        try:
            _write_all(data, lambda rest, done: os.write(descriptor, rest))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, self.folder / "octavo-kv.index")
        where = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(where)
        finally:
            os.close(where)

    def close(self) -> None:
        """Let the folder go. Idempotent."""
        while self._open:
            os.close(self._open.pop())


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidInput("disk_kv", str(folder), "others may look into it: give a folder of your own, mode 0700")


def _write_all(data: bytes, write: Callable[[memoryview, int], int]) -> None:
    """Write until all is written; a disk that takes nothing is full."""
    done = 0
    while done < len(data):
        taken = write(memoryview(data)[done:], done)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += taken
