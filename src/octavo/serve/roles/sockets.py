"""ZeroMQ over Unix sockets in a folder that only its owner can enter; over a network, with keys, only if asked."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from octavo.core.errors import InvalidInput
from octavo.serve.links.messages import MAX_BYTES

__all__ = ["CONTROL", "LoopSocket", "Place", "epoch_of", "identity_of", "is_main_voice", "private_place", "receive"]
__all__ += ["send", "write_key"]

CONTROL = "control"  # the supervisor's socket
_KEY = "key"  # file of the public and the secret key
_LONGEST_PATH = 100  # bytes; the system takes 107
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as enumerations they cost twice as much
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_LINGER_MS = 500  # for the last words of a process


@dataclass(frozen=True)
class Place:
    """Where the processes of one server meet: a folder of theirs, and perhaps a network address.

    On a network all links are encrypted (CURVE) with one pair of keys, both of them known in the folder alone: who has
    not read them there can neither greet a socket of ours nor be taken for one.
    """

    folder: Path
    address: str = ""  # of this machine, for TCP; empty: Unix sockets in the folder

    def bound(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER that listens, and where. A message to somebody who has left raises ``zmq.ZMQError``."""
        socket = _prepared(context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if not self.address:
            socket.bind(f"ipc://{self.folder / name}")
            return socket, name
        socket.curve_publickey, socket.curve_secretkey = self._key()
        socket.curve_server = True
        port = socket.bind_to_random_port(f"tcp://{_bracketed(self.address)}")
        return socket, f"tcp://{_bracketed(self.address)}:{port}"

    def connected(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, epoch: int, voice: bytes = b"E"
    ) -> zmq.Socket[bytes]:
        """A DEALER that speaks for one life of a process; `voice` tells several sockets of it apart."""
        socket = _prepared(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.IDENTITY, identity_of(epoch, voice))
        if self.address:
            socket.curve_publickey, socket.curve_secretkey = self._key()
            socket.curve_serverkey = self._key()[0]
            socket.connect(address)
        else:
            socket.connect(f"ipc://{self.folder / address}")
        return socket

    def _key(self) -> tuple[bytes, bytes]:
        public, secret = (self.folder / _KEY).read_bytes().split()
        return public, secret


@contextmanager
def private_place(address: str = "") -> Iterator[Place]:
    """A new folder (mode 0700) while the block runs. Raises ``InvalidInput`` if its path is too long for a socket."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(tempfile.mkdtemp(prefix="octavo-", dir=parent if os.path.isdir(parent) else None))
    try:
        if len(os.fsencode(folder)) + len("/detokenizer-") + 20 > _LONGEST_PATH:
            raise InvalidInput("TMPDIR", str(folder.parent), "is too long a path for a socket; name a shorter one")
        if address:
            write_key(folder)
        yield Place(folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_key(folder: Path) -> None:
    """A new key for the processes that meet there."""
    with open(os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(b"\n".join(zmq.curve_keypair()))


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _prepared(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES + 1024)  # a longer one ends the connection before it is read
    for side in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(side, 0)  # nobody waits; who does not read falls silent, and is ended for that
    return socket


def identity_of(epoch: int, voice: bytes = b"E") -> bytes:
    """How a ROUTER knows a process."""
    return voice + epoch.to_bytes(8, "big")


def epoch_of(identity: bytes) -> int:
    """Whose identity it is."""
    return int.from_bytes(identity[1:9], "big")


def is_main_voice(identity: bytes) -> bool:
    """Whether an answer would be heard: by the thread that decides, not by the one that only gives signs of life."""
    return identity[:1] == b"E"


def receive(socket: zmq.Socket[bytes]) -> Sequence[bytes] | None:
    """The frames of the next message; None if there is none now."""
    if not _has_message(socket):  # an exception costs three times as much, and every step ends with one
        return None
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:  # which a frame knows; pyzmq's own loop asks the socket, at twice the cost
            frame = socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes)
    except zmq.Again:
        return None
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message, without waiting. Raises ``zmq.ZMQError`` where its reader has left."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    socket.send(frames[-1], _NOBLOCK)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


class LoopSocket:
    """A socket whose messages arrive as calls in the running event loop."""

    def __init__(self, socket: zmq.Socket[bytes], heard: Callable[[Sequence[bytes]], None]) -> None:
        self._socket, self._heard = socket, heard
        self._loop = asyncio.get_running_loop()
        self._file = socket.fileno()
        self._open = True
        self._loop.add_reader(self._file, self._read)
        self._loop.call_soon(self._read)  # what is there already rings no bell

    def send(self, frames: Sequence[bytes]) -> None:
        """Send, without waiting."""
        send(self._socket, frames)
        if _has_message(self._socket):  # sending may have taken the bell away
            self._loop.call_soon(self._read)

    def detach(self) -> None:
        """Hear no more; the socket stays open."""
        self._loop.remove_reader(self._file)
        self._open = False

    def close(self) -> None:
        """Hear no more, and close the socket at once. Idempotent."""
        if self._open:
            self.detach()
            self._socket.close(linger=0)

    def _read(self) -> None:
        while self._open and (frames := receive(self._socket)) is not None:
            self._heard(frames)
