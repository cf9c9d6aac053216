"""OpenAI: embeddings. What OpenAI lacks is spelled as vLLM spells it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from msgspec import UNSET
from starlette.requests import Request
from starlette.routing import Route

from octavo.core.errors import InvalidInput
from octavo.engine.vectors import check_dimensions, packed, vector_of
from octavo.serve.answers import Reply
from octavo.serve.described import described
from octavo.serve.dialects import OPENAI
from octavo.serve.errors import from_invalid_input
from octavo.serve.front import Front
from octavo.serve.generate import Choice
from octavo.serve.known_names import Names, is_empty, one_of
from octavo.serve.pooled import IDLE, REFUSED, PooledRequest, pooled_order, usage_of
from octavo.serve.port import EnginePort

__all__ = ["NAMES", "EmbeddingsRequest", "routes", "vectors_of"]

_ONE_TYPE = "values are float32, in base64 little-endian; leave it out"
NAMES = Names(
    aliases={"use_activation": "normalize", "rid": "request_id"},
    refused={
        **REFUSED,
        "messages": (is_empty, "texts become vectors here; send the conversation as one, from /apply-template"),
        "embed_dtype": (one_of("float32"), _ONE_TYPE),
        "endianness": (one_of("native", "little"), _ONE_TYPE),
    },
    idle=IDLE,
)
_DIALECT = replace(OPENAI, theirs={"prompt": "input"})


class EmbeddingsRequest(PooledRequest, kw_only=True):
    """Body of `/v1/embeddings`. `input`: a string, token ids, or a list of either."""

    input: Any = UNSET
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api = _Embeddings(front)
    return [Route("/v1/embeddings", front.answered(api.embeddings, _DIALECT), methods=["POST"])]


class _Embeddings:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(EmbeddingsRequest, names=NAMES, needs=("input",), runs=True)
    async def embeddings(self, http: Request) -> Any:
        """POST /v1/embeddings."""
        front = self._front
        asked, warnings = await front.body(http, EmbeddingsRequest, NAMES)
        check_size(asked.dimensions, front.engine)
        order = await pooled_order(front, asked, asked.input, warnings, _whole, answer_id="embd-", dialect=_DIALECT)
        return await front.serve(http, order)


def check_size(dimensions: int | None, engine: EnginePort) -> None:
    """Refuse a size that vectors cannot be cut to. Raises ``ApiError`` 400."""
    try:
        check_dimensions(dimensions, engine.hidden_size)
    except InvalidInput as error:
        raise from_invalid_input(error) from error


def vectors_of(engine: EnginePort, asked: Any, choices: Sequence[Choice]) -> list[list[float]]:
    """The vectors as asked for. Costs time: call it in a thread."""
    normalize = engine.pooling.normalize if asked.normalize is None else asked.normalize
    return [vector_of(choice.hidden, normalize=normalize, dimensions=asked.dimensions) for choice in choices]


def _whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    asked = reply.request
    data = []
    for index, vector in enumerate(vectors_of(engine, asked, choices)):
        shown = base64.b64encode(packed(vector)).decode() if asked.encoding_format == "base64" else vector
        data.append({"object": "embedding", "index": index, "embedding": shown})
    more = {"warnings": reply.warnings} if reply.warnings else {}
    return {**reply.signature("list"), "data": data, "usage": usage_of(reply.job.usage()), **more}
