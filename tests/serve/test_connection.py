"""A connection whose client does not read what it asked for: cut after a while, and only then."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from octavo.serve.connection import BoundedConnection

SIZE = 16 << 20  # more than the buffers of two sockets hold


async def large(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": b"x" * SIZE})


async def serving(stall_timeout: float) -> tuple[asyncio.Server, ServerState, socket.socket]:
    """A server with one client that has asked and not read."""
    kind, state = BoundedConnection.with_stall_timeout(stall_timeout), ServerState()
    config = uvicorn.Config(large, http=kind, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, server.sockets[0].getsockname())
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    while not state.total_requests:
        await asyncio.sleep(0.001)
    return server, state, client


def test_who_never_reads_is_cut() -> None:
    async def go() -> None:
        server, state, client = await serving(0.05)
        while state.connections:
            await asyncio.sleep(0.01)
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_who_reads_gets_everything() -> None:
    async def go() -> None:
        server, state, client = await serving(20)
        got = b"" if state.connections else b"cut"
        while not got.endswith(b"x" * SIZE):
            got += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        assert state.connections
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(go(), 30))
