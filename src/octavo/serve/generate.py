"""One HTTP request as engine requests: fanned out over its prompts, merged, bounded in time, cancelled as one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from msgspec import UNSET, UnsetType

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.decoding.grammar.matcher import FAULTS
from octavo.decoding.reasoning.counter import ThoughtCounter
from octavo.engine.output import CANNOT_FOLLOW, NOTHING_LEFT
from octavo.serve.best import Best
from octavo.serve.errors import ApiError, from_invalid_input
from octavo.serve.interrupt import Interrupt, Line
from octavo.serve.metrics import Metrics, RequestClock, failure_class
from octavo.serve.port import Delta, EnginePort
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.serve.trail import Trail

_NOTHING_LEFT = (
    "The output could not go on: what a grammar, allowed_token_ids, min_tokens and bans leave is no token; "
    "ask for less of them together."
)

__all__ = ["Choice", "Job", "collect", "run"]

_UNLOADED = "model: this adapter was unloaded before the request came to the engine."
_ENGINE_FAILED = "The engine failed on this request; send it again, and look at the server's log if it happens twice."


@dataclass
class Job:
    """What one HTTP request asks of the engine. `index` of a choice is prompt * n + choice."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    timeout: float  # seconds, the server's
    deadline: float = math.inf  # seconds, the client's own
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # digest of its content
    tenant: str = ""
    bulk: bool = False
    saw_first_token: Callable[[], None] = lambda: None
    cached_tokens: dict[int, int] = field(default_factory=dict)  # prompt -> tokens from the prefix cache
    output_tokens: dict[tuple[int, int], int] = field(default_factory=dict)  # (prompt, candidate) -> tokens so far
    drafts: tuple[int, int] = (0, 0)  # of those that have ended, and drawn ones among them
    counter: Callable[[], ThoughtCounter] | None = None  # of one candidate's thoughts, where there may be any
    thoughts: dict[tuple[int, int], ThoughtCounter] = field(default_factory=dict)  # by (prompt, candidate)
    started: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    interrupt: Callable[[ApiError], None] | None = None  # while it runs: ends it
    trail: Trail = field(default_factory=Trail)
    line: Line | None = None  # of the client, where it can be written to
    express: Callable[[int, Delta], bool] | None = None  # writes a choice's plain text at once, if it can
    cancelled: bool = False
    outcome: str = "cancelled"  # unless it comes to an end: "finished", or "error"
    window: int = 0  # prompts that the engine has at once; 0: all
    constrained_by: str = ""  # the client's name for what constrains the output

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.params.n

    def cancel(self) -> None:
        """End it with an error, now or as soon as it runs."""
        self.cancelled = True
        self.end(ApiError(409, "The request was cancelled.", code="cancelled"))

    def end(self, error: ApiError) -> None:
        """End it with an error, if it runs."""
        if self.interrupt is not None:
            self.interrupt(error)

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(len(item.token_ids) for item in self.prompts)
        output = sum(self.output_tokens.values())
        cached = PromptTokensDetails(sum(self.cached_tokens.values()))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=cached,
            completion_tokens_details=self._details(),
        )

    def _details(self) -> CompletionTokensDetails | UnsetType:
        drafted, accepted = self.drafts
        if not drafted and self.counter is None:
            return UNSET
        return CompletionTokensDetails(
            sum(counter.count for counter in self.thoughts.values()), accepted, drafted - accepted
        )


@dataclass
class Choice:
    """One choice, gathered."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    hidden: bytes = b""

    def add(self, delta: Delta) -> None:
        """Append what one delta brings."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.hidden = delta.hidden


async def collect(engine: EnginePort, job: Job, metrics: Metrics) -> list[Choice]:
    """All choices, whole. Raises ``ApiError``."""
    choices = [Choice() for _ in range(job.num_choices)]
    async with aclosing(run(engine, job, metrics)) as deltas:
        async for index, delta in deltas:
            choices[index].add(delta)
    return choices


async def run(engine: EnginePort, job: Job, metrics: Metrics) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index, delta) of all choices as they come. Closing it cancels everything. Raises ``ApiError``."""
    interrupt = job.interrupt = Interrupt()
    if job.cancelled:
        job.cancel()
    limit, error = min(job.deadline, job.timeout), _too_late(job)
    timer = asyncio.get_running_loop().call_later(limit, interrupt, error)
    merged = _one(engine, job, metrics) if len(job.prompts) == 1 else _several(engine, job, metrics)
    try:
        async with aclosing(merged) as deltas:
            while True:
                try:
                    prompt, item = await interrupt.wait(deltas.__anext__)
                except StopAsyncIteration:
                    break
                index = prompt * job.params.n + item.choice
                if item.token_ids and job.first_token_at is None:
                    job.first_token_at = time.monotonic()
                    job.saw_first_token()
                yield index, item
        job.outcome = "finished"
    except Exception as error:
        job.outcome = "cancelled" if job.cancelled else "error"
        told = _as_api_error(error)
        job.trail.outcome = failure_class(told)
        metrics.failed(told, job.tenant)
        raise told from error
    finally:
        timer.cancel()


async def _one(
    engine: EnginePort, job: Job, metrics: Metrics, prompt: int = 0
) -> AsyncGenerator[tuple[int, Delta], None]:
    """(prompt, delta) of one prompt, of the choices that are returned."""
    best = None if job.params.num_branches == job.params.n else Best(job.params)
    clock = metrics.start(len(job.prompts[prompt].token_ids), job.params, job.trail)
    over = False
    try:
        async with aclosing(_open(engine, job, prompt, metrics, clock)) as deltas:
            async for delta in deltas:
                clock.observe(delta)
                if getattr(delta, "last", False):
                    clock.end()
                    over = True
                _count(job, prompt, _checked(job, delta))
                for shown in (delta,) if best is None else best.take(delta):
                    yield prompt, shown  # the engine is asked for more when the client has taken it
    except Exception:
        clock.failed()
        raise
    finally:
        if not over:
            clock.end()


async def _several(engine: EnginePort, job: Job, metrics: Metrics) -> AsyncGenerator[tuple[int, Delta], None]:
    """(prompt, delta) of all prompts, as they come."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()
    open_prompts = len(job.prompts)
    room = asyncio.Semaphore(job.window or open_prompts)
    tasks = [asyncio.ensure_future(_pump(engine, job, i, queue, metrics, room)) for i in range(open_prompts)]
    try:
        while open_prompts:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_prompts -= 1
            else:
                yield prompt, item
            queue.task_done()  # whoever reads has come back for more
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: EnginePort,
    job: Job,
    prompt: int,
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]],
    metrics: Metrics,
    room: asyncio.Semaphore,
) -> None:
    """Move one prompt's deltas into the queue, once there is room for it; None marks its end."""
    try:
        async with room, aclosing(_one(engine, job, metrics, prompt)) as deltas:
            async for item in deltas:
                queue.put_nowait(item)
                if getattr(item[1], "last", False):
                    await queue.join()  # the engine is asked for more, and told so, when the client has taken it all
        queue.put_nowait((prompt, None))
    except Exception as error:
        queue.put_nowait((prompt, error))


def _open(
    engine: EnginePort, job: Job, prompt: int, metrics: Metrics, clock: RequestClock
) -> AsyncGenerator[Delta, None]:
    suffix = f"-{prompt}" if len(job.prompts) > 1 else ""
    direct: dict[str, Any] = {}
    if job.express is not None and not suffix:
        direct["express"] = partial(_pass_by, job, job.express, metrics, clock)
    deltas = engine.generate(
        job.prompts[prompt].token_ids,
        job.params,
        request_id=job.request_id + suffix,
        priority=job.priority,
        tenant=job.tenant,
        cache_salt=job.cache_salt,
        bulk=job.bulk,
        adapter=job.adapter,
        **direct,
    )
    return cast("AsyncGenerator[Delta, None]", deltas)


def _pass_by(
    job: Job, express: Callable[[int, Delta], bool], metrics: Metrics, clock: RequestClock, delta: Delta
) -> bool:
    """Most tokens of a stream come this way: written and counted without waking anybody."""
    if not express(delta.choice, delta):
        return False
    clock.observe(delta)
    _count(job, 0, delta)
    metrics.wrote(job.trail)
    return True


def _checked(job: Job, delta: Delta) -> Delta:
    if delta.error is not None and CANNOT_FOLLOW in delta.error:
        raise _grammar_failed(job.constrained_by, delta.error)
    if delta.error is not None and NOTHING_LEFT in delta.error:
        raise ApiError(400, _NOTHING_LEFT, code="nothing_left")
    if delta.error is not None or delta.finish_reason in ("error", "out_of_memory", "rejected", "unknown"):
        raise ApiError(500, _ENGINE_FAILED, code="engine_error")
    return delta


def _grammar_failed(name: str, error: str) -> ApiError:
    why = next((why for why in FAULTS if why in error), "it grew too complex, or no token fits")
    message = f"{name or 'grammar'}: the output could not go on under its grammar: {why}; give a simpler grammar."
    return ApiError(400, message, param=name or None, code="grammar_failed")


def _count(job: Job, prompt: int, delta: Delta) -> None:
    candidate = prompt, delta.choice
    job.output_tokens[candidate] = job.output_tokens.get(candidate, 0) + len(delta.token_ids)
    if job.counter is not None:
        if candidate not in job.thoughts:
            job.thoughts[candidate] = job.counter()
        job.thoughts[candidate].push(delta.token_ids)
    if len(delta.spent) > 2:
        job.drafts = job.drafts[0] + int(delta.spent[2]), job.drafts[1] + int(delta.spent[3])
    if delta.choice == 0:
        job.cached_tokens[prompt] = delta.num_cached_tokens


def _too_late(job: Job) -> ApiError:
    """The client's own deadline is its own affair; the server's limit is a failure of the server."""
    if job.deadline <= job.timeout:
        remedy = "give it more time, or ask for fewer tokens"
        return ApiError(
            408, f"deadline_ms: {job.deadline:g} s are over; {remedy}.", param="deadline_ms", code="deadline"
        )
    remedy = "ask for fewer tokens, or start the server with a longer --request-timeout"
    return ApiError(504, f"The request took longer than {job.timeout:g} s; {remedy}.", code="timeout")


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInput) and error.field == "adapter":
        return ApiError(404, _UNLOADED, param="model", code="model_not_found")
    if isinstance(error, InvalidInput):
        return from_invalid_input(error)
    return ApiError(500, _ENGINE_FAILED, code="engine_error")
