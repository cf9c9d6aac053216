"""The HTTP application: routes, and the way of one request through them.

body -> typed request -> parameters -> token ids (in a thread) -> engine -> JSON or events
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.core.admission import Ask
from octavo.core.params import SamplingParams
from octavo.serve.admission import Admission, Visit, ask_of, tenant_of
from octavo.serve.answers import Reply
from octavo.serve.body import read_json
from octavo.serve.chat import chat_events, chat_whole
from octavo.serve.completions import completion_events, completion_whole
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError, invalid
from octavo.serve.generate import Job, collect
from octavo.serve.ledger import Ledger
from octavo.serve.metrics import Metrics
from octavo.serve.names import Warnings, decode_request
from octavo.serve.params import sampling_params
from octavo.serve.port import EnginePort
from octavo.serve.prompts import (
    Prompt,
    count_prompts,
    decode_ids,
    encode_chat_prompt,
    encode_prompts,
    ending_at_turns,
    fit_context,
)
from octavo.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from octavo.serve.sse import EventStream, until_disconnect

__all__ = ["create_app"]

_Result = TypeVar("_Result")
_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_TEXT_THREADS = 2
_NO_PRIORITY = "priority had no effect: start the server with --policy priority to have it honoured."
_log = logging.getLogger(__name__)


def create_app(engine: EnginePort, config: ServeConfig | None = None, *, policy: str = "fcfs") -> Starlette:
    """The application over one running engine, which whoever made it also closes.

    `policy` is the engine's order of service: without "priority", a request's priority is answered with a warning.
    """
    return Server(engine, config or ServeConfig(), policy).app()


class Server:
    """The state of one application: engine, limits, metrics, places, text threads."""

    def __init__(self, engine: EnginePort, config: ServeConfig, policy: str) -> None:
        self.engine = engine
        self.policy = policy
        self.config = config
        self.model = config.served_model_name or engine.model_name
        self.metrics = Metrics(engine, self.model)
        self.admission = Admission(config.limits(), engine, self.metrics.saw_first_token)
        self.ledger = Ledger()
        self.started = int(time.time())
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, "octavo-text")

    def app(self) -> Starlette:
        """Routes and error handlers around this server."""
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/v1/completions", self._answered(self.completions), methods=post),
            Route("/v1/chat/completions", self._answered(self.chat), methods=post),
            Route("/v1/models", self._answered(self.models), methods=get),
            Route("/v1/models/{model:path}", self._answered(self.one_model), methods=get),
            Route("/v1/requests/{request_id}", self._answered(self.one_request), methods=get),
            Route("/tokenize", self._answered(self.tokenize), methods=post),
            Route("/detokenize", self._answered(self.detokenize), methods=post),
            Route("/health", self.health, methods=get),
            Route("/version", self.version, methods=get),
            Route("/metrics", self.scrape, methods=get),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _unexpected}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        yield
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answered(self, handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The handler with its refusals as answers, and every answer counted."""

        async def answer(request: Request) -> Any:
            try:
                reply = await handler(request)
            except ApiError as error:
                reply = error.response()
                if error.status == 429:
                    self.metrics.refused(error.code or "")
                    retry_after = float(error.headers.get("Retry-After", "0"))
                    name = request.headers.get("x-request-id", "")
                    known = name if _REQUEST_ID.fullmatch(name) else ""
                    self.engine.note_refusal(known, error.message, error.status, retry_after)
            except ClientDisconnect:
                reply = Response(status_code=499)
            except Exception:
                _log.exception("a request failed")
                reply = _internal_error()
            self.metrics.answered(request.scope["route"].path, reply.status_code)
            return reply

        return answer

    async def in_thread(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run text work (templates, tokenizing) off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))

    async def completions(self, request: Request) -> Any:
        """POST /v1/completions."""
        body, params, warnings = await self._understood(request, CompletionRequest)
        order = _Order(body, params, count_prompts(body, self.config), warnings, "cmpl", "prompt")
        return await self._serve(request, order, encode_prompts, completion_events, completion_whole)

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions."""
        body, params, warnings = await self._understood(request, ChatRequest)
        params = ending_at_turns(params, self.engine)
        order = _Order(body, params, 1, warnings, "chatcmpl", "messages")
        return await self._serve(request, order, encode_chat_prompt, chat_events, chat_whole)

    async def _understood(self, request: Request, kind: type[_Body]) -> tuple[_Body, SamplingParams, Warnings]:
        """The typed body, its sampling parameters, and the warnings about it. In a thread: lists may be long."""
        raw = await read_json(request, self.config)

        def understand() -> tuple[_Body, SamplingParams, Warnings]:
            body, warnings = decode_request(raw, kind)
            self._check(body)
            return body, sampling_params(body, self.config, self.engine.vocab_size), warnings

        return await self.in_thread(understand)

    def _check(self, body: GenerationRequest) -> None:
        """Refuse a model that is not served here, and work for an engine that does not move."""
        if body.model is not None and body.model not in (self.model, self.engine.model_name):
            message = f"model: there is no such model here; served is {self.model}."
            raise ApiError(404, message, param="model", code="model_not_found")
        if self.engine.health_problem() is not None:
            raise ApiError(
                503, "The engine does not run; see /health.", code="engine_down", headers={"Retry-After": "5"}
            )

    async def _serve(self, http: Request, order: _Order, encode: Any, events: Any, whole: Any) -> Any:
        """Hold a place, make token ids, and run the engine while the client is there: as a stream, or whole."""
        params = order.params
        sequences = order.num_prompts * params.n
        if sequences > self.config.max_prompts:
            raise invalid("n", f"prompts times n is {sequences}; at most {self.config.max_prompts} in one request")
        if order.body.priority and "priority" not in self.policy.split(","):
            order.warnings.append({"param": "priority", "message": _NO_PRIORITY})
        request_id = _request_id(http, order.body)
        tenant = tenant_of(http.headers.get("authorization", ""))
        with ExitStack() as places:
            entry = places.enter_context(self.ledger.running(request_id))
            self.admission.check(Ask(tenant, sequences))  # before work is done for it
            prompts = await self.in_thread(encode, order.body, self.engine, self.config)
            fit_context(prompts, params, self.engine, order.param)
            visit = places.enter_context(self.admission.enter(ask_of(tenant, prompts, params, self.engine)))
            reply = self._reply(order, request_id, prompts, tenant, visit)
            entry.job = reply.job
            if order.body.stream:
                stream = events(self.engine, reply, self.metrics)
                return EventStream(stream, reply.headers(), self.config.stall_timeout, places.pop_all().close)
            choices = await until_disconnect(http, collect(self.engine, reply.job, self.metrics))
            return await self.in_thread(lambda: _json(whole(self.engine, reply, choices), reply.headers()))

    def _reply(self, order: _Order, request_id: str, prompts: Sequence[Prompt], tenant: str, visit: Visit) -> Reply:
        job = Job(
            request_id=f"{request_id}.{uuid.uuid4().hex[:8]}",
            prompts=prompts,
            params=order.params,
            timeout=self.config.request_timeout,
            priority=order.body.priority or 0,
            cache_salt=order.body.cache_salt or "",
            tenant=tenant,
            saw_first_token=visit.first_token,
        )
        answer_id = f"{order.prefix}-{request_id}"
        return Reply(order.body, job, self.model, answer_id, request_id, order.warnings, first_token_s=visit.forecast)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        if request.path_params["model"] not in (self.model, self.engine.model_name):
            raise ApiError(404, f"There is no such model here; served is {self.model}.", code="model_not_found")
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "created": self.started, "owned_by": "octavo"}
        return {**card, "root": self.engine.model_name, "parent": None, "max_model_len": self.engine.max_seq_len}

    async def one_request(self, request: Request) -> Response:
        """GET /v1/requests/{id}: whether a request runs, or how it ended."""
        return _json(self.ledger.describe(request.path_params["request_id"]))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ``{"prompt"}`` or ``{"messages"}`` to ``{"tokens", "count", "max_model_len"}``."""
        body = await read_json(request, self.config)
        if "messages" in body:
            chat, _ = decode_request(body, ChatRequest)
            prompts = await self.in_thread(encode_chat_prompt, chat, self.engine, self.config)
        else:
            text, _ = decode_request(body, CompletionRequest)
            prompts = await self.in_thread(encode_prompts, text, self.engine, self.config)
        ids = list(prompts[0].token_ids)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_seq_len})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: ``{"tokens": [ids]}`` to ``{"prompt": text}``."""
        body = await read_json(request, self.config)
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise invalid("tokens", "is missing or no list; give a list of token ids")
        text = await self.in_thread(decode_ids, ids, self.engine)
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine makes progress, else 503 with the reason."""
        problem = self.engine.health_problem()
        if problem is not None:
            _log.error("unhealthy: %s", problem)
            problem = problem.split(":")[0]  # what follows is for the log alone
        body = {"status": "ok" if problem is None else "unhealthy", "reason": problem, "model": self.model}
        return _json(body, status=200 if problem is None else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": __version__})

    async def scrape(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


@dataclass(frozen=True)
class _Order:
    """A decoded body and what distinguishes its endpoint."""

    body: Any
    params: SamplingParams
    num_prompts: int
    warnings: Warnings
    prefix: str
    param: str


def _json(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _request_id(http: Request, body: GenerationRequest) -> str:
    """The id that the client chose (field, then header), or a fresh one."""
    chosen = body.request_id if body.request_id is not None else http.headers.get("x-request-id")
    if chosen is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(chosen):
        raise invalid("request_id", "must have 1 to 128 letters, digits or any of . _ : -")
    return chosen


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in our error shape."""
    if isinstance(error, HTTPException):
        allowed = dict(error.headers or {})
        text = {404: "There is no such route; see docs/api.md.", 405: "This route does not take that method."}
        return ApiError(error.status_code, text.get(error.status_code, error.detail), headers=allowed).response()
    return _internal_error()


async def _unexpected(request: Request, error: Exception) -> Response:
    return _internal_error()


def _internal_error() -> Response:
    return ApiError(500, "The server failed on this request; see its log.", code="internal_error").response()
