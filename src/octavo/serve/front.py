"""The one way of a request to the engine, whatever API it came by.

body -> typed request -> (translation into ours) -> parameters -> token ids (in a thread) -> engine -> JSON or a stream

An API is what it hands to `Front.understood` and `Front.serve`: how its body reads, and how its answers are written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.core.admission import Ask
from octavo.core.params import SamplingParams
from octavo.decoding.answer import AnswerForm
from octavo.engine.adapters import ServedAdapter
from octavo.serve.admission import Gate, OwnGate, Stay, ask_of, pace_of, tenant_of
from octavo.serve.answers import Reply
from octavo.serve.body import read_json
from octavo.serve.config import ServeConfig
from octavo.serve.dialects import OPENAI, Dialect
from octavo.serve.errors import ApiError, invalid, no_such_model
from octavo.serve.forms import answer_of, check_answer, counter_of
from octavo.serve.generate import Job, collect
from octavo.serve.grammar_door import GrammarDoor
from octavo.serve.guard import KEY
from octavo.serve.heads import REQUEST_ID, credentials, is_small, request_id_of
from octavo.serve.interrupt import LINE, while_there
from octavo.serve.keys import Key
from octavo.serve.known_names import GENERATION, Names
from octavo.serve.logs import log_request
from octavo.serve.metrics import Metrics, failure_class
from octavo.serve.names import Warnings, decode_request, note
from octavo.serve.orders import Order, is_short, whole_answer
from octavo.serve.params import sampling_params
from octavo.serve.port import EnginePort
from octavo.serve.prompts import Prompt, ending_at_turns, fit_context
from octavo.serve.protocol import ChatRequest, CompletionRequest
from octavo.serve.register import Describe, Full, Scrape
from octavo.serve.sse import EventStream
from octavo.serve.sums import Values
from octavo.serve.text_work import EncodeText, Work, do, encoding
from octavo.serve.tracing import tracing_to
from octavo.serve.trail import Trail

__all__ = ["BULK", "REQUEST_ID", "Elsewhere", "Front", "Order", "internal_error", "is_small"]
__all__ += ["request_id_of"]

_Result = TypeVar("_Result")
_Body = TypeVar("_Body", bound=msgspec.Struct)
_ENGINE_SUFFIX = re.compile(r"\.[0-9a-f]{8}(-[0-9]+)?(~[0-9]+)?$")  # what `_reply` and those behind it add
_TEXT_THREADS = 2
_OTHER_THREADS = 2  # for `asyncio.to_thread`
_ARRIVED = "octavo.arrived"  # where the scope of a request says when its head was whole
BULK = "octavo.bulk"  # where the scope of a line of a batch says whose it is
_LONGEST_BULK = 30 * 86_400.0  # seconds
_DRAINING = "The server takes no new requests now: it is being drained, or about to stop."
_NO_PRIORITY = "start the server with --policy priority to have it honoured"
_log = logging.getLogger(__name__)

Elsewhere = Callable[[Work], Awaitable[Any]]
Handler = Callable[[Request], Awaitable[Any]]


class Front:
    """The state of one application: engine, limits, metrics, places, text threads."""

    def __init__(
        self,
        engine: EnginePort,
        config: ServeConfig,
        policy: str,
        elsewhere: Elsewhere | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.engine = engine
        self._elsewhere = elsewhere  # does work on text, if it is not done here
        self.policy = policy
        self.config = config
        self.model = config.served_model_name or engine.model_name
        self.metrics = Metrics(engine, self.model)
        self.gate = OwnGate(config.limits()) if gate is None else gate
        self.stays: dict[int, Stay] = {}  # requests inside, by number
        self._numbers = count(1)
        self.tracing = tracing_to(config.otlp_endpoint, self.model)
        self.draining = False  # by the operator
        self.replacing = ""  # another model, which is about to be loaded
        self.problem = ""  # why the last one that was to be loaded is not here
        self.on_orders: Callable[[], None] = lambda: None  # the operator has set something
        self.replace: Callable[[str], None] | None = None  # load another model; None: it cannot be done here
        self._leaving = math.inf  # when the server began to stop
        self.started = int(time.time())
        self.watchers: dict[asyncio.Event, str | None] = {}  # of the live view, and whose; set: it ends
        self._unseen: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, "octavo-text")
        self.grammars = GrammarDoor(engine)

    def leave(self) -> None:
        """The server stops: who comes from now on is refused, and whoever only looks on does not hold it up."""
        self._leaving = time.monotonic()
        for over in self.watchers:
            over.set()

    def orphaned(self, names: Sequence[tuple[str, str]]) -> None:
        """Requests that another front end had let in were cancelled when it died: (tenant, the engine's id) of each."""
        for tenant, name in names:
            self.gate.orphaned(tenant if self.config.key_file else "", _ENGINE_SUFFIX.sub("", name))

    def cut(self) -> None:
        """It waits no longer: what is open ends with an error."""
        for job in [stay.job for stay in self.stays.values() if stay.job is not None]:
            job.end(ApiError(503, "The server stops; send the request again, elsewhere.", code="draining"))

    def close(self) -> None:
        """Nothing more will be asked."""
        for task in self._unseen:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()
        if self.tracing is not None:
            self.tracing.close()

    def start_threads(self) -> None:
        """Have all threads of this event loop run from now on: later the system may have none to give."""
        others = ThreadPoolExecutor(_OTHER_THREADS, "octavo-other")
        asyncio.get_running_loop().set_default_executor(others)
        together = threading.Barrier(_TEXT_THREADS + _OTHER_THREADS + 1)
        for pool, number in ((self._threads, _TEXT_THREADS), (others, _OTHER_THREADS)):
            for _ in range(number):
                pool.submit(together.wait)
        together.wait()

    async def in_thread(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run text work (templates, tokenizing) off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))

    async def text_work(self, is_small: bool, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run text work: where it is small, here and now, since going to a thread and back costs more."""
        return function(*args) if is_small else await self.in_thread(function, *args)

    async def text(self, work: Work, is_small: bool = False) -> Any:
        """The result of work on text, wherever it is done. Raises ``ApiError``."""
        if self._elsewhere is not None:
            return await self._elsewhere(work)
        return await self.text_work(is_small, do, work, self.engine, self.config)

    def answered(self, handler: Handler, dialect: Dialect = OPENAI) -> Handler:
        """The handler with its refusals as answers, and every answer counted."""

        @wraps(handler)
        async def answer(request: Request) -> Any:
            request.scope[_ARRIVED] = time.monotonic()
            try:
                reply = await handler(request)
            except ApiError as error:
                self._note_refusal(request, error)
                reply = dialect.error_response(error)
            except ClientDisconnect:
                reply = Response(status_code=499)
            except Exception:
                _log.exception("a request failed")
                fault = internal_error()
                self._note_refusal(request, fault)
                reply = dialect.error_response(fault)
            self.metrics.answered(request.scope["route"].path, reply.status_code)
            return reply

        return answer

    def _note_refusal(self, request: Request, error: ApiError) -> None:
        """Count and log a request that did not get as far as the engine."""
        tenant = self.tenant(request)
        if self.metrics.failed(error, tenant):
            about = {"route": request.scope["route"].path, "tenant": tenant, "outcome": failure_class(error)}
            about |= {"status": error.status, "param": error.param, "code": error.code}
            log_request(lambda: about)
        if error.status != 429:
            return
        self.metrics.refused(error.code or "")
        name = request.headers.get("x-request-id", "")
        known = name if REQUEST_ID.fullmatch(name) else ""
        self.engine.note_refusal(known, error.message, error.status, float(error.headers.get("Retry-After", "0")))

    async def body(self, http: Request, kind: type[_Body], names: Names = GENERATION) -> tuple[_Body, Warnings]:
        """The typed body, and the warnings about it. Raises ``ApiError``."""
        raw = await read_json(http, self.config)
        return await self.text_work(is_small(http), decode_request, raw, kind, names)

    def parameters(self, body: CompletionRequest | ChatRequest) -> SamplingParams:
        """What the engine is told of sampling. Raises ``ApiError``, also for a model that is not here. In a thread."""
        self.check_model(body.model)
        self.check_health()
        params = self.sampling(body)
        if not isinstance(body, ChatRequest):
            return params
        check_answer(body, self.engine, self.config)
        return ending_at_turns(params, self.engine)

    def sampling(self, body: CompletionRequest | ChatRequest) -> SamplingParams:
        """How tokens are drawn. Raises ``ApiError``, also for more of them than the shortest prompt leaves room for."""
        engine, limit = self.engine, self.engine.max_seq_len
        params = sampling_params(body, self.config, engine.vocab_size, engine.tokenizer)
        if params.max_tokens is not None and params.max_tokens >= limit:
            message = f"asks for {params.max_tokens}, but the context holds {limit} with the prompt; ask for fewer"
            raise invalid("max_tokens", message, code="context_length_exceeded")
        return params

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name not in self.models():
            raise no_such_model([self.model, *(adapter.name for adapter in self.engine.adapters())])

    def models(self) -> dict[str, ServedAdapter | None]:
        """What may be asked for, by name: the model (None), and its adapters."""
        named = {adapter.name: adapter for adapter in self.engine.adapters()}
        return {**named, self.model: None, self.engine.model_name: None}

    def check_health(self) -> None:
        """Refuse work for an engine that does not move."""
        if self.engine.health_problem() is not None:
            retry = {"Retry-After": "5"}
            raise ApiError(503, "The engine does not run; see /health.", code="engine_down", headers=retry)

    async def refuses_now(self) -> str | None:
        """Why a small request of nobody in particular would not be let in now; None if it would."""
        if self.draining or self.replacing or self._leaving < math.inf:
            return _DRAINING
        refusal: str | None = await self.gate.ask(Full(pace_of(self.engine)))
        return refusal

    def tenant(self, http: Request) -> str:
        """Whose request it is: the name of its key, where there are keys."""
        key: Key | None = http.scope.get(KEY)
        if key is None and BULK in http.scope:
            return str(http.scope[BULK])
        return tenant_of(credentials(http)) if key is None else key.name

    def _salt(self, key: Key | None, salt: str) -> str:
        """What prefixes are kept apart by: the client's salt, and its key."""
        return salt if key is None or self.config.share_prefixes else f"{key.name}:{salt}"

    async def serve(self, http: Request, order: Order) -> Any:
        """Run the engine while the client is there: as a stream, or whole."""
        with ExitStack() as places:
            reply = await self.admitted(http, order, places)
            if order.body.stream and order.events is not None:
                stream = order.events(self.engine, reply, self.metrics)
                close = places.pop_all().close
                wrote = partial(self.metrics.wrote, reply.job.trail)
                return EventStream(stream, reply.headers(), self.config.stall_timeout, close, order.dialect, wrote)
            work = partial(collect, self.engine, reply.job, self.metrics)
            choices = await while_there(http.scope, http.receive, work)
            told = partial(whole_answer, order, self.engine, reply, choices)
            return await self.text_work(is_short(order, reply.job), told)

    async def admitted(self, http: Request, order: Order, places: ExitStack) -> Reply:
        """A request with its token ids and its places, which ``places`` gives back. Raises ``ApiError``."""
        params = order.params
        sequences = order.window * params.num_branches
        if sequences > self.config.max_prompts and not params.pooling:
            most = self.config.max_prompts
            raise invalid("n", f"prompts times n (or best_of) is {sequences}; at most {most} in one request")
        if order.body.priority and "priority" not in self.policy.split(","):
            note(order.warnings, "priority", _NO_PRIORITY)
        if self.draining or self.replacing or http.scope[_ARRIVED] > self._leaving:
            raise ApiError(503, _DRAINING, code="draining", headers={"Retry-After": "5"})
        request_id, tenant, key = request_id_of(http, order.body.request_id), self.tenant(http), http.scope.get(KEY)
        stay = self._stay(places, is_bulk=BULK in http.scope)
        await stay.arrive("" if key is None else key.name, request_id, key, Ask(tenant, sequences))
        trail = self._trail(http, order, request_id, tenant)
        if params.grammar is not None:
            await self.grammars.check(params.grammar, order.constrained_by)
        begun = time.monotonic()
        work = encoding(order.body)
        plain = is_small(http) and isinstance(work, EncodeText)  # a template is rendered elsewhere, and waited for
        prompts: list[Prompt] = await self.text(work, plain)
        trail.tokenize = time.monotonic() - begun
        fit_context(prompts, params, self.engine, order.param)
        check = self.grammars.check
        form, params = await answer_of(order, prompts, self.engine, self.config, check)
        ask = ask_of(tenant, prompts, params, self.engine, _seconds(order.body.deadline_ms), order.window)
        await stay.enter(sum(len(prompt.token_ids) for prompt in prompts), ask)
        reply = self._reply(replace(order, params=params), trail, prompts, stay, form)
        places.callback(self._ended, reply.job)
        reply.job.cache_salt = self._salt(key, reply.job.cache_salt)
        reply.job.line = http.scope.get(LINE)
        stay.job = reply.job
        return reply

    def _stay(self, places: ExitStack, *, is_bulk: bool = False) -> Stay:
        """A stay that ends with ``places``."""
        number = next(self._numbers)
        stay = self.stays[number] = Stay(self.gate, number, self.engine, self.metrics.saw_first_token, is_bulk)
        places.callback(self.stays.pop, number)
        places.callback(stay.leave)
        return stay

    def metered(self, handler: Handler) -> Handler:
        """The handler of what asks nothing of the engine, counted against the quota of the request's key."""

        @wraps(handler)
        async def counted(http: Request) -> Any:
            with ExitStack() as places:
                await self._stay(places).arrive("", "", http.scope.get(KEY), None)
                return await handler(http)

        return counted

    async def metrics_text(self) -> bytes:
        """The metrics of all front ends, in Prometheus' text format."""
        others = await self.gate.ask(Scrape(self.metrics.values()))
        return self.metrics.text(msgspec.convert(others, Values))

    async def describe(self, owner: str, request_id: str) -> dict[str, Any]:
        """What became of a request; of one that runs here, with what it has used."""
        told: dict[str, Any] = await self.gate.ask(Describe(owner, request_id))
        here = next((stay for stay in self.stays.values() if stay.name == (owner, request_id)), None)
        return told if here is None or here.job is None else {**told, "usage": here.job.usage()}

    def _trail(self, http: Request, order: Order, request_id: str, tenant: str) -> Trail:
        """The trail of a request so far."""
        return Trail(
            request_id,
            http.scope["route"].path,
            tenant,
            order.body.priority or 0,
            bool(order.body.stream),
            order.num_prompts * order.params.num_branches,
            http.headers.get("traceparent", "")[:64],
            http.scope[_ARRIVED],
            bulk=BULK in http.scope,
        )

    def _ended(self, job: Job) -> None:
        """A request that got as far as the engine is over: metrics, a line in the log, a span."""
        trail = job.trail
        trail.ended = time.monotonic()
        if job.outcome == "cancelled":
            trail.outcome = "cancelled"
        self.metrics.ended(trail)
        log_request(trail.fields)
        if self.tracing is not None:
            self.tracing.ended(trail)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no client waits for, until the end of the application."""
        task = asyncio.ensure_future(work)
        self._unseen.add(task)
        task.add_done_callback(self._unseen.discard)

    def _reply(self, order: Order, trail: Trail, prompts: Sequence[Prompt], stay: Stay, form: AnswerForm) -> Reply:
        body, request_id = order.body, trail.request_id
        job = Job(
            request_id=f"{request_id}.{uuid.uuid4().hex[:8]}",
            prompts=prompts,
            params=order.params,
            timeout=_LONGEST_BULK if trail.bulk else self.config.request_timeout,
            deadline=_seconds(body.deadline_ms) or math.inf,
            priority=trail.priority,
            cache_salt=body.cache_salt or "",
            tenant=trail.tenant,
            bulk=trail.bulk,
            trail=trail,
            saw_first_token=stay.first_token,
            window=order.window,
            constrained_by=order.constrained_by,
        )
        job.counter = counter_of(form, order.params, self.engine.tokenizer)
        adapter = None if body.model is None else self.models().get(body.model)
        job.adapter = "" if adapter is None else adapter.digest
        model = self.model if adapter is None else adapter.name
        asked = body if order.asked is None else order.asked
        answer_id = f"{order.answer_id}{request_id}"
        return Reply(asked, job, model, answer_id, request_id, order.warnings, form, stay.forecast)


def _seconds(milliseconds: float | None) -> float:
    return 0.0 if milliseconds is None else milliseconds / 1e3


def internal_error() -> ApiError:
    """What a client is told of a fault of ours."""
    return ApiError(500, "The server failed on this request; see its log.", code="internal_error")
