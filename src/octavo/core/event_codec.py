"""Events as bytes and back, field by field as `event_table` says.

    event    code * 2 + (same t as the event before) | t, unless it is the same: float64 | the fields, in order
    count    7 bits a byte, lowest first, the top bit set on all but the last
    number   a count: 2n for n >= 0, -2n - 1 below
    text     count of bytes | UTF-8              json: the text of the value
    name     0 | text, and it takes the next of 4096 places; or the number of its place from 1 on
    ids      count of values | if any: bytes of each (1, 2, 4, 8) | values, little-endian
    tokens   0 | ids; or 1 | ids with 0 for None and the others one higher; or 2 | json, where one is negative
    branches 1, the same as the last ones; or 0 | count | name each | ids, the choices
    rows     count | of each: name, choice, tokens (counts), reason (text)
    optional 0, missing; or 1 | the value

A ``start`` forgets names, branches and t: what follows can be read without what came before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.event_table import BY_CODE, BY_NAME, KINDS

__all__ = ["Damaged", "EventReader", "EventWriter"]

_PLACES = 4096  # of names
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_TIME = struct.Struct("<d")
_Values = Mapping[str, Any]


class Damaged(Exception):
    """The bytes are no events."""


class EventWriter:
    """Turns events into bytes, in order: each may lean on those before it."""

    def __init__(self) -> None:
        kinds = {kind.name: [(f.name, getattr(self, f"_{f.type}"), f.optional) for f in kind.fields] for kind in KINDS}
        self._fields: dict[str, list[tuple[str, Callable[[Any], bytes], bool]]] = kinds
        self._forget()

    def _forget(self) -> None:
        self._places: dict[str, int] = {}
        self._order: list[str] = []  # name of each place
        self._next = 0
        self._requests: Sequence[str] = ()
        self._choices: Sequence[int] = ()
        self._t: float | None = None

    def encode(self, kind: str, t: float, values: _Values) -> bytes:
        """One event. Raises ``InvalidInput`` for a kind or a field that is not in the table, or a value out of it."""
        if kind not in self._fields:
            raise InvalidInput("kind", kind, "add it to the table of events first")
        if kind == "start":
            self._forget()
        same = t == self._t
        parts = [_count(BY_NAME[kind].code * 2 + same), b"" if same else _TIME.pack(t)]
        left = len(values)
        for name, encode, optional in self._fields[kind]:
            value = values.get(name)
            left -= name in values
            if optional:
                parts.append(b"\0" if value is None else b"\1" + encode(value))
            else:
                parts.append(self._given(kind, name, encode, value))
        if left:
            known = [name for name, _, _ in self._fields[kind]]
            raise InvalidInput(kind, [name for name in values if name not in known], "not in the table of events")
        self._t = t
        return b"".join(parts)

    def _given(self, kind: str, name: str, encode: Callable[[Any], bytes], value: Any) -> bytes:
        try:
            return encode(value)
        except (TypeError, ValueError, struct.error, AttributeError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"{kind}.{name}", value, f"{BY_NAME[kind].name} takes another type here") from error

    # ---- one method for each type of the table

    def _count(self, value: int) -> bytes:
        return _count(value)

    def _number(self, value: int) -> bytes:
        return _count(2 * value if value >= 0 else -2 * value - 1)

    def _seconds(self, value: float) -> bytes:
        return _TIME.pack(value)

    def _text(self, value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return _count(len(data)) + data

    def _json(self, value: Any) -> bytes:
        return self._text(json.dumps(value, separators=(",", ":")))

    def _name(self, value: str) -> bytes:
        place = self._places.get(value)
        if place is not None:
            return _count(place + 1)
        data = b"\0" + self._text(value)
        if len(self._order) < _PLACES:
            self._order.append(value)
        else:
            del self._places[self._order[self._next]]
            self._order[self._next] = value
        self._places[value] = self._next
        self._next = (self._next + 1) % _PLACES
        return data

    def _ids(self, values: Sequence[int]) -> bytes:
        if not values:
            return b"\0"
        most = max(values)
        width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
        return _count(len(values)) + bytes((width,)) + struct.pack(f"<{len(values)}{_WIDTHS[width]}", *values)

    def _tokens(self, values: Sequence[int | None]) -> bytes:
        kind, ids = b"\0", values
        if None in values:
            kind, ids = b"\1", [0 if value is None else value + 1 for value in values]
        if ids and min(ids) < 0:  # type: ignore[type-var,operator]
            return b"\2" + self._json(list(values))
        return kind + self._ids(ids)  # type: ignore[arg-type]

    def _branches(self, value: Any) -> bytes:
        if isinstance(value, tuple):
            requests, choices = value
        else:
            requests, choices = [request for request, _ in value], [choice for _, choice in value]
        if requests == self._requests and choices == self._choices:
            return b"\1"
        self._requests, self._choices = requests, choices
        return b"\0" + _count(len(requests)) + b"".join(map(self._name, requests)) + self._ids(choices)

    def _rows(self, values: Sequence[Sequence[Any]]) -> bytes:
        parts = [_count(len(values))]
        for request, choice, tokens, reason in values:
            parts += [self._name(request), _count(choice), _count(tokens), self._text(reason)]
        return b"".join(parts)


def _count(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes((value,))
    if not 0 <= value < 1 << 64:
        raise InvalidInput("count", value, "give a whole number from 0, of 64 bits")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class EventReader:
    """The inverse: takes the bytes of whole events, in the order in which they were written."""

    def __init__(self) -> None:
        self._data, self._at = b"", 0
        self._forget()

    def _forget(self) -> None:
        self._names: list[str] = []
        self._next = 0
        self._last: list[list[Any]] = []
        self._t: float | None = None

    def decode(self, data: bytes) -> Iterator[tuple[str, float, dict[str, Any]]]:
        """(kind, t, fields) of each event in ``data``. Raises ``Damaged`` where it makes no sense."""
        self._data, self._at = data, 0
        while self._at < len(data):
            try:
                event = self._event()
            except (ValueError, RecursionError, struct.error) as error:
                raise Damaged(f"event at byte {self._at} of its frame: {error}") from error
            yield event

    def _event(self) -> tuple[str, float, dict[str, Any]]:
        code = self._count()
        kind = BY_CODE.get(code // 2)
        if kind is None:
            raise Damaged(f"kind {code // 2} is not known: another version wrote it, or it is damaged")
        if kind.name == "start":
            self._forget()
        t = self._t if code % 2 else self._seconds()
        if t is None:
            raise Damaged("an event leans on one that is not there")
        self._t = t
        values = {}
        for item in kind.fields:
            missing = item.optional and not self._flag()
            values[item.name] = None if missing else getattr(self, f"_{item.type}")()
        return kind.name, t, values

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise Damaged(f"{size} bytes wanted, {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def _flag(self) -> bool:
        [value] = self._take(1)
        if value > 1:
            raise Damaged(f"{value} where 0 or 1 must be")
        return bool(value)

    def _some(self, least: int) -> int:
        """A count of things of at least ``least`` bytes each: never more than the bytes there are."""
        count = self._count()
        if count * least > len(self._data) - self._at:
            raise Damaged(f"{count} things cannot be in the {len(self._data) - self._at} bytes that are left")
        return count

    def _count(self) -> int:
        value = shift = 0
        while True:
            [byte] = self._take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Damaged("a count of more than 64 bits")

    def _number(self) -> int:
        value = self._count()
        return -(value + 1) // 2 if value % 2 else value // 2

    def _seconds(self) -> float:
        [value] = _TIME.unpack(self._take(8))
        return float(value)

    def _text(self) -> str:
        return self._take(self._some(1)).decode("utf-8", "surrogatepass")

    def _json(self) -> Any:
        return json.loads(self._text())

    def _name(self) -> str:
        place = self._count()
        if place:
            if place > len(self._names):
                raise Damaged(f"name {place} of {len(self._names)}")
            return self._names[place - 1]
        name = self._text()
        if len(self._names) < _PLACES:
            self._names.append(name)
        else:
            self._names[self._next] = name
        self._next = (self._next + 1) % _PLACES
        return name

    def _ids(self) -> list[int]:
        count = self._some(1)
        if not count:
            return []
        [width] = self._take(1)
        if width not in _WIDTHS:
            raise Damaged(f"values of {width} bytes")
        return list(struct.unpack(f"<{count}{_WIDTHS[width]}", self._take(count * width)))

    def _tokens(self) -> list[int | None]:
        [kind] = self._take(1)
        if kind > 2:
            raise Damaged(f"{kind} where 0, 1 or 2 must be")
        if kind == 2:
            return list(self._json())
        ids = self._ids()
        return [value - 1 if value else None for value in ids] if kind else list(ids)

    def _branches(self) -> list[list[Any]]:
        if not self._flag():
            names = [self._name() for _ in range(self._some(1))]
            choices = self._ids()
            if len(choices) != len(names):
                raise Damaged(f"{len(choices)} choices for {len(names)} requests")
            self._last = [list(pair) for pair in zip(names, choices, strict=True)]
        return [list(pair) for pair in self._last]

    def _rows(self) -> list[list[Any]]:
        return [[self._name(), self._count(), self._count(), self._text()] for _ in range(self._some(4))]
