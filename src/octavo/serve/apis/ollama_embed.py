"""Ollama: texts as vectors, on the route of today and on the one before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from octavo.engine.vectors import vector_of
from octavo.serve.answers import Reply
from octavo.serve.apis.embeddings import check_size, vectors_of
from octavo.serve.apis.ollama import plain_name
from octavo.serve.apis.ollama_answers import OLLAMA
from octavo.serve.described import described
from octavo.serve.dialects import Dialect, warned
from octavo.serve.front import Front, request_id_of
from octavo.serve.generate import Choice
from octavo.serve.known_names import NEVER_CUT, Names
from octavo.serve.names import Warnings
from octavo.serve.orders import Whole
from octavo.serve.pooled import PooledRequest, pooled_order
from octavo.serve.port import EnginePort

__all__ = ["EMBED", "EMBEDDINGS", "EmbedRequest", "OldEmbedRequest", "routes"]

_IDLE = {"keep_alive": "the model stays loaded", "options": "nothing is drawn", "truncate": NEVER_CUT}
EMBED = Names(aliases={"use_activation": "normalize"}, idle=_IDLE)
EMBEDDINGS = Names(idle={name: _IDLE[name] for name in ("keep_alive", "options")})
_EMBED = replace(OLLAMA, theirs={"prompt": "input"})


class EmbedRequest(PooledRequest, kw_only=True):
    """Body of `/api/embed`. `input`: a string, token ids, or a list of either."""

    input: Any = None
    dimensions: int | None = None
    normalize: bool | None = None


class OldEmbedRequest(PooledRequest, kw_only=True):
    """Body of `/api/embeddings`: one text, whose vector is left as long as it is."""

    prompt: str | None = None


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _Embed(front)
    return [
        Route("/api/embed", front.answered(api.embed, _EMBED), methods=["POST"]),
        Route("/api/embeddings", front.answered(api.embeddings, OLLAMA), methods=["POST"]),
    ]


class _Embed:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(EmbedRequest, names=EMBED, runs=True)
    async def embed(self, http: Request) -> Any:
        """POST /api/embed."""
        asked, warnings = await self._front.body(http, EmbedRequest, EMBED)
        check_size(asked.dimensions, self._front.engine)
        nothing = {"model": self._front.model, "embeddings": []}
        return await self._serve(http, asked, asked.input, warnings, _whole, _EMBED, nothing)

    @described(OldEmbedRequest, names=EMBEDDINGS, runs=True)
    async def embeddings(self, http: Request) -> Any:
        """POST /api/embeddings."""
        asked, warnings = await self._front.body(http, OldEmbedRequest, EMBEDDINGS)
        return await self._serve(http, asked, asked.prompt, warnings, _old_whole, OLLAMA, {"embedding": []})

    async def _serve(
        self,
        http: Request,
        asked: PooledRequest,
        prompt: Any,
        warnings: Warnings,
        whole: Whole,
        dialect: Dialect,
        nothing: dict[str, Any],
    ) -> Any:
        """``nothing`` is the answer where no text is given: then only the model is to be there, and it is."""
        empty, model = prompt is None or prompt in ("", []), plain_name(asked.model)
        text = "-" if empty else prompt
        order = await pooled_order(
            self._front, asked, text, warnings, whole, answer_id="", dialect=dialect, model=model
        )
        if not empty:
            return await self._front.serve(http, order)
        request_id_of(http, asked.request_id)
        return warned(nothing, warnings)


def _whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    told = {"model": reply.model, "embeddings": vectors_of(engine, reply.request, choices)}
    took = {"total_duration": round(1e9 * (time.monotonic() - reply.job.started)), "load_duration": 0}
    count = {"prompt_eval_count": reply.job.usage().prompt_tokens}
    return {**told, **took, **count, **({"warnings": reply.warnings} if reply.warnings else {})}


def _old_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    vector = vector_of(choices[0].hidden, normalize=False)
    return {"embedding": vector, **({"warnings": reply.warnings} if reply.warnings else {})}
