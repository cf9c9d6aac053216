"""A multipart body (RFC 7578), taken apart as it comes: small fields are kept, one file goes where its bytes are put.

\\r\\n--boundary \\r\\n headers \\r\\n\\r\\n content \\r\\n--boundary \\r\\n ... \\r\\n--boundary--
"""

from __future__ import annotations

import re
from collections.abc import Callable

from octavo.serve.errors import ApiError, invalid

__all__ = ["Form", "boundary_of"]

_MAX_HEAD = 4096  # bytes of the headers of a part
_MAX_FIELD = 1024  # bytes of a value
_MAX_PARTS = 16
_BOUNDARY = re.compile(
    r'multipart/form-data\s*;(?:.*;)?\s*boundary="?([0-9A-Za-z\'()+_,./:=?\- ]{1,70})"?', re.IGNORECASE
)
_NAME = re.compile(rb'form-data\s*;(?:.*;)?\s*name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILE_NAME = re.compile(rb';\s*filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    """What stands between the parts. Raises ``ApiError`` 415."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise ApiError(415, "Send a form: 'Content-Type: multipart/form-data', with purpose and file.")
    return found[1].rstrip(" ").encode()


class Form:
    """Feed it the body's pieces, then `finish`. ``put`` gets the bytes of the file, in order.

    Raises ``ApiError`` 400 for what is no form, and for parts that are too many or too large.
    """

    def __init__(self, boundary: bytes, put: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None  # of the file, once it has begun
        self._mark = b"\r\n--" + boundary
        self._put = put
        self._left = bytearray(b"\r\n")  # so that the first mark looks like the others
        self._state = self._skip
        self._name = ""
        self._value = bytearray()
        self._parts = 0

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        self._left += data
        while self._state():
            pass

    def finish(self) -> None:
        """The body is over."""
        if self._state != self._rest:
            raise _broken("ends before its last boundary")

    def _skip(self) -> bool:
        """Before the first part."""
        return self._until_mark(lambda piece: None, self._mark_end)

    def _mark_end(self) -> bool:
        """Right behind a mark: two dashes, or the end of the line."""
        if len(self._left) < 2:
            return False
        behind = bytes(self._left[:2])
        if behind not in (b"--", b"\r\n"):
            raise _broken("has something behind a boundary")
        del self._left[:2]
        self._state = self._rest if behind == b"--" else self._head
        return True

    def _head(self) -> bool:
        """The headers of a part."""
        end = self._left.find(b"\r\n\r\n")
        if end < 0 or end > _MAX_HEAD:
            if len(self._left) > _MAX_HEAD:
                raise _broken("has a part with too long a head")
            return False
        head = bytes(self._left[:end])
        del self._left[: end + 4]
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")]
        found = _NAME.search(lines[0]) if len(lines) == 1 else None
        if found is None:
            raise _broken("has a part without a name")
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _broken(f"has more than {_MAX_PARTS} parts")
        self._name, self._value = _text(found[1]), bytearray()
        file_name = _FILE_NAME.search(lines[0])
        if (file_name is not None) != (self._name == "file"):
            raise invalid("file", "is the one part of the form that is a file, and has a file's name")
        if self._name in self.fields or (file_name is not None and self.file_name is not None):
            raise _broken("has two parts of the same name")
        if file_name is not None:
            self.file_name = _text(file_name[1])
        self._state = self._content if file_name is None else self._file

    def _content(self) -> bool:
        """The value of a field."""
        more = self._until_mark(self._add, self._mark_end)
        if self._state == self._mark_end:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        return more

    def _add(self, piece: bytes) -> None:
        self._value += piece
        if len(self._value) > _MAX_FIELD:
            raise _broken(f"has a value of more than {_MAX_FIELD} bytes")

    def _file(self) -> bool:
        """The bytes of the file."""
        return self._until_mark(self._put, self._mark_end)

    def _rest(self) -> bool:
        """Behind the last mark: of no meaning."""
        self._left.clear()
        return False

    def _until_mark(self, take: Callable[[bytes], None], then: Callable[[], bool]) -> bool:
        """Hand over what comes before the next mark; whether the mark is there."""
        end = self._left.find(self._mark)
        safe = end if end >= 0 else max(0, len(self._left) - len(self._mark) + 1)
        if safe:
            take(bytes(self._left[:safe]))
            del self._left[:safe]
        if end < 0:
            return False
        del self._left[: len(self._mark)]
        self._state = then
        return True


def _text(quoted: bytes) -> str:
    return re.sub(rb"\\(.)", rb"\1", quoted).replace(b"%22", b'"').decode("utf-8", "replace")


def _broken(what: str) -> ApiError:
    return ApiError(400, f"The form {what}.", code="invalid_form")
