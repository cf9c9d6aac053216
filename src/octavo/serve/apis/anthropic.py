"""Anthropic: messages and their token count."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.params import SamplingParams
from octavo.serve.apis.anthropic_answers import message_events, message_whole
from octavo.serve.apis.anthropic_turns import tool_choice_of, tools_of, turns_of
from octavo.serve.described import described
from octavo.serve.dialects import Dialect, named_event, warned
from octavo.serve.errors import ApiError
from octavo.serve.front import Front, Order
from octavo.serve.grammars import output_effort, output_format
from octavo.serve.known_names import LABEL, Names, is_empty
from octavo.serve.names import translated
from octavo.serve.prompts import text_of
from octavo.serve.protocol import ChatRequest
from octavo.serve.text_work import encoding

__all__ = ["ANTHROPIC", "NAMES", "CountTokensRequest", "MessagesRequest", "routes"]

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CACHED = "prefixes are cached and found again by themselves"
_ELSEWHERE = "it is a service of Anthropic's that this server does not have; leave it out"

NAMES = Names(
    in_parts=("type", "text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "signature"),
    aliases={"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
    refused={
        **dict.fromkeys(("container", "mcp_servers", "context_management", "compaction"), (is_empty, _ELSEWHERE)),
        **dict.fromkeys(("fallbacks", "thread"), (is_empty, _ELSEWHERE)),
    },
    idle={
        **dict.fromkeys(("metadata", "service_tier", "inference_geo", "speed", "diagnostics"), LABEL),
        **dict.fromkeys(("billing_policy", "fallback_credit_token", "user_profile_id", "workspace_id"), LABEL),
        "cache_control": _CACHED,
    },
)


class CountTokensRequest(Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what a prompt is made of."""

    model: str | None = None
    messages: list[dict[str, Any]] | UnsetType = UNSET
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `/v1/messages`. What Anthropic lacks is spelled as on the other routes."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None


class AnthropicDetail(Struct, kw_only=True, forbid_unknown_fields=True):
    """What an error says."""

    type: str
    message: str


class AnthropicError(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of an error, in Anthropic's shape."""

    type: str
    error: AnthropicDetail
    request_id: str | None


def _error_body(error: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}


_THEIRS = {"stop": "stop_sequences", "reasoning_effort": "output_config", "response_format": "output_config"}
ANTHROPIC = Dialect(
    _error_body,
    named_event,
    theirs=_THEIRS,
    error_kind=AnthropicError,
)


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _Anthropic(front)
    return [
        Route("/v1/messages", front.answered(api.messages, ANTHROPIC), methods=["POST"]),
        Route(
            "/v1/messages/count_tokens",
            front.answered(front.metered(api.count_tokens), ANTHROPIC),
            methods=["POST"],
        ),
    ]


class _Anthropic:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(MessagesRequest, names=NAMES, needs=("messages",), runs=True)
    async def messages(self, http: Request) -> Any:
        """POST /v1/messages."""
        asked, warnings = await self._front.body(http, MessagesRequest, NAMES)
        body, params = await self._front.in_thread(self._understood, asked)
        order = Order(body, params, warnings, "msg_", "messages", message_events, message_whole, ANTHROPIC, asked)
        return await self._front.serve(http, order)

    def _understood(self, asked: MessagesRequest) -> tuple[ChatRequest, SamplingParams]:
        body = _conversation(asked)
        return body, self._front.parameters(body)

    @described(CountTokensRequest, names=NAMES, needs=("messages",))
    async def count_tokens(self, http: Request) -> Response:
        """POST /v1/messages/count_tokens: ``{"input_tokens"}``."""
        asked, warnings = await self._front.body(http, CountTokensRequest, NAMES)
        self._front.check_model(asked.model)
        (prompt,) = await self._front.text(encoding(await self._front.in_thread(_conversation, asked)))
        return warned({"input_tokens": len(prompt.token_ids)}, warnings)


def _conversation(asked: CountTokensRequest) -> ChatRequest:
    """The request in our words. An answer that has been begun is gone on with."""
    turns = turns_of(asked.messages)
    goes_on = turns[-1]["role"] == "assistant"
    if asked.system:
        turns = [{"role": "system", "content": text_of("system", asked.system)}, *turns]
    stop = getattr(asked, "stop_sequences", None)
    more: dict[str, Any] = {"tools": tools_of(asked.tools), "parallel_tool_calls": None, "tool_choice": None}
    more |= tool_choice_of(asked.tool_choice)
    more |= {"response_format": output_format(asked.output_config, asked.output_format)}
    more |= {"reasoning_effort": output_effort(asked.output_config)}
    return translated(asked, ChatRequest, messages=turns, stop=stop, continue_final_message=goes_on, **more)
