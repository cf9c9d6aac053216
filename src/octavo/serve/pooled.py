"""What all routes share that make vectors: the request in our words, and the order that the front end serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import Struct

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.serve.dialects import OPENAI, Dialect
from octavo.serve.errors import from_invalid_input
from octavo.serve.front import Front, Order
from octavo.serve.known_names import LABEL, NEVER_CUT, NO_TEMPLATE, ONE_MODEL, TEXT_ONLY, is_empty, one_of
from octavo.serve.names import Warnings, translated
from octavo.serve.orders import Whole
from octavo.serve.prompts import check_inputs
from octavo.serve.protocol import CompletionRequest

__all__ = ["IDLE", "REFUSED", "PooledRequest", "pooled_order", "usage_of"]

REFUSED = {
    "truncate_prompt_tokens": (is_empty, NEVER_CUT),
    "truncation_side": (is_empty, NEVER_CUT),
    "padding": (one_of("do_not_pad"), "texts are not padded; leave it out"),
    "mm_processor_kwargs": (is_empty, TEXT_ONLY),
    "media_io_kwargs": (is_empty, TEXT_ONLY),
    "chat_template": (is_empty, NO_TEMPLATE),
    "adapter_id": (is_empty, ONE_MODEL),
}
IDLE = {"user": LABEL}


class PooledRequest(Struct, kw_only=True):
    """What the bodies of these routes have in common."""

    model: str | None = None
    pooling: str | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None


async def pooled_order(
    front: Front,
    asked: Any,
    prompt: Any,
    warnings: Warnings,
    whole: Whole,
    *,
    answer_id: str,
    dialect: Dialect = OPENAI,
    param: str = "prompt",
    **values: Any,
) -> Order:
    """The order of a request for vectors of ``prompt``: a text, token ids, or a list of either. Raises ``ApiError``.

    ``values`` replace what the body says in the same words as ours.
    """
    body = translated(asked, CompletionRequest, prompt=prompt, max_tokens=0, **values)
    params = await front.in_thread(_params, front, body, getattr(asked, "pooling", None))
    count = check_inputs(prompt, front.config)
    return Order(body, params, warnings, answer_id, param, None, whole, dialect, asked, count)


def _params(front: Front, body: CompletionRequest, kind: str | None) -> SamplingParams:
    params = front.parameters(body)
    try:
        return replace(params, pooling=front.engine.pooling.kind if kind is None else kind)
    except InvalidInput as error:
        raise from_invalid_input(error) from error


def usage_of(usage: Any) -> dict[str, int]:
    """Tokens of a request that draws none."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
