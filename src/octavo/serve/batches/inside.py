"""One request of a batch, through the very handlers that clients reach over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp

from octavo.serve.errors import ApiError
from octavo.serve.front import BULK
from octavo.serve.guard import KEY
from octavo.serve.keys import Key

__all__ = ["Call", "caller"]

Call = Callable[[str, bytes, str, Key | None], Awaitable[tuple[int, dict[str, str], Any]]]
_ALONE = ("stream", "background")


def caller(router: ASGIApp) -> Call:
    """Asks a route: (path, body, owner, key) to (status, headers, JSON). It takes no place of those who are online."""

    async def call(path: str, body: bytes, owner: str, key: Key | None) -> tuple[int, dict[str, str], Any]:
        for name in _asked_alone(body):
            error = ApiError(400, f"{name}: the lines of a batch are answered whole; leave it out.", param=name)
            return 400, {}, error.body()
        exchange = _Exchange(body)
        await router(_scope(path, len(body), owner, key), exchange.receive, exchange.send)
        return exchange.status, exchange.headers, msgspec.json.decode(bytes(exchange.answer))

    return call


def _asked_alone(body: bytes) -> list[str]:
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []  # the handler says so
    return [name for name in _ALONE if asked.get(name)]


def _scope(path: str, length: int, owner: str, key: Key | None) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        BULK: owner,
        **({} if key is None else {KEY: key}),
    }


class _Exchange:
    """The two ends of a connection that nobody is at: the client never leaves."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: dict[str, str] = {}
        self.answer = bytearray()

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.answer += message.get("body", b"")
