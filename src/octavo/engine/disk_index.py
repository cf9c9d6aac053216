"""The index of a disk tier as bytes: which slots of the page file hold which columns.

    magic, with the version | layout | namespaces | columns, parents first | digest of all that (BLAKE2b)

A column: number, parent, time of last use, namespace, its units, its slots, each with the stamp that lies behind the
page in the page file. Whatever does not add up makes the whole index worthless: it is a cache, and starts empty.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from octavo.core.host_tier import SavedColumn

__all__ = ["MAX_INDEX", "STAMP", "Unusable", "decode_index", "encode_index"]

VERSION = 1
_WORD = b"octavo disk kv "
_MAGIC = _WORD + b"%d\n" % VERSION
STAMP = 8  # bytes
MAX_INDEX = 256 << 20
_DIGEST = 16
_HEAD = struct.Struct("<III")  # bytes of the layout, namespaces, columns
_COLUMN = struct.Struct("<QQQIHH")  # number, parent, stamp of use, namespace, units, slots
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1

Stamps = Mapping[int, bytes]


class Unusable(Exception):
    """An index that says nothing; the message is one of: truncated, foreign, version, corrupt, layout."""


def encode_index(layout: bytes, columns: Sequence[SavedColumn], stamps: Stamps) -> bytes:
    """The index of those columns whose slots have a stamp, that is, were written. Others stay as ways."""
    namespaces: dict[str, int] = {}
    parts: list[bytes] = []
    kept: dict[int, None] = {0: None}
    for column in columns:
        if column.parent not in kept or not all(_LEAST <= unit <= _MOST for unit in column.units):
            continue
        kept[column.number] = None
        place = namespaces.setdefault(column.namespace, len(namespaces))
        slots = column.pages if all(page in stamps for page in column.pages) else ()
        head = column.number, column.parent, column.stamp, place, len(column.units), len(slots)
        parts += [_COLUMN.pack(*head), struct.pack(f"<{len(column.units)}q", *column.units)]
        parts += [struct.pack("<I", slot) + stamps[slot] for slot in slots]
    names = [name.encode("utf-8", "surrogatepass") for name in namespaces]
    names = [struct.pack("<H", len(name)) + name for name in names]
    body = b"".join([_MAGIC, _HEAD.pack(len(layout), len(names), len(kept) - 1), layout, *names, *parts])
    return body + blake2b(body, digest_size=_DIGEST).digest()


def decode_index(data: bytes, layout: bytes, num_slots: int) -> tuple[list[SavedColumn], dict[int, bytes]]:
    """The columns and the stamps of their slots; slots from `num_slots` on are left out. Raises `Unusable`."""
    if not data.startswith(_MAGIC):
        short = len(data) < len(_MAGIC) and _MAGIC.startswith(data)
        raise Unusable("truncated" if short else "version" if data.startswith(_WORD) else "foreign")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise Unusable("corrupt")
    try:
        return _decode(_Cursor(body, len(_MAGIC)), layout, num_slots)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise Unusable("corrupt") from error


def _decode(cursor: _Cursor, layout: bytes, num_slots: int) -> tuple[list[SavedColumn], dict[int, bytes]]:
    layout_bytes, num_names, num_columns = cursor.unpack(_HEAD)
    if cursor.take(layout_bytes) != layout:
        raise Unusable("layout")
    names = [cursor.take(cursor.unpack(_SHORT)[0]).decode("utf-8", "surrogatepass") for _ in range(num_names)]
    columns: list[SavedColumn] = []
    stamps: dict[int, bytes] = {}
    for _ in range(num_columns):
        number, parent, used, place, num_units, num_pages = cursor.unpack(_COLUMN)
        units = struct.unpack(f"<{num_units}q", cursor.take(8 * num_units))
        slots = {cursor.unpack(_SLOT)[0]: cursor.take(STAMP) for _ in range(num_pages)}
        fits = all(slot < num_slots and slot not in stamps for slot in slots)
        stamps.update(slots if fits else {})
        columns.append(SavedColumn(number, parent, used, names[place], units, tuple(slots) if fits else ()))
    return columns, stamps


_SHORT, _SLOT = struct.Struct("<H"), struct.Struct("<I")


class _Cursor:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, count: int) -> bytes:
        """The next bytes. Raises `IndexError` where there are not so many."""
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise IndexError(count)
        self._at += count
        return found

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))
