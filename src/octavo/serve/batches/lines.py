"""The requests of a batch: one JSON object a line, checked before any of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

__all__ = ["Line", "Lines", "body_of", "read_lines"]

_MAX_ERRORS = 50
_MAX_CUSTOM_ID = 512


class _Parsed(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


@dataclass(frozen=True)
class Line:
    """Where a request stands in its file, and its name."""

    custom_id: str
    start: int  # byte
    size: int


@dataclass
class Lines:
    """All requests of a file, and what is wrong with it: then none of them is run."""

    lines: list[Line]
    errors: list[dict[str, Any]]


class _Wrong(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def read_lines(path: Path, endpoint: str, max_lines: int, max_bytes: int) -> Lines:
    """Read and check a file. ``max_bytes``: of a line. Costs what the file's size costs: call it in a thread."""
    found, known = Lines([], []), set[str]()
    with path.open("rb") as file:
        for number, start, raw in _rows(file, max_bytes):
            try:
                if len(found.lines) >= max_lines:
                    raise _Wrong("too_many_requests", f"The file has more than {max_lines} requests.")
                parsed = _parsed(raw, endpoint, max_bytes)
                if parsed.custom_id in known:
                    raise _Wrong("duplicate_custom_id", "Another line has this custom_id.", "custom_id")
            except _Wrong as wrong:
                found.errors.append({"code": wrong.code, "message": str(wrong), "param": wrong.param, "line": number})
                if len(found.errors) >= _MAX_ERRORS or wrong.code == "too_many_requests":
                    break
                continue
            known.add(parsed.custom_id)
            found.lines.append(Line(parsed.custom_id, start, len(raw)))
    if not found.lines and not found.errors:
        message = "The file has no requests in it."
        found.errors.append({"code": "empty_file", "message": message, "param": "input_file_id", "line": None})
    return found


def _rows(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(number, first byte, bytes) of each line that is not empty; of one that is too long, only the beginning."""
    number = start = 0
    while raw := file.readline(max_bytes + 2):
        number += 1
        if raw.strip():
            yield number, start, raw
        while not raw.endswith(b"\n") and (more := file.readline(1 << 20)):
            raw = more  # the rest of one that is too long
        start = file.tell()


def _parsed(raw: bytes, endpoint: str, max_bytes: int) -> _Parsed:
    if len(raw.rstrip(b"\r\n")) > max_bytes:
        raise _Wrong("line_too_long", f"The line has more than {max_bytes} bytes.")
    try:
        parsed = msgspec.json.decode(raw, type=_Parsed)
    except msgspec.ValidationError as error:
        raise _Wrong("invalid_request", f"{error}: a line has custom_id, method, url and body.") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _Wrong("invalid_json_line", "The line is no JSON object in UTF-8.") from error
    if not 1 <= len(parsed.custom_id) <= _MAX_CUSTOM_ID:
        raise _Wrong("invalid_custom_id", f"It must have 1 to {_MAX_CUSTOM_ID} characters.", "custom_id")
    if parsed.method != "POST":
        raise _Wrong("invalid_method", "It must be POST.", "method")
    if parsed.url != endpoint:
        raise _Wrong("invalid_url", f"It must be the endpoint of the batch, {endpoint}.", "url")
    if not bytes(parsed.body).startswith(b"{"):
        raise _Wrong("invalid_request", "The body must be an object.", "body")
    return parsed


def body_of(path: Path, line: Line) -> bytes:
    """The body of a request, as it stands in the file."""
    with path.open("rb") as file:
        file.seek(line.start)
        return bytes(msgspec.json.decode(file.read(line.size), type=_Parsed).body)
