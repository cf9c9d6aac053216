"""OpenAI: completions, chat completions, models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.engine.adapters import ServedAdapter
from octavo.serve.chat import chat_events, chat_whole
from octavo.serve.completions import completion_events, completion_whole
from octavo.serve.described import described
from octavo.serve.dialects import json_response
from octavo.serve.front import Front, Order, is_small
from octavo.serve.known_names import GENERATION
from octavo.serve.prompts import count_prompts
from octavo.serve.protocol import ChatRequest, ChatResponse, CompletionRequest, CompletionResponse

__all__ = ["routes"]


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _OpenAI(front)
    return [
        Route("/v1/completions", front.answered(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", front.answered(api.chat), methods=["POST"]),
        Route("/v1/models", front.answered(api.models), methods=["GET"]),
        Route("/v1/models/{model:path}", front.answered(api.one_model), methods=["GET"]),
    ]


class _OpenAI:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(CompletionRequest, names=GENERATION, needs=("prompt",), runs=True, gives=CompletionResponse)
    async def completions(self, http: Request) -> Any:
        """POST /v1/completions."""
        front = self._front
        body, warnings = await front.body(http, CompletionRequest)
        params = await front.text_work(is_small(http), front.parameters, body)
        count = count_prompts(body, front.config)
        order = Order(body, params, warnings, "cmpl-", "prompt", completion_events, completion_whole, num_prompts=count)
        return await front.serve(http, order)

    @described(ChatRequest, names=GENERATION, needs=("messages",), runs=True, gives=ChatResponse)
    async def chat(self, http: Request) -> Any:
        """POST /v1/chat/completions."""
        front = self._front
        body, warnings = await front.body(http, ChatRequest)
        params = await front.text_work(is_small(http), front.parameters, body)
        order = Order(body, params, warnings, "chatcmpl-", "messages", chat_events, chat_whole)
        return await front.serve(http, order)

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        cards = [self._card(), *map(self._adapter_card, self._front.engine.adapters())]
        return json_response({"object": "list", "data": cards})

    async def one_model(self, http: Request) -> Response:
        """GET /v1/models/{id}."""
        name = http.path_params["model"]
        self._front.check_model(name)
        adapter = self._front.models()[name]
        return json_response(self._card() if adapter is None else self._adapter_card(adapter))

    def _adapter_card(self, adapter: ServedAdapter) -> dict[str, Any]:
        """An adapter is a model whose parent is the base model; `root` says what it holds, not where it lies."""
        return {**self._card(), "id": adapter.name, "root": adapter.digest, "parent": self._front.model}

    def _card(self) -> dict[str, Any]:
        front = self._front
        card = {"id": front.model, "object": "model", "created": front.started, "owned_by": "octavo"}
        return {**card, "root": front.engine.model_name, "parent": None, "max_model_len": front.engine.max_seq_len}
