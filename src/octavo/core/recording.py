"""A recording: a file of events in checked frames. What a crash cuts off is lost; all before it can be read.

    file    b"octavo timeline 2\\n" | frame ...
    frame   bytes of data, bytes of events (uint32 each) | CRC-32 of both and of the data | data: events, deflated

A process that goes on with a file begins with a frame of its own ``start``. Nothing here opens a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.event_codec import Damaged, EventReader, EventWriter
from octavo.core.event_table import VERSION

__all__ = ["MAGIC", "FrameWriter", "RecordingReader"]

MAGIC = b"octavo timeline %d\n" % VERSION
MAX_FRAME = 256 << 20  # bytes of events, deflated or not
_FRAME = 1 << 16  # bytes of events after which a frame is closed
_LEVEL = 1  # of deflate: what it costs is a microsecond a step, and higher ones save a tenth
_HEAD = struct.Struct("<III")


class FrameWriter:
    """Gathers events into frames and hands these to ``write``: about 64 KiB of events each, or what `flush` finds."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._events = EventWriter()
        self._parts: list[bytes] = []
        self._size = 0
        self.num_events = 0

    def add(self, kind: str, t: float, values: Mapping[str, Any]) -> None:
        """One more event. Raises ``InvalidInput`` for one that is not in the table, and what ``write`` raises."""
        data = self._events.encode(kind, t, values)
        if len(data) > MAX_FRAME:
            raise InvalidInput(kind, f"{len(data)} bytes", f"an event may take {MAX_FRAME} bytes at most")
        if self._size + len(data) > MAX_FRAME:
            self.flush()
        self._parts.append(data)
        self._size += len(data)
        self.num_events += 1
        if self._size >= _FRAME:
            self.flush()

    def flush(self) -> None:
        """Write what is there, if anything is."""
        if self._parts:
            events, self._parts, self._size = b"".join(self._parts), [], 0
            data = zlib.compress(events, _LEVEL)
            self._write(_HEAD.pack(len(data), len(events), _check(len(data), len(events), data)) + data)


def _check(size: int, num_events: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<II", size, num_events)))


class RecordingReader:
    """The events of a recording, from ``read(size)`` (at most so many bytes; fewer only at the end).

    Iterating gives dicts like those of `Timeline`; ``n`` counts from each ``start``. It ends where the bytes make no
    sense any more: ``damage`` then says why, and ``num_bytes`` how far they did. Raises ``InvalidInput`` at once for
    what is no recording of this version.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.damage: str | None = None
        self.num_bytes = len(MAGIC)
        magic = read(len(MAGIC))
        if magic != MAGIC:
            word = b"octavo timeline "
            remedy = "written by another version" if magic.startswith(word) else "no recording: write one with --record"
            raise InvalidInput("recording", magic[:20], remedy)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        reader = EventReader()
        head: dict[str, Any] = {}
        number = 0
        try:
            for frame in self._frames():
                for kind, t, values in reader.decode(frame):
                    if kind == "start":
                        head = {"v": VERSION, "process": values["process"], "epoch": values["epoch"]}
                        number = 0
                    elif not head:
                        raise Damaged("an event before the first start")
                    yield {**head, "n": number, "t": t, "kind": kind, **values}
                    number += 1
        except Damaged as error:
            self.damage = f"after {self.num_bytes} bytes: {error}"

    def _frames(self) -> Iterator[bytes]:
        while head := self._read(_HEAD.size):
            frame = self._frame(head)
            yield frame
            self.num_bytes += self._last_size

    def _frame(self, head: bytes) -> bytes:
        if len(head) < _HEAD.size:
            raise Damaged("the end is cut off")
        size, num_events, check = _HEAD.unpack(head)
        if max(size, num_events) > MAX_FRAME:
            raise Damaged(f"a frame of {size} bytes, of {num_events} bytes of events")
        data = self._read(size)
        if len(data) < size:
            raise Damaged("the end is cut off")
        if _check(size, num_events, data) != check:
            raise Damaged("a frame's bytes are not those that were written")
        self._last_size = _HEAD.size + size
        try:
            inflate = zlib.decompressobj()
            events = inflate.decompress(data, num_events + 1)
        except zlib.error as error:
            raise Damaged(f"a frame cannot be inflated: {error}") from error
        if len(events) != num_events or not inflate.eof:
            raise Damaged("a frame has another size than it says")
        return events
