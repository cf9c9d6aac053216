"""The HTTP application: the routes of all APIs over one `Front`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from octavo.serve import static
from octavo.serve.admin import admin_listener
from octavo.serve.admission import Gate
from octavo.serve.apis import (
    anthropic,
    batches,
    embeddings,
    files,
    live,
    ollama,
    ollama_embed,
    openai,
    probes,
    requests,
    responses,
    scoring,
    tokens,
)
from octavo.serve.apis.ollama_answers import OLLAMA
from octavo.serve.apis.response_answers import RESPONSES
from octavo.serve.batches.desk import Desk
from octavo.serve.batches.folder import Folder
from octavo.serve.batches.inside import caller
from octavo.serve.config import ServeConfig
from octavo.serve.dialects import OPENAI, Dialect
from octavo.serve.errors import ApiError
from octavo.serve.front import Elsewhere, Front, internal_error
from octavo.serve.guard import Guard, allowed_hosts
from octavo.serve.keys import Keyring, read_keys
from octavo.serve.openapi import document_route
from octavo.serve.port import EnginePort

__all__ = ["create_app"]

_APIS = (
    *(openai, responses, embeddings, scoring, anthropic, ollama, ollama_embed),
    *(requests, tokens, live, probes),
)
_OF_BATCHES = ("/v1/files", "/v1/batches")
_NO_BATCHES = (
    "There are no files and batches here: the operator starts the server with --batch-dir FOLDER to have them."
)
_DIALECTS = (
    ("/v1/messages", anthropic.ANTHROPIC),
    ("/api/", OLLAMA),
    ("/v1/responses", RESPONSES),
)  # by the beginning of a path


def create_app(
    engine: EnginePort,
    config: ServeConfig | None = None,
    *,
    policy: str = "fcfs",
    elsewhere: Elsewhere | None = None,
    gate: Gate | None = None,
) -> Starlette:
    """The application over one running engine, which whoever made it also closes.

    `policy` is the engine's order of service: without "priority", a request's priority is answered with a warning.
    `elsewhere` does work on text, and `gate` leads to the register, if these are not here.
    """
    front = Front(engine, config or ServeConfig(), policy, elsewhere, gate)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        front.start_threads()
        async with admin_listener(front, front.config), batches_run():
            yield
        front.close()

    @asynccontextmanager
    async def batches_run() -> AsyncGenerator[None, None]:
        if desk is not None:
            desk.start()
        yield
        if desk is not None:
            await desk.stop()

    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _unexpected}
    keys = read_keys(front.config.key_file) if front.config.key_file else None
    routes = [*static.routes(), *(route for api in _APIS for route in api.routes(front))]
    desk = _desk(front, routes, keys)
    if desk is not None:
        routes += [*files.routes(front, desk), *batches.routes(front, desk, routes)]
    routes.append(document_route(front, routes, dialect_of, keyed=bool(front.config.key_file)))
    guard = Middleware(
        Guard,
        keys=keys,
        hosts=allowed_hosts(front.config),
        dialect_of=dialect_of,
        refused=front.metrics.failed,
        routes=routes,
    )
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=[guard])
    app.state.front, app.state.desk = front, desk
    return app


def _desk(front: Front, routes: Sequence[Route], keys: Keyring | None) -> Desk | None:
    """Who runs batches, if there is a folder for them. Raises ``InvalidInput``."""
    config = front.config
    if not config.batch_dir:
        return None
    return Desk(Folder(config.batch_dir), config, caller(Router(routes)), keys, front.metrics)


def dialect_of(path: str) -> Dialect:
    """How errors are spelled where no handler was reached."""
    return next((dialect for prefix, dialect in _DIALECTS if path.startswith(prefix)), OPENAI)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in our error shape."""
    if not isinstance(error, HTTPException):
        return await _unexpected(request, error)
    allowed = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else dict(error.headers or {})
    no_batches = request.url.path.startswith(_OF_BATCHES) and not request.app.state.desk
    nowhere = _NO_BATCHES if no_batches else "There is no such route; see docs/api.md."
    text = {404: nowhere, 405: "This route does not take that method."}
    refusal = ApiError(error.status_code, text.get(error.status_code, error.detail), headers=allowed)
    answer: Response = dialect_of(request.url.path).error_response(refusal)
    return answer


def _methods(request: Request) -> list[str]:
    """What the routes of a path take, all together: the router knows the first one's alone."""
    here = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    named = [route for route in here if route.path == request.url.path]  # and no value of a parameter
    return sorted({method for route in named or here for method in route.methods or ()})


async def _unexpected(request: Request, error: Exception) -> Response:
    answer: Response = dialect_of(request.url.path).error_response(internal_error())
    return answer
