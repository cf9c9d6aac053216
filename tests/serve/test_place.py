"""Where processes meet over a network: only who has the key is heard."""

from __future__ import annotations

import zmq

from octavo.serve.roles.sockets import Place, private_place, write_key


def hears(listener: zmq.Socket[bytes], milliseconds: int) -> bytes | None:
    """The last frame of the next message; None if there is none for so long."""
    return listener.recv_multipart()[-1] if listener.poll(milliseconds) else None


def test_only_who_has_the_key_is_heard() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with private_place("127.0.0.1") as place, private_place() as elsewhere:
        assert (place.folder / "key").stat().st_mode & 0o777 == 0o600
        write_key(elsewhere.folder)
        listener, address = place.bound(context, "engine-1")
        assert address.startswith("tcp://127.0.0.1:") and [path.name for path in place.folder.iterdir()] == ["key"]
        stranger = Place(elsewhere.folder, "127.0.0.1").connected(context, address, 3)
        plain = context.socket(zmq.DEALER)
        plain.connect(address)
        friend = place.connected(context, address, 2)
        for socket, word in ((stranger, b"stranger"), (plain, b"plain"), (friend, b"friend")):
            socket.send_multipart([word], zmq.NOBLOCK)
        assert hears(listener, 10_000) == b"friend"
        assert hears(listener, 300) is None
    context.destroy(linger=0)
