"""Text to token ids and back (vLLM's shapes), and a conversation as the prompt that it becomes (llama.cpp's)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.serve.body import read_json
from octavo.serve.described import described
from octavo.serve.dialects import json_response, warned
from octavo.serve.front import Front
from octavo.serve.known_names import GENERATION
from octavo.serve.names import decode_request
from octavo.serve.text_work import Decode, Spell, encoding, rendering

__all__ = ["DetokenizeRequest", "TemplateRequest", "TokenizeChatRequest", "TokenizeTextRequest", "routes"]


class _Named(Struct, kw_only=True):
    model: str | None = None


class TokenizeTextRequest(_Named, kw_only=True):
    """Body of `/tokenize` for a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TemplateRequest(_Named, kw_only=True):
    """Body of `/apply-template`: a conversation."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None


class TokenizeChatRequest(TemplateRequest, kw_only=True):
    """Body of `/tokenize` for a conversation."""

    return_token_strs: bool | None = None


class DetokenizeRequest(_Named, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[int]


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api, post = _Tokens(front), ["POST"]
    found = []
    for prefix in ("", "/v1"):
        found += [
            Route(f"{prefix}/tokenize", front.answered(front.metered(api.tokenize)), methods=post),
            Route(f"{prefix}/detokenize", front.answered(front.metered(api.detokenize)), methods=post),
        ]
    return [
        *found,
        Route("/apply-template", front.answered(front.metered(api.apply_template)), methods=post),
        Route("/tokenizer_info", front.answered(api.info), methods=["GET"]),
    ]


class _Tokens:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(TokenizeTextRequest, TokenizeChatRequest, names=GENERATION)
    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize: ``{"prompt"}`` or ``{"messages"}`` to ``{"tokens", "count", ...}``."""
        front = self._front
        raw = await read_json(http, front.config)
        kind = TokenizeChatRequest if "messages" in raw else TokenizeTextRequest
        asked, warnings = await front.in_thread(decode_request, raw, kind)
        front.check_model(asked.model)
        (prompt,) = await front.text(encoding(asked))
        ids = list(prompt.token_ids)
        strings = await front.text(Spell(tuple(ids))) if asked.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": front.engine.max_seq_len, "tokens": ids, "token_strs": strings}
        return warned(answer, warnings)

    @described(DetokenizeRequest, names=GENERATION)
    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize: ``{"tokens": [ids]}`` to ``{"prompt": text}``."""
        front = self._front
        asked, warnings = await front.body(http, DetokenizeRequest)
        front.check_model(asked.model)
        text = await front.text(Decode(asked.tokens, "tokens"))
        return warned({"prompt": text}, warnings)

    async def info(self, http: Request) -> Response:
        """GET /tokenizer_info: what a client that tokenizes here has to know besides."""
        tokenizer = self._front.engine.tokenizer
        ends = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        told = {name: None if token is None else tokenizer.id_to_token(token) for name, token in ends.items()}
        more = {"chat_template": tokenizer.chat_template, "model_max_length": self._front.engine.max_seq_len}
        return json_response({**told, "pad_token": None, "vocab_size": tokenizer.vocab_size, **more})

    @described(TemplateRequest, names=GENERATION)
    async def apply_template(self, http: Request) -> Response:
        """POST /apply-template: ``{"messages"}`` to ``{"prompt": text}``, as the model would read it."""
        front = self._front
        asked, warnings = await front.body(http, TemplateRequest)
        front.check_model(asked.model)
        text = await front.text(rendering(asked))
        return warned({"prompt": text}, warnings)
