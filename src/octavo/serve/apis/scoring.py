"""Texts compared: rerank (Jina's and Cohere's shape) and score, both as vLLM spells them.

A score is the cosine of the angle between the pooled states of two texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.routing import Route

from octavo.engine.vectors import cosine
from octavo.serve.answers import Reply
from octavo.serve.config import ServeConfig
from octavo.serve.described import described
from octavo.serve.dialects import OPENAI
from octavo.serve.errors import ApiError, invalid
from octavo.serve.front import Front
from octavo.serve.generate import Choice
from octavo.serve.known_names import NEVER_CUT, Names, is_empty
from octavo.serve.pooled import IDLE, REFUSED, PooledRequest, pooled_order, usage_of
from octavo.serve.port import EnginePort

__all__ = ["RERANK", "SCORE", "RerankRequest", "ScoreRequest", "routes"]

_IDLE = {**IDLE, "use_activation": "a score is a cosine, and nothing comes after it"}
RERANK = Names(
    aliases={"top_k": "top_n", "rid": "request_id"},
    refused={
        **REFUSED,
        "rank_fields": (is_empty, "documents are texts here; leave it out"),
        "max_chunks_per_doc": (is_empty, NEVER_CUT),
        "max_tokens_per_doc": (is_empty, NEVER_CUT),
    },
    idle=_IDLE,
)
SCORE = Names(
    aliases={
        "queries": "text_1",
        "data_1": "text_1",
        "rid": "request_id",
        "documents": "text_2",
        "items": "text_2",
        "data_2": "text_2",
    },
    refused=REFUSED,
    idle=_IDLE,
)
_RERANK = replace(OPENAI, theirs={"prompt": "documents"})
_SCORE = replace(OPENAI, theirs={"prompt": "text_2"})


class RerankRequest(PooledRequest, kw_only=True):
    """Body of `/rerank`. A document is a text, or an object with one under `text`."""

    query: str | UnsetType = UNSET
    documents: list[str | dict[str, Any]] | UnsetType = UNSET
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """Body of `/score`: one text against many, or two lists of equal length in pairs."""

    text_1: str | list[str] | UnsetType = UNSET
    text_2: str | list[str] | UnsetType = UNSET


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _Scoring(front)
    rerank, score = front.answered(api.rerank, _RERANK), front.answered(api.score, _SCORE)
    return [
        *(Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
    ]


class _Scoring:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(RerankRequest, names=RERANK, needs=("query", "documents"), runs=True)
    async def rerank(self, http: Request) -> Any:
        """POST /rerank."""
        front = self._front
        asked, warnings = await front.body(http, RerankRequest, RERANK)
        if isinstance(asked.query, UnsetType) or not asked.query:
            raise invalid("query", "is missing or empty; give the text that documents are compared with")
        documents = _documents(asked.documents, front.config)
        if asked.top_n is not None and asked.top_n < 0:
            raise invalid("top_n", f"must be 0 (all) or more, not {asked.top_n}")
        whole = partial(_ranked, documents)
        prompts = [asked.query, *documents]
        order = await pooled_order(front, asked, prompts, warnings, whole, answer_id="rerank-", dialect=_RERANK)
        return await front.serve(http, order)

    @described(ScoreRequest, names=SCORE, needs=("text_1", "text_2"), runs=True)
    async def score(self, http: Request) -> Any:
        """POST /score."""
        front = self._front
        asked, warnings = await front.body(http, ScoreRequest, SCORE)
        first, second = _texts("text_1", asked.text_1, front.config), _texts("text_2", asked.text_2, front.config)
        if len(first) not in (1, len(second)):
            raise invalid("text_1", f"has {len(first)} texts and text_2 has {len(second)}; give one, or as many")
        whole = partial(_scored, len(first))
        prompts = [*first, *second]
        order = await pooled_order(front, asked, prompts, warnings, whole, answer_id="score-", dialect=_SCORE)
        return await front.serve(http, order)


def _documents(given: Any, config: ServeConfig) -> list[str]:
    if isinstance(given, UnsetType) or not given:
        raise invalid("documents", "is missing or empty; give at least one text")
    _check_count("documents", len(given), config)
    texts = [item.get("text") if isinstance(item, dict) else item for item in given]
    wrong = next((at for at, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ApiError(400, f"documents[{wrong}]: must be a text, or an object with one as text.", param="documents")
    return [str(text) for text in texts]


def _texts(name: str, given: Any, config: ServeConfig) -> list[str]:
    if isinstance(given, UnsetType) or not given:
        raise invalid(name, "is missing or empty; give a text, or a list of them")
    texts = [given] if isinstance(given, str) else given
    _check_count(name, len(texts), config)
    return texts


def _check_count(name: str, count: int, config: ServeConfig) -> None:
    """The text that they are compared with counts as one of them."""
    if count >= config.max_inputs:
        raise invalid(name, f"has {count} texts; at most {config.max_inputs - 1} are allowed in one request")


def _ranked(documents: Sequence[str], engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    query, *others = (choice.hidden for choice in choices)
    scores = [cosine(query, other) for other in others]
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    shows = reply.request.return_documents is not False
    results = [
        {"index": i, **({"document": {"text": documents[i]}} if shows else {}), "relevance_score": scores[i]}
        for i in best[: reply.request.top_n or None]
    ]
    told = {"id": reply.answer_id, "model": reply.model, "usage": usage_of(reply.job.usage()), "results": results}
    return {**told, **({"warnings": reply.warnings} if reply.warnings else {})}


def _scored(count: int, engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    first, second = choices[:count], choices[count:]
    pairs = zip(first if count > 1 else [*first] * len(second), second, strict=True)
    scores = [cosine(a.hidden, b.hidden) for a, b in pairs]
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    more = {"warnings": reply.warnings} if reply.warnings else {}
    return {**reply.signature("list"), "data": data, "usage": usage_of(reply.job.usage()), **more}
