"""Who may speak to the server at all: checked on the raw request, before any route is looked for.

Every path and method needs a key, where there are keys, except those of `OPEN`. A server on loopback answers to the
names of loopback alone, so that a page in a browser cannot reach it by a name of its own (DNS rebinding), and to no
page of another site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import iscoroutinefunction

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.serve.config import ServeConfig
from octavo.serve.dialects import Dialect
from octavo.serve.errors import ApiError
from octavo.serve.keys import Keyring
from octavo.serve.static import PATHS

__all__ = ["KEY", "OPEN", "Guard", "allowed_hosts"]

OPEN = frozenset({"/health", "/health/live", "/health/ready"}) | PATHS
KEY = "octavo.key"  # where the scope of a request has its key
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def allowed_hosts(config: ServeConfig) -> frozenset[str]:
    """Names that requests may call the server by; none: any."""
    given = frozenset(config.host_names)
    if config.host in _LOOPBACK or config.host.startswith("127."):
        return given | {*_LOOPBACK, config.host}
    return given


class Guard:
    """An ASGI application in front of another."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keyring | None,
        hosts: frozenset[str],
        dialect_of: Callable[[str], Dialect],
        refused: Callable[[ApiError], object],
        routes: Sequence[Route] = (),
    ) -> None:
        self._app, self._keys, self._hosts, self._dialect_of = app, keys, hosts, dialect_of
        self._refused = refused
        # by method and path: those of plain paths are found here, and need no handler of errors of their own
        plain = [route for route in routes if "{" not in route.path and iscoroutinefunction(route.endpoint)]
        self._direct = {(method, route.path): route for route in reversed(plain) for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = self._refusal(scope)
            if refusal is None:
                await self._pass_on(scope, receive, send)
                return
            self._refused(refusal)
            await self._dialect_of(scope["path"]).error_response(refusal)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._direct.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope.update(route=route, endpoint=route.endpoint, path_params={})
        answer = await route.endpoint(Request(scope, receive, send))
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if self._hosts and _host(headers.get(b"host", [])) not in self._hosts:
            remedy = "start the server with --allowed-hosts to have it answer to this name"
            return ApiError(403, f"The Host header names no host of this server; {remedy}.", code="host_not_allowed")
        if self._hosts and any(_origin(value) not in self._hosts for value in headers.get(b"origin", [])):
            return ApiError(403, "Pages of other sites may not use this server.", code="origin_not_allowed")
        if self._keys is None or scope["path"] in OPEN:
            return None
        secret = _secret(headers)
        key = None if secret is None else self._keys.find(secret)
        if key is None:
            told = {"WWW-Authenticate": "Bearer"}
            what = (
                "An API key is needed; send it as 'Authorization: Bearer KEY'."
                if secret is None
                else "No such API key."
            )
            return ApiError(401, what, code="invalid_api_key", headers=told)
        scope[KEY] = key
        return None


def _host(values: list[bytes]) -> str:
    """The one host of a request, without its port."""
    if len(values) != 1:
        return ""
    host = values[0].decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _origin(value: bytes) -> str:
    """The host of the page that a browser sends a request for."""
    return _host([value.partition(b"://")[2]])


def _secret(headers: dict[bytes, list[bytes]]) -> str | None:
    """The key that a request carries: a bearer token, or Anthropic's header."""
    for name in (b"authorization", b"x-api-key"):
        values = headers.get(name, [])
        if len(values) > 1:
            return None
        if values:
            text = values[0].decode("utf-8", "surrogateescape")
            return text[7:].strip() if text[:7].lower() == "bearer " else text if name == b"x-api-key" else None
    return None
