"""OpenAI's responses: made, gone on with, kept, asked for again, stopped."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.params import SamplingParams
from octavo.serve.apis.response_answers import (
    RESPONSES,
    Exchange,
    input_items,
    response_events,
    response_whole,
    run_unseen,
)
from octavo.serve.apis.response_store import ResponseStore, StoredResponse, Turn
from octavo.serve.apis.response_turns import tool_choice_of, tools_of, turns_of
from octavo.serve.described import described
from octavo.serve.dialects import json_response, warned
from octavo.serve.errors import invalid, safe_name
from octavo.serve.front import Front, Order, request_id_of
from octavo.serve.grammars import text_format
from octavo.serve.known_names import LABEL, Names, is_empty, one_of
from octavo.serve.names import Warnings, note, translated
from octavo.serve.params import check_metadata
from octavo.serve.protocol import ChatRequest
from octavo.serve.text_work import encoding

__all__ = ["NAMES", "ResponsesRequest", "routes"]

_MOST_NAMED = 16  # names that have no effect
_CACHED = "prefixes are cached and found again by themselves"
_SEVERAL = "this server has several front ends, and keeps no responses; it would with --apis 1"
_LOGPROBS = "message.output_text.logprobs"
_ELSEWHERE = "it is a service of OpenAI's that this server does not have; leave it out"

NAMES = Names(
    in_turns=("type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary"),
    in_parts=("type", "text", "annotations", "logprobs"),
    aliases={"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    refused={
        "truncation": (one_of("disabled"), "a prompt is never cut; shorten it before sending"),
        "conversation": (is_empty, "conversations are not kept by name; use previous_response_id"),
        "prompt": (is_empty, "prompts are not kept by name; send the text as input"),
        "stream_options": (is_empty, "usage is always in the last event; leave it out"),
        **dict.fromkeys(("image", "moderation", "context_management", "background_options"), (is_empty, _ELSEWHERE)),
    },
    idle={
        **dict.fromkeys(("user", "service_tier", "safety_identifier", "access_programs"), LABEL),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _CACHED),
        "max_tool_calls": "this server runs no tools; the calls are for the client",
    },
)


class ResponsesRequest(Struct, kw_only=True):
    """Body of `/v1/responses`. What OpenAI lacks is spelled as on the other routes."""

    input: str | list[dict[str, Any]] | UnsetType = UNSET
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api, one = _Responses(front), "/v1/responses/{response_id}"
    table = [
        ("/v1/responses", "POST", api.create),
        ("/v1/responses/input_tokens", "POST", front.metered(api.count)),
        (one, "GET", api.retrieve),
        (one, "DELETE", api.delete),
        (f"{one}/cancel", "POST", api.cancel),
        (f"{one}/input_items", "GET", api.items),
    ]
    return [Route(path, front.answered(call, RESPONSES), methods=[method]) for path, method, call in table]


class _Responses:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._several = front.config.apis > 1  # who is asked later may be another one, so nobody keeps any
        most = 0 if self._several else front.config.max_stored_responses
        self._store = ResponseStore(most, front.config.max_stored_bytes)

    @described(ResponsesRequest, names=NAMES, needs=("input",), runs=True)
    async def create(self, http: Request) -> Any:
        """POST /v1/responses."""
        front = self._front
        asked, warnings = await front.body(http, ResponsesRequest, NAMES)
        _check(asked, warnings)
        self._check_kept(asked, warnings)
        turns = self._earlier(asked, front.tenant(http))
        turns, body, params = await front.in_thread(self._understood, asked, turns)
        exchange = Exchange(asked, turns, self._store if asked.store is not False else None)
        order = Order(body, params, warnings, "resp_", "messages", response_events, response_whole, RESPONSES, exchange)
        return await (self._in_background(http, order) if asked.background else front.serve(http, order))

    def _check_kept(self, asked: ResponsesRequest, warnings: Warnings) -> None:
        """With several front ends nothing is kept: refuse what goes on from it. Raises ``ApiError`` 400."""
        if not self._several:
            return
        for name in ("previous_response_id", "background"):
            if getattr(asked, name):
                raise invalid(name, _SEVERAL)
        if asked.store:
            note(warnings, "store", _SEVERAL)

    async def _in_background(self, http: Request, order: Order) -> Response:
        """Answer at once; what comes of it is asked for later."""
        front = self._front
        with ExitStack() as places:
            reply = await front.admitted(http, order, places)
            stored = order.asked.begin(reply)
            if not self._store.holds(stored):
                raise invalid("background", "such a response cannot be kept here, so it could never be asked for")
            front.spawn(run_unseen(front.engine, reply, front.metrics, places.pop_all().close))
        return json_response(stored.body, reply.headers())

    def _earlier(self, asked: ResponsesRequest, tenant: str) -> list[Turn]:
        """The turns that a request goes on from."""
        if asked.previous_response_id is None:
            return []
        earlier = self._store.get(asked.previous_response_id, tenant, "previous_response_id")
        if earlier.stop is not None:
            raise invalid("previous_response_id", "names a response that still runs; wait for its end")
        return earlier.turns

    def _understood(
        self, asked: ResponsesRequest, earlier: list[Turn]
    ) -> tuple[list[Turn], ChatRequest, SamplingParams]:
        """All turns, and the request in our words."""
        turns = [*earlier, *_turns(asked)]
        body = _conversation(asked, turns)
        return turns, body, self._front.parameters(body)

    @described(ResponsesRequest, names=NAMES, needs=("input",))
    async def count(self, http: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens a request's prompt has."""
        front = self._front
        asked, warnings = await front.body(http, ResponsesRequest, NAMES)
        front.check_model(asked.model)
        body = _conversation(asked, [*self._earlier(asked, front.tenant(http)), *_turns(asked)])
        _check(asked, warnings)
        request_id_of(http, asked.request_id)
        front.sampling(body)
        prompts = await front.text(encoding(body))
        return warned({"object": "response.input_tokens", "input_tokens": len(prompts[0].token_ids)}, warnings)

    @described(query={"stream": {"type": "boolean", "const": False}})
    async def retrieve(self, http: Request) -> Response:
        """GET /v1/responses/{id}."""
        if http.query_params.get("stream") == "true":
            raise invalid("stream", "a response is not streamed again; ask for it whole")
        return json_response(self._named(http).body)

    async def items(self, http: Request) -> Response:
        """GET /v1/responses/{id}/input_items: the turns that it was made from."""
        return json_response(input_items(self._named(http)))

    async def cancel(self, http: Request) -> Response:
        """POST /v1/responses/{id}/cancel: stop it if it still runs."""
        stored = self._named(http)
        if stored.stop is not None:
            stored.stop()
        return json_response(stored.body)

    async def delete(self, http: Request) -> Response:
        """DELETE /v1/responses/{id}: forget it."""
        name = http.path_params["response_id"]
        self._store.delete(name, self._front.tenant(http))
        return json_response({"id": name, "object": "response", "deleted": True})

    def _named(self, http: Request) -> StoredResponse:
        return self._store.get(http.path_params["response_id"], self._front.tenant(http))


def _check(asked: ResponsesRequest, warnings: Warnings) -> None:
    """What this API alone asks for. Raises ``ApiError`` 400."""
    if asked.background and asked.stream:
        raise invalid("background", "cannot be streamed; ask for the response by its id")
    if asked.background and asked.store is False:
        raise invalid("background", "needs the response to be stored; leave store out")
    if any(name != _LOGPROBS for name in asked.include or ()):
        note(warnings, "include", f"only {_LOGPROBS} can be included; there is nothing else of its kind here")
    others = (name for name, value in (asked.reasoning or {}).items() if name != "effort" and not is_empty(value))
    for name in islice(others, _MOST_NAMED):
        note(warnings, f"reasoning.{safe_name(name)}", "thoughts come whole, as reasoning_text, in every mode")
    check_metadata(asked.metadata)


def _conversation(asked: ResponsesRequest, turns: list[Turn]) -> ChatRequest:
    instructions: list[dict[str, Any]] = [{"role": "system", "content": asked.instructions}]
    shown = asked.top_logprobs is not None or _LOGPROBS in (asked.include or ())
    return translated(
        asked,
        ChatRequest,
        messages=[*instructions[: bool(asked.instructions)], *turns],
        max_tokens=asked.max_output_tokens,
        logprobs=shown,
        tools=tools_of(asked.tools),
        tool_choice=tool_choice_of(asked.tool_choice),
        stream=asked.stream,
        response_format=text_format(asked.text),
        reasoning_effort=_effort(asked),
    )


def _effort(asked: ResponsesRequest) -> str | None:
    """The effort that is asked for. Raises ``ApiError`` 400."""
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise invalid("reasoning", "effort must be a word: none, low, medium, high ...")
    return effort


def _turns(asked: ResponsesRequest) -> list[Turn]:
    """The input as turns, whose parts are texts. Raises ``ApiError`` 400."""
    if not asked.input:
        raise invalid("input", "is missing or empty; give a text, or a list of messages")
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    return turns_of(asked.input)
