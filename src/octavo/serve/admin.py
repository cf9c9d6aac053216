"""What the operator alone may do, on a listener of its own: a unix socket that only the server's user can open.

curl --unix-socket PATH -X POST http://admin/drain
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.errors import InvalidInput
from octavo.serve.config import LOG_LEVELS, ServeConfig
from octavo.serve.dialects import warned
from octavo.serve.errors import ApiError, from_invalid_input, invalid
from octavo.serve.front import Front
from octavo.serve.http import HttpServer, uvicorn_config
from octavo.serve.known_names import Names
from octavo.serve.logs import level_name, set_level
from octavo.serve.names import Warnings
from octavo.serve.operator_socket import operator_socket

__all__ = ["admin_app", "admin_listener"]


_LONGEST_NAME = 4096
_LOOK = 0.05  # seconds between looks whether somebody is inside


class LogLevelRequest(msgspec.Struct):
    """Body of `/log_level`."""

    level: str


class ModelRequest(msgspec.Struct):
    """Body of `/model`."""

    model: str


class LoadAdapterRequest(msgspec.Struct):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(msgspec.Struct):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: str


def admin_app(front: Front) -> Starlette:
    """The operator's routes."""
    admin = _Admin(front)
    table = [
        ("/state", "GET", admin.state),
        ("/drain", "POST", admin.drain),
        ("/resume", "POST", admin.resume),
        ("/log_level", "POST", admin.log_level),
        ("/flush_cache", "POST", admin.flush_cache),
        ("/model", "POST", admin.model),
        ("/v1/load_lora_adapter", "POST", admin.load_adapter),
        ("/v1/unload_lora_adapter", "POST", admin.unload_adapter),
    ]
    return Starlette(routes=[Route(path, front.answered(call), methods=[method]) for path, method, call in table])


class _Admin:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def state(self, http: Request) -> Response:
        """GET /state: who is inside, and whether new requests are taken."""
        return self._told([])

    def _told(self, warnings: Warnings) -> Response:
        front = self._front
        told: dict[str, Any] = {"model": front.model, "draining": front.draining, "running": len(front.stays)}
        told["adapters"] = {adapter.name: adapter.path for adapter in front.engine.adapters()}
        other = {"replacing": front.replacing or None, "problem": front.problem or None}
        return warned({**told, **other, "log_level": level_name()}, warnings)

    async def drain(self, http: Request) -> Response:
        """POST /drain: take no new requests; those inside go on to their end."""
        self._front.draining = True
        self._front.on_orders()
        return await self.state(http)

    async def resume(self, http: Request) -> Response:
        """POST /resume: take new requests again."""
        self._front.draining = False
        self._front.on_orders()
        return await self.state(http)

    async def flush_cache(self, http: Request) -> Response:
        """POST /flush_cache: forget what is cached and nobody uses, in all tiers."""
        self._front.check_health()
        self._front.engine.flush_cache()
        return await self.state(http)

    async def load_adapter(self, http: Request) -> Response:
        """POST /v1/load_lora_adapter: ``{"lora_name", "lora_path"}``, a folder of the engine's machine."""
        front = self._front
        asked, warnings = await front.body(http, LoadAdapterRequest, Names())
        front.check_health()
        if asked.lora_name in (front.model, front.engine.model_name):
            raise invalid("lora_name", "is the name of the model itself; choose another")
        await _or_refused(front.engine.load_adapter(asked.lora_name, asked.lora_path))
        return self._told(warnings)

    async def unload_adapter(self, http: Request) -> Response:
        """POST /v1/unload_lora_adapter: ``{"lora_name"}``; requests that have it go on to their end."""
        asked, warnings = await self._front.body(http, UnloadAdapterRequest, Names())
        self._front.check_health()
        await _or_refused(self._front.engine.unload_adapter(asked.lora_name))
        return self._told(warnings)

    async def model(self, http: Request) -> Response:
        """POST /model: ``{"model"}`` is loaded once nobody is inside; the state tells what came of it."""
        front = self._front
        asked, warnings = await front.body(http, ModelRequest, Names())
        if front.replace is None:
            remedy = "start the server again with the other model, or with --layout compact to replace it while it runs"
            raise invalid("model", f"server and model are one process here; {remedy}")
        if not 1 <= len(asked.model) <= _LONGEST_NAME or "\0" in asked.model:
            raise invalid("model", f"must have 1 to {_LONGEST_NAME} characters")
        if front.replacing:
            raise ApiError(
                409, f"{front.replacing} is about to be loaded; wait for what comes of it.", code="replacing"
            )
        front.replacing, front.problem = asked.model, ""
        front.spawn(self._replace(front.replace, asked.model))
        return self._told(warnings)

    async def _replace(self, replace: Callable[[str], None], model: str) -> None:
        """Wait until nobody is inside, as long as a request may take, and have the model replaced."""
        front, until = self._front, time.monotonic() + self._front.config.request_timeout
        while len(front.stays) and time.monotonic() < until:
            await asyncio.sleep(_LOOK)
        front.cut()
        replace(model)

    async def log_level(self, http: Request) -> Response:
        """POST /log_level: ``{"level"}``."""
        asked, warnings = await self._front.body(http, LogLevelRequest, Names())
        if asked.level not in LOG_LEVELS:
            raise invalid("level", "must be one of " + ", ".join(LOG_LEVELS))
        set_level(asked.level)
        self._front.on_orders()
        return self._told(warnings)


async def _or_refused(change: Coroutine[Any, Any, None]) -> None:
    """What the engine refuses is a 400."""
    try:
        await change
    except InvalidInput as error:
        raise from_invalid_input(error) from error


@asynccontextmanager
async def admin_listener(front: Front, config: ServeConfig) -> AsyncGenerator[None, None]:
    """Serve the operator's routes while the block runs, if there is a place for them."""
    if not config.admin_socket:
        yield
        return
    with operator_socket(Path(config.admin_socket)) as listener:
        server = HttpServer(uvicorn_config(admin_app(front), config))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.stop()
            await task
