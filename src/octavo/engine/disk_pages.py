"""Pages on disk: the bytes behind the core's disk tier, in a folder that outlives the process.

    octavo-kv.lock     held by the one process that uses the folder
    octavo-kv.pages    slot by slot: the bytes of a page, a stamp of its own, the CRC-32 of both
    octavo-kv.index    which slot holds what (`disk_index`): written beside it, synced, renamed

A step hands pages over and goes on: a thread writes them, and a full queue or a full disk loses pages, which is told.
A step that needs a page waits for it, `wait_s` at most in all; what is not there by then is lost as well. A page counts
only with the stamp that the index (or this process) wrote there and a fitting checksum, so what a crash left half
written, or what an older index speaks of, is refused, never used.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from octavo.core.errors import CorruptPages, InvalidInput
from octavo.core.host_tier import HostTier, SavedColumn
from octavo.engine.disk_files import DiskFiles, is_full
from octavo.engine.disk_index import STAMP, Unusable, decode_index, encode_index

__all__ = ["TAIL_BYTES", "DiskPages", "buffered_pages"]

QUEUED_BYTES = 64 << 20  # of pages that wait to be written, and are in memory until then
_AHEAD = 4  # pages that are read ahead of the step that takes them
_TAIL = struct.Struct(f"<{STAMP}sI")
TAIL_BYTES = _TAIL.size
_CLOSE_WAIT = 10.0  # seconds
_PAUSE = 5.0  # seconds without writes after one that failed
_WORDS = {
    "truncated": "its index is cut off",
    "foreign": "its index is none of ours",
    "version": "its index is of another version",
    "corrupt": "its index is damaged",
    "layout": "its pages are of another model, format or page size",
    "unreadable": "its index cannot be read",
}


class DiskPages:
    """`num_pages` slots of `page_bytes` in `folder`. `found` are the columns that an earlier process left there.

    `layout` is what must be equal for bytes to be equal. `failures` counts pages that did not come back and
    `write_failures` those not written, by reason. Raises `InvalidInput` for a folder that cannot be used, is open to
    others, or is in use.
    """

    def __init__(
        self, folder: str, num_pages: int, page_bytes: int, layout: bytes, *, wait_s: float, say: Callable[[str], None]
    ) -> None:
        self.folder, self.num_pages, self.page_bytes, self.wait_s = folder, num_pages, page_bytes, wait_s
        self._layout, self._say = layout, say
        self.queued_pages = _queued_pages(page_bytes)
        self.failures: dict[str, int] = {}
        self.write_failures: dict[str, int] = {}
        self.refused: str | None = None  # why what was there is of no use
        self.pages_written = self.pages_read = 0
        self.is_ahead_of_index = False  # pages were handed over, or forgotten, since the last `save`
        self._lock = threading.Lock()
        self._stamps: dict[int, bytes] = {}  # of slots that are whole
        self._pending: dict[int, bytes] = {}  # pages on their way
        self._lost: list[int] = []
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._resume_at = 0.0  # no writes before
        self._reader: threading.Thread | None = None  # that somebody waits for, or gave up on
        self._files = DiskFiles(Path(folder))
        self.found = self._load()
        self._writer = threading.Thread(target=self._write_all, name="octavo-disk", daemon=True)
        self._writer.start()

    # ---- from step to disk

    def write(self, page: int, data: memoryview) -> None:
        """Take a copy and write it later; a page that cannot be taken is lost."""
        self.is_ahead_of_index = True
        with self._lock:
            self._stamps.pop(page, None)
            self._pending.pop(page, None)
            if time.monotonic() < self._resume_at:
                self._lose(page, "paused")
            elif len(self._pending) >= self.queued_pages:
                self._lose(page, "queue")
            else:
                copy = self._pending[page] = bytes(data)
                self._todo.put(partial(self._write, page, copy))

    def lose(self, page: int, reason: str) -> None:
        """The page was not worth writing."""
        with self._lock:
            self._stamps.pop(page, None)
            self._lose(page, reason)

    def take_lost(self) -> list[int]:
        """Pages that hold nothing after all, each once."""
        if not self._lost:
            return []
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def save(self, columns: Sequence[SavedColumn]) -> None:
        """Write the index, after all pages that were handed over before."""
        self.is_ahead_of_index = False
        self._todo.put(partial(self._write_index, columns))

    def close(self, columns: Sequence[SavedColumn]) -> None:
        """Write what is left and the index, and let the folder go. Idempotent. A disk that hangs is not waited for."""
        if self._writer.is_alive():
            self.save(columns)
            self._todo.put(None)
            self._writer.join(timeout=_CLOSE_WAIT)
        if not self._writer.is_alive():
            self._files.close()

    def _lose(self, page: int, reason: str) -> None:
        self._pending.pop(page, None)
        self._lost.append(page)
        _count(self.write_failures, reason)

    def _write_all(self) -> None:
        while (task := self._todo.get()) is not None:
            task()

    def _write(self, page: int, data: bytes) -> None:
        if self._pending.get(page) is not data:
            return  # other bytes are to go there by now
        stamp = os.urandom(STAMP)
        tail = _TAIL.pack(stamp, zlib.crc32(stamp, zlib.crc32(data)))
        try:
            self._files.write(page * self._slot_bytes, data + tail)
        except OSError as error:
            with self._lock:
                if self._pending.get(page) is data:
                    self._lose(page, "full" if is_full(error) else "write")
            self._failed(error)
            return
        with self._lock:
            if self._pending.get(page) is data:
                del self._pending[page]
                self._stamps[page] = stamp
                self.pages_written += 1

    def _write_index(self, columns: Sequence[SavedColumn]) -> None:
        with self._lock:
            stamps = dict(self._stamps)
        try:
            self._files.write_index(encode_index(self._layout, columns, stamps))
        except OSError as error:
            _count(self.write_failures, "index")
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        said, self._resume_at = self._resume_at, time.monotonic() + _PAUSE
        if not said:
            self._say(f"disk tier {self.folder}: {error.strerror or error}; pages are lost, the engine goes on")

    # ---- from disk to step

    def read(self, pages: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The bytes of each page, in order. Raises `CorruptPages` that names all that are not there, or not in time."""
        bad: list[int] = []
        found = self._fetch(pages)
        for page in pages:
            data = next(found)
            if isinstance(data, bytes):
                self.pages_read += 1
                yield page, data
            else:
                bad.append(page)
                _count(self.failures, data)
        if bad:
            raise CorruptPages(bad, f"pages {bad[:8]} of the disk tier do not come back: {self.failures}")

    def _fetch(self, pages: Sequence[int]) -> Iterator[bytes | str]:
        """For each page its bytes, or what is wrong with it. A thread reads; what takes too long is given up."""
        if self._reader is not None and self._reader.is_alive():
            yield from ["slow"] * len(pages)
            return
        read: queue.Queue[bytes | str] = queue.Queue(_AHEAD)
        given_up = threading.Event()
        self._reader = threading.Thread(
            target=self._read_all, args=(pages, read, given_up), name="octavo-disk-read", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError:  # the system has no more threads to give
            self._reader = None
            yield from ["slow"] * len(pages)
            return
        until = time.monotonic() + self.wait_s
        for index in range(len(pages)):
            try:
                yield read.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                given_up.set()
                yield from ["slow"] * (len(pages) - index)
                return
        self._reader.join()

    def _read_all(self, pages: Sequence[int], read: queue.Queue[bytes | str], given_up: threading.Event) -> None:
        for page in pages:
            data = self._read(page)
            while not given_up.is_set():
                try:
                    read.put(data, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if given_up.is_set():
                return

    def _read(self, page: int) -> bytes | str:
        with self._lock:
            data, stamp = self._pending.get(page), self._stamps.get(page)
        if data is not None:
            return data
        if stamp is None:
            return "missing"
        try:
            slot = self._files.read(page * self._slot_bytes, self._slot_bytes)
        except OSError:
            return "unreadable"
        if len(slot) < self._slot_bytes:
            return "truncated"
        there, check = _TAIL.unpack(slot[self.page_bytes :])
        if there != stamp:
            return "stale"
        return slot[: self.page_bytes] if zlib.crc32(slot[:-4]) == check else "corrupt"

    @property
    def _slot_bytes(self) -> int:
        return self.page_bytes + TAIL_BYTES

    # ---- what was there before

    def _load(self) -> list[SavedColumn]:
        try:
            data = self._files.read_index()
            if data is None:
                self._files.cut(0)
                return []
            columns, self._stamps = decode_index(data, self._layout, self.num_pages)
            HostTier(1, 1, disk_pages=self.num_pages).adopt(columns)  # whether they fit together
        except (Unusable, InvalidInput, OSError) as error:
            reasons = {Unusable: str(error), InvalidInput: "corrupt"}
            reason, self._stamps = reasons.get(type(error), "unreadable"), {}
            self.refused = reason
            self._say(f"disk tier {self.folder}: {_WORDS[reason]}; it starts empty")
            self._files.cut(0)
            return []
        self._files.cut(self.num_pages * self._slot_bytes)
        whole = self._files.size() // self._slot_bytes
        gone = [page for page in self._stamps if page >= whole]
        for page in gone:
            del self._stamps[page]
            _count(self.failures, "truncated")
        if gone:
            self._say(f"disk tier {self.folder}: its page file is cut off; {len(gone)} pages are not there")
        return [c if all(page in self._stamps for page in c.pages) else c._replace(pages=()) for c in columns]


def buffered_pages(page_bytes: int) -> int:
    """Pages that are in memory at most on their way to disk and back."""
    return _queued_pages(page_bytes) + _AHEAD + 2


def _queued_pages(page_bytes: int) -> int:
    return max(1, QUEUED_BYTES // page_bytes)


def _count(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1
