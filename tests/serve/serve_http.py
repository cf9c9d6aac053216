"""Helpers of the HTTP tests: an application called in process, and streams taken apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from fake_engine import FakeEngine
from hypothesis import strategies as st
from starlette.applications import Starlette

from octavo.serve.app import create_app
from octavo.serve.config import ServeConfig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
HELLO = {"messages": [{"role": "user", "content": "hé"}]}


def make_app(engine: FakeEngine | None = None, **limits: Any) -> Starlette:
    return create_app(engine or FakeEngine(), ServeConfig(**limits))


def send(app: Starlette, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """One request; the answer is read whole, streamed or not."""
    return send_all(app, [(method, path, kwargs)])[0]


def send_all(app: Starlette, requests: list[tuple[str, str, dict[str, Any]]]) -> list[httpx.Response]:
    """Several requests at once."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return list(await asyncio.gather(*(client.request(m, p, **k) for m, p, k in requests)))

    return asyncio.run(go())


def post(path: str, body: Any, *, engine: FakeEngine | None = None, **limits: Any) -> httpx.Response:
    return send(make_app(engine, **limits), "POST", path, json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with exactly one [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = response.text.split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces)
    assert [piece for piece in pieces if piece == "data: [DONE]"] == [pieces[-1]]
    return [json.loads(piece[6:]) for piece in pieces[:-1]]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """An error in our shape; returns its inside."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]


class Client:
    """A client at the level of ASGI messages, for leaving in the middle."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.block_send = False
        self._app = app
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "client": ("test", 1),
            "server": ("test", 80),
        }

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        await self._app(self.scope, self._inbox.get, self._send)

    async def _send(self, message: Any) -> None:
        if self.block_send:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def until_sent(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0)
