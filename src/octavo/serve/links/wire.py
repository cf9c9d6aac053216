"""Messages as frames of bytes, with the version of their schemas and the lives that they go between.

frames of one message    header (schema version, sender's epoch, receiver's epoch) | body (MessagePack)
of one that is relayed   header of who relays it | header | body, as they came
of a step with its text  header | body, as they came | `Texts`
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import msgspec

from octavo.core.errors import OctavoError

__all__ = ["MAX_BYTES", "VERSION", "Link", "ProtocolError", "ends_of", "relayed"]

VERSION = 3
MAX_BYTES = 64 << 20  # of one message

_HEADER = struct.Struct("<4sHxxQQ")
_MAGIC = b"octv"
_Out = TypeVar("_Out")
_In = TypeVar("_In")


class ProtocolError(OctavoError):
    """A message that this schema does not know: too large, malformed, or of another version."""


class Link(Generic[_Out, _In]):
    """One kind of link, seen from one end: which messages go out and which may come in."""

    def __init__(self, kinds: object) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def pack(self, message: _Out, sender: int, receiver: int = 0) -> list[bytes]:
        """The frames of a message; receiver 0: whoever gets it. Raises ``ProtocolError`` for one that is too large."""
        return [_header(sender, receiver), self.pack_body(message)]

    def pack_body(self, message: _Out) -> bytes:
        """A message without its header."""
        body = self._encode(message)
        if len(body) > MAX_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes; at most {MAX_BYTES} may be sent")
        return body

    def unpack(self, frames: Sequence[bytes], own: int) -> tuple[int, _In] | None:
        """Sender's epoch and message; None for one to another life. Raises ``ProtocolError`` for what is no message."""
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames of {sum(map(len, frames))} bytes are no message")
        sender, receiver = ends_of(frames[0])
        return (sender, self.unpack_body(frames[1])) if receiver in (0, own) else None

    def unpack_body(self, body: bytes) -> _In:
        """A message without its header. Raises ``ProtocolError``."""
        if len(body) > MAX_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes; at most {MAX_BYTES} may be sent")
        try:
            return cast("_In", self._decode(body))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a message that does not fit its schema: {error}") from error
        except RecursionError as error:
            raise ProtocolError("a message that is nested too deep") from error


def ends_of(header: bytes) -> tuple[int, int]:
    """Epochs of a message's sender and receiver. Raises ``ProtocolError``."""
    if len(header) != _HEADER.size:
        raise ProtocolError(f"{len(header)} bytes are no header of a message")
    magic, version, sender, receiver = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError(f"a message of version {version}; this process speaks {VERSION}")
    return sender, receiver


def relayed(frames: Sequence[bytes], sender: int, receiver: int) -> list[bytes]:
    """A message as it came, for somebody who has to know of it."""
    return [_header(sender, receiver), *frames]


def _header(sender: int, receiver: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, sender, receiver)
