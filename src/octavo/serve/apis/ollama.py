"""Ollama: chat, generate, and what there is to run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.core.params import SamplingParams
from octavo.serve.apis.ollama_answers import OLLAMA, answer_events, answer_whole, loaded
from octavo.serve.described import described
from octavo.serve.dialects import json_response, warned
from octavo.serve.errors import invalid
from octavo.serve.front import Front, Order, request_id_of
from octavo.serve.grammars import format_of
from octavo.serve.known_names import (
    LABEL,
    NEVER_CUT,
    NO_SAMPLER,
    NO_TEMPLATE,
    TEXT_ONLY,
    Names,
    is_empty,
    off,
)
from octavo.serve.names import Warnings, decode_request, translated
from octavo.serve.protocol import ChatRequest, CompletionRequest
from octavo.tokenizers.chat import template_of

__all__ = ["NAMES", "OPTIONS", "SHOW", "OllamaChat", "OllamaGenerate", "OllamaOptions", "ShowRequest"]
__all__ += ["plain_name", "routes"]

_MACHINE = "where and how the model runs is the server's affair"

NAMES = Names(
    in_turns=(*Names().in_turns, "thinking", "tool_name"),
    refused={
        "tools": (is_empty, "tools are called in conversations alone; use /api/chat"),
        "images": (is_empty, TEXT_ONLY),
        "suffix": (is_empty, "filling a gap is not supported; leave it out"),
        "template": (is_empty, NO_TEMPLATE),
        "context": (is_empty, "a conversation is sent whole; use /api/chat"),
    },
    idle={"keep_alive": "the model stays loaded", "truncate": NEVER_CUT, "shift": NEVER_CUT, "user": LABEL},
)
SHOW = Names(idle={"verbose": "nothing more is known"})
OPTIONS = Names(
    aliases={"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"},
    refused={
        "tfs_z": (off(1), NO_SAMPLER),
    },
    idle={
        **dict.fromkeys(("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "f16_kv"), _MACHINE),
        **dict.fromkeys(("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only"), _MACHINE),
        "num_ctx": "the context is the server's, --max-seq-len",
        "num_keep": NEVER_CUT,
        "penalize_newline": "penalties look at all tokens that are counted",
    },
)


class OllamaOptions(Struct, kw_only=True):
    """`options` of a body: how tokens are drawn."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _Generation(Struct, kw_only=True):
    model: str | None = None
    think: bool | str | None = None
    format: dict[str, Any] | str | None = None
    stream: bool | None = None
    options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None


class OllamaChat(_Generation, kw_only=True):
    """Body of `/api/chat`. What Ollama lacks is spelled as on the other routes."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(_Generation, kw_only=True):
    """Body of `/api/generate`: one turn, or with `raw` a text as it stands."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowRequest(Struct, kw_only=True):
    """Body of `/api/show`."""

    model: str | None = None
    name: str | None = None  # as it was called earlier


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _Ollama(front)
    handlers = {"chat": api.chat, "generate": api.generate, "show": api.show}
    lists = {"tags": api.tags, "ps": api.running, "version": api.version}
    return [
        *(Route(f"/api/{name}", front.answered(call, OLLAMA), methods=["POST"]) for name, call in handlers.items()),
        *(Route(f"/api/{name}", front.answered(call, OLLAMA), methods=["GET"]) for name, call in lists.items()),
    ]


class _Ollama:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(OllamaChat, names=NAMES, runs=True, parts={"options": (OllamaOptions, OPTIONS)})
    async def chat(self, http: Request) -> Any:
        """POST /api/chat."""
        asked, warnings = await self._front.body(http, OllamaChat, NAMES)
        return await self._serve(http, asked, warnings, "messages" if asked.messages else "")

    @described(OllamaGenerate, names=NAMES, runs=True, parts={"options": (OllamaOptions, OPTIONS)})
    async def generate(self, http: Request) -> Any:
        """POST /api/generate."""
        asked, warnings = await self._front.body(http, OllamaGenerate, NAMES)
        return await self._serve(http, asked, warnings, "prompt" if asked.prompt else "")

    async def _serve(self, http: Request, asked: OllamaChat | OllamaGenerate, warnings: Warnings, param: str) -> Any:
        body, params = await self._front.in_thread(self._understood, asked, warnings)
        if not param:  # nothing is asked but that the model be there, and it is
            request_id_of(http, asked.request_id)
            return warned(loaded(self._front.model, asked), warnings)
        order = Order(body, params, warnings, "", param, answer_events, answer_whole, OLLAMA, asked)
        return await self._front.serve(http, order)

    def _understood(
        self, asked: OllamaChat | OllamaGenerate, warnings: Warnings
    ) -> tuple[ChatRequest | CompletionRequest, SamplingParams]:
        options, more = decode_request(asked.options or {}, OllamaOptions, OPTIONS, "options.")
        warnings += more
        if options.num_predict is not None and options.num_predict < -2:
            raise invalid("options.num_predict", "must be a count of tokens; -1 and -2 ask for what the context holds")
        limit = None if (options.num_predict or 0) < 0 else options.num_predict
        body = _in_our_words(asked, options, limit)
        return body, replace(self._front.parameters(body), max_tokens=limit)

    async def tags(self, http: Request) -> Response:
        """GET /api/tags: the models that there are."""
        return json_response({"models": self._cards()})

    async def running(self, http: Request) -> Response:
        """GET /api/ps: the models that are loaded."""
        length = self._front.engine.max_seq_len
        return json_response({"models": [{**card, "context_length": length} for card in self._cards()]})

    def _cards(self) -> list[dict[str, Any]]:
        """The model, and its adapters."""
        since = datetime.fromtimestamp(self._front.started, timezone.utc).isoformat()
        base = {"modified_at": since, "size": self._front.engine.model_bytes, "digest": "", "details": _DETAILS}
        name = self._front.model
        made_of = {**_DETAILS, "parent_model": name}
        return [{"name": name, "model": name, **base}] + [
            {**base, "name": each.name, "model": each.name, "digest": each.digest, "details": made_of}
            for each in self._front.engine.adapters()
        ]

    @described(ShowRequest, names=SHOW)
    async def show(self, http: Request) -> Response:
        """POST /api/show: what is known about a model."""
        front = self._front
        asked, warnings = await front.body(http, ShowRequest, SHOW)
        front.check_model(plain_name(asked.name if asked.model is None else asked.model))
        info = {"general.name": front.engine.model_name, "octavo.context_length": front.engine.max_seq_len}
        template = template_of(front.engine.tokenizer).source
        told = {
            "template": template,
            "details": _DETAILS,
            "model_info": info,
            "capabilities": _CAPABILITIES,
        }
        return warned(told, warnings)

    async def version(self, http: Request) -> Response:
        """GET /api/version."""
        return json_response({"version": __version__})


_CAPABILITIES = ["completion", "embedding"]
_DETAILS = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


def plain_name(name: str | None) -> str | None:
    """A model's name without the tag that means no other."""
    return None if name is None else name.removesuffix(":latest")


def _in_our_words(
    asked: OllamaChat | OllamaGenerate, options: OllamaOptions, limit: int | None
) -> ChatRequest | CompletionRequest:
    values: dict[str, Any] = {
        **{name: getattr(options, name) for name in OllamaOptions.__struct_fields__ if name in _SAME},
        "max_tokens": limit,
        "repetition_penalty": options.repeat_penalty,
        "model": plain_name(asked.model),
        "stream": asked.stream is not False,
        "response_format": format_of("format", asked.format),
    }
    thoughts = _thoughts(asked.think)
    if isinstance(asked, OllamaChat):
        return translated(asked, ChatRequest, **thoughts, **values)
    if not asked.raw:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        turns = [*system, {"role": "user", "content": asked.prompt}]
        return translated(asked, ChatRequest, messages=turns, **thoughts, **values)
    if asked.think:
        raise invalid("think", "a raw prompt is thought about as it says itself; leave it out")
    if asked.system:
        raise invalid("system", "has no place in a raw prompt; put it into the prompt")
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    return translated(asked, CompletionRequest, logprobs=top, **values)


def _thoughts(think: bool | str | None) -> dict[str, Any]:
    """``think`` in our words."""
    if think is None or isinstance(think, str):
        return {"reasoning_effort": think}
    return {"thinking": {"type": "enabled" if think else "disabled"}}


_SAME = frozenset(ChatRequest.__struct_fields__)
