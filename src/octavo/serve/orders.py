"""A request on its way from an API to the engine: what both have to know of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from octavo.core.params import SamplingParams
from octavo.serve.answers import Reply
from octavo.serve.dialects import OPENAI, Dialect, json_response
from octavo.serve.generate import Choice, Job
from octavo.serve.grammars import constrained_by
from octavo.serve.metrics import Metrics
from octavo.serve.names import Warnings
from octavo.serve.port import EnginePort
from octavo.serve.protocol import ChatRequest, CompletionRequest

__all__ = ["Events", "Order", "Whole", "is_short", "whole_answer"]

_FEW_TOKENS = 256
_WINDOW = 64  # more would only wait in the engine's queue, in front of others

Events = Callable[[EnginePort, Reply, Metrics], AsyncGenerator[bytes, None]]
Whole = Callable[[EnginePort, Reply, Sequence[Choice]], Any]


@dataclass(frozen=True)
class Order:
    """A request in our words, and how its API answers. `param` names the prompt; `asked` is the body as it came."""

    body: CompletionRequest | ChatRequest
    params: SamplingParams
    warnings: Warnings
    answer_id: str  # what stands before the request's id in the answer's
    param: str
    events: Events | None  # None: there is no stream of it
    whole: Whole
    dialect: Dialect = OPENAI
    asked: Any = None
    num_prompts: int = 1

    @property
    def constrained_by(self) -> str:
        """The client's name for what constrains the output; empty if nothing does."""
        return "" if self.params.grammar is None else constrained_by(self.body)

    @property
    def window(self) -> int:
        """Prompts that the engine is given at once: vectors are made a few at a time, however many are asked for."""
        return min(self.num_prompts, _WINDOW) if self.params.pooling else self.num_prompts


def is_short(order: Order, job: Job) -> bool:
    """Whether an answer is written in no time."""
    few = sum(job.output_tokens.values()) <= _FEW_TOKENS and not (order.params.pooling and order.num_prompts > 1)
    return few and order.params.logprobs is None and order.params.prompt_logprobs is None


def whole_answer(order: Order, engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> Response:
    """The answer of a request that is no stream."""
    return json_response(order.whole(engine, reply, choices), reply.headers())
