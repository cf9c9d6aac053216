"""Connections: whose client does not read, closes its end, is gone without a word, or is one too many."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.serve.config import ServeConfig
from octavo.serve.connection import BoundedConnection
from octavo.serve.dialects import NOTHING
from octavo.serve.interrupt import LINE

SIZE = 16 << 20  # more than the buffers of two sockets hold
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LOOPS = [asyncio.run]
with suppress(ImportError):
    import uvloop

    LOOPS.append(uvloop.run)


async def large(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": b"x" * SIZE})


Open = tuple[asyncio.Server, ServerState, socket.socket]


async def serving(app: Any = large, request: bytes = ASK, **limits: Any) -> Open:
    """A server with one client that has asked and not read."""
    kind, state = BoundedConnection.with_limits(ServeConfig(**limits)), ServerState()
    config = uvicorn.Config(app, http=kind, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    client = await connect(server)
    await loop.sock_sendall(client, request)
    while not state.tasks and not state.total_requests:
        await asyncio.sleep(0.001)
    return server, state, client


async def connect(server: asyncio.Server) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, server.sockets[0].getsockname())
    return client


async def read_all(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    got = b""
    while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        got += piece
    return got


async def gone(state: ServerState) -> None:
    while state.connections or state.tasks:
        await asyncio.sleep(0.01)


def run(main: Any, runner: Any = asyncio.run) -> None:
    runner(asyncio.wait_for(main, 30))


def test_who_never_reads_is_cut() -> None:
    async def go() -> None:
        server, state, client = await serving(stall_timeout=0.05)
        while state.connections:
            await asyncio.sleep(0.01)
        client.close()
        server.close()

    run(go())


def test_who_reads_gets_everything() -> None:
    async def go() -> None:
        server, state, client = await serving(stall_timeout=20)
        got = b"" if state.connections else b"cut"
        while not got.endswith(b"x" * SIZE):
            got += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        assert state.connections
        client.close()
        server.close()

    run(go())


class Held:
    """An application whose answer ends when it is let, or its client has left; it is a stream if `begun`."""

    def __init__(self, begun: bool) -> None:
        self.begun, self.left, self.go_on = begun, False, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[NOTHING] = b":\n\n"
        head = {"type": "http.response.start", "status": 200, "headers": []}
        if self.begun:
            await send(head)
        while (await receive())["more_body"]:
            pass
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({leaving, asyncio.ensure_future(self.go_on.wait())}, return_when=asyncio.FIRST_COMPLETED)
        self.left = leaving.done()
        leaving.cancel()
        if not self.begun:
            await send(head)
        await send({"type": "http.response.body", "body": b"data: end\n\n"})


@pytest.mark.parametrize("runner", LOOPS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("asks", [1, 3])
def test_who_closes_an_end_and_still_reads_gets_everything(runner: Any, begun: bool, asks: int) -> None:
    async def go() -> None:
        app = Held(begun)
        server, state, client = await serving(app, ASK * asks)
        client.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.2)
        app.go_on.set()
        told = await read_all(client)
        await gone(state)
        assert not app.left and told.count(b"data: end\n\n") == told.count(b"HTTP/1.1 200 ") == asks
        assert told.count(b"3\r\n:\n\n\r\n") == (begun and asks == 1)
        assert told.startswith(b"HTTP/1.1 200 " if begun or asks > 1 else b"HTTP/1.1 100 ")
        client.close()
        server.close()

    run(go(), runner)


PART = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{"
OLD = b"GET / HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize("runner", LOOPS)
@pytest.mark.parametrize(
    "begun, request_, leave",
    [(False, ASK, "close"), (True, ASK, "close"), (True, ASK, "reset"), (True, PART, "half"), (True, OLD, "half")],
)
def test_who_leaves_is_noticed(runner: Any, begun: bool, request_: bytes, leave: str) -> None:
    async def go() -> None:
        app = Held(begun)
        server, state, client = await serving(app, request_)
        if begun:
            assert (await asyncio.get_running_loop().sock_recv(client, 1 << 16)).startswith(b"HTTP/1.1 200 ")
        if leave == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if leave == "half":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        await gone(state)
        assert app.left or leave == "half"
        client.close()
        server.close()

    run(go(), runner)


def deaf(client: socket.socket) -> None:
    """Have all that comes to a socket be dropped, as by a broken network: a filter that lets no packet through."""
    import ctypes

    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    attach = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    client.setsockopt(socket.SOL_SOCKET, 26, attach)  # SO_ATTACH_FILTER


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="needs Linux")
@pytest.mark.parametrize("runner", LOOPS)
def test_who_is_gone_without_a_word_is_noticed(runner: Any) -> None:
    async def go() -> None:
        app = Held(True)
        server, state, client = await serving(app, peer_timeout=2)
        deaf(client)
        await gone(state)
        assert app.left
        client.close()
        server.close()

    run(go(), runner)


@pytest.mark.parametrize("runner", LOOPS)
def test_one_too_many_is_told_so_and_many_too_many_are_cut(runner: Any) -> None:
    async def go() -> None:
        server, state, client = await serving(Held(False), max_connections=2)
        others = [await connect(server) for _ in range(2 + 32)]
        while len(state.connections) < 2 + 32:
            await asyncio.sleep(0.01)
        assert await read_all(others[-1]) == b""
        await asyncio.get_running_loop().sock_sendall(others[1], ASK)
        told = await read_all(others[1])
        assert told.startswith(b"HTTP/1.1 503 ") and b"connection: close" in told and b"too_many_connections" in told
        await asyncio.sleep(0.05)
        late = await connect(server)  # in the place of that one
        await asyncio.get_running_loop().sock_sendall(late, ASK)
        assert (await read_all(late)).startswith(b"HTTP/1.1 503 ")
        for each in others:
            each.close()
        while len(state.connections) > 1:
            await asyncio.sleep(0.01)
        free = await connect(server)
        await asyncio.get_running_loop().sock_sendall(free, ASK)
        while len(state.tasks) < 2:
            await asyncio.sleep(0.01)
        for each in (free, client):
            each.close()
        await gone(state)
        server.close()

    run(go(), runner)


def test_pieces_that_are_written_past_the_application_come_in_their_place() -> None:
    """And are refused before the answer has begun, while another request waits or nobody reads, and after the end."""
    taken: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        line, flow = scope[LINE], kept[-1].flow
        taken.append(line.write(b"early"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        taken.append(line.write(b"bcd"))
        flow.pause_writing()
        taken.append(line.write(b"unread"))
        flow.resume_writing()
        if scope["path"] == "/":
            await asyncio.get_running_loop().sock_sendall(clients[0], ASK.replace(b"/ ", b"/next "))
            while not kept[-1].pipeline:
                await asyncio.sleep(0.001)
            taken.append(line.write(b"of the next"))
        await send({"type": "http.response.body", "body": b"e", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        taken.append(line.write(b"late"))

    async def go() -> None:
        kind, state = BoundedConnection.with_limits(ServeConfig()), ServerState()
        config = uvicorn.Config(app, http=kind, lifespan="off", log_config=None)
        config.load()

        def connection() -> Any:
            kept.append(kind(config=config, server_state=state, app_state={}))
            return kept[-1]

        loop = asyncio.get_running_loop()
        server = await loop.create_server(connection, "127.0.0.1", 0)
        clients.append(await connect(server))
        await loop.sock_sendall(clients[0], ASK)
        got = b""
        while got.count(b"0\r\n\r\n") < 2:
            got += await loop.sock_recv(clients[0], 1 << 16)
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in got.split(b"HTTP/1.1")[1:]]
        assert bodies == [b"1\r\na\r\n3\r\nbcd\r\n1\r\ne\r\n0\r\n\r\n"] * 2
        assert taken == [False, True, False, False, False, False, True, False, False]
        clients[0].close()
        server.close()

    kept: list[Any] = []
    clients: list[socket.socket] = []
    run(go())
