"""A response of OpenAI's, whole, streamed or unseen; kept while and after it runs, if it is to be kept.

created  in_progress  (events of each item: `response_items.py`)+  completed | incomplete | (error  failed)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from octavo.decoding.pieces import Piece, Whole
from octavo.serve.answers import Reply
from octavo.serve.apis.response_items import ItemEvents, items
from octavo.serve.apis.response_store import ResponseStore, StoredResponse, Turn
from octavo.serve.apis.response_turns import items_of
from octavo.serve.dialects import Dialect, named_event
from octavo.serve.errors import ApiError
from octavo.serve.forms import Reading, read_whole
from octavo.serve.generate import Choice, collect, run
from octavo.serve.logprobs import chat_logprobs
from octavo.serve.metrics import Metrics
from octavo.serve.port import EnginePort

__all__ = ["RESPONSES", "Exchange", "input_items", "response_events", "response_whole", "run_unseen"]

RESPONSES = Dialect(
    ApiError.body,
    lambda body: named_event({"type": "error", **body["error"]}),
    theirs={
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    },
)


@dataclass
class Exchange:
    """A request for a response: its body, its turns (without instructions), and where its response is kept."""

    request: Any
    turns: list[Turn]
    store: ResponseStore | None
    stored: StoredResponse | None = None

    def begin(self, reply: Reply) -> StoredResponse:
        """The response as it starts."""
        body = _body(reply, "in_progress", [])
        self.stored = StoredResponse(reply.job.tenant, body, self.turns, reply.job.cancel)
        if self.store is not None:
            self.store.keep(self.stored)
        return self.stored

    def end(self, body: dict[str, Any], answer: Whole) -> None:
        """The response as it ended."""
        stored = self.stored
        if stored is None:
            return
        kept = self.store is not None and self.store.holds(stored)
        stored.body, stored.stop = body, None
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        turn: Turn = {"role": "assistant", "content": answer.content}
        if calls:
            turn["tool_calls"] = [
                {"id": item["call_id"], "type": "function", "function": _named(item)} for item in calls
            ]
        stored.turns = [*stored.turns, turn]
        if kept and self.store is not None:
            self.store.keep(stored)


def response_whole(engine: EnginePort, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer, kept. Costs what its logprobs cost."""
    choice = choices[0]
    exchange: Exchange = reply.request
    if exchange.stored is None:
        exchange.begin(reply)
    answer = read_whole(reply.form, choice.text)
    body = _ended(engine, reply, choice, answer)
    exchange.end(body, answer)
    return body


async def run_unseen(engine: EnginePort, reply: Reply, metrics: Metrics, close: Callable[[], object]) -> None:
    """Make a response that nobody waits for."""
    try:
        response_whole(engine, reply, await collect(engine, reply.job, metrics))
    except ApiError as error:
        reply.request.end(_failed(reply, error), Whole())
    finally:
        close()


async def response_events(engine: EnginePort, reply: Reply, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The stream. One that its client leaves is kept as cancelled."""
    events, exchange, choice = _Events(), reply.request, Choice()
    reading, made = Reading(reply.form), ItemEvents(reply)
    started = exchange.begin(reply).body
    body, answer = {**started, "status": "cancelled"}, None
    try:
        for kind in ("created", "in_progress"):
            yield events.make(kind, response=started)
        async with aclosing(run(engine, reply.job, metrics)) as deltas:
            async for _, delta in deltas:
                choice.add(delta)
                shown = _logprobs(engine, reply, delta.logprobs or ())
                for piece in _with_logprobs(reading.push(delta), shown):
                    for kind, fields in made.add(piece, shown):
                        yield events.make(kind, **fields)
        answer = read_whole(reply.form, choice.text)
        body = _ended(engine, reply, choice, answer)
        for kind, fields in made.last(body["status"]):
            yield events.make(kind, **fields)
    except ApiError as error:
        error, body = RESPONSES.blamed(error), _failed(reply, error)
        if body["status"] == "failed":
            yield events.make("error", code=error.code, message=error.message, param=error.param)
    finally:
        exchange.end(body, answer or read_whole(reply.form, choice.text))
    yield events.make(_LAST.get(body["status"], "incomplete"), response=body)


_LAST = {"completed": "completed", "failed": "failed"}


class _Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = -1

    def make(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        name = kind if kind == "error" else f"response.{kind}"
        return named_event({"type": name, "sequence_number": self._number, **values})


def _with_logprobs(pieces: list[Piece], shown: Sequence[Any]) -> list[Piece]:
    """The pieces; logprobs without any come with an empty text."""
    return [Piece("content", "")] if shown and not pieces else pieces


def _named(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in ("name", "arguments")}


def _logprobs(engine: EnginePort, reply: Reply, entries: Sequence[Any]) -> list[Any]:
    wanted = reply.job.params.logprobs is not None and entries
    return list(chat_logprobs(engine.tokenizer, entries)["content"]) if wanted else []


def _ended(engine: EnginePort, reply: Reply, choice: Choice, answer: Whole) -> dict[str, Any]:
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    body = _body(reply, status, items(reply, status, answer, _logprobs(engine, reply, choice.logprobs)))
    if status == "incomplete":
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    return body


def _failed(reply: Reply, error: ApiError) -> dict[str, Any]:
    if error.code == "cancelled":
        return _body(reply, "cancelled", [])
    return {**_body(reply, "failed", []), "error": {"code": error.code or "server_error", "message": error.message}}


def _body(reply: Reply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object, echoing what was asked for."""
    asked, usage = reply.request.request, reply.job.usage()
    details = usage.completion_tokens_details
    counted = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0} if details is UNSET else asdict(details),
        "total_tokens": usage.total_tokens,
    }
    echoed = ("instructions", "max_output_tokens", "previous_response_id", "top_logprobs")
    return {
        "id": reply.answer_id,
        "object": "response",
        "created_at": reply.created,
        "status": status,
        **{name: getattr(asked, name) for name in echoed},
        "background": bool(asked.background),
        "store": asked.store is not False,
        "model": reply.model,
        "error": None,
        "incomplete_details": None,
        "output": output,
        "metadata": asked.metadata or {},
        "temperature": reply.job.params.temperature,
        "top_p": reply.job.params.top_p,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "truncation": "disabled",
        "text": asked.text or {"format": {"type": "text"}},
        "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
        "usage": None if status in ("in_progress", "failed", "cancelled") else counted,
        **({"warnings": reply.warnings} if reply.warnings else {}),
    }


def input_items(stored: StoredResponse) -> dict[str, Any]:
    """The turns that a response was made from, as a list of items."""
    turns = stored.turns if stored.stop is not None else stored.turns[:-1]
    found = list(items_of(turns))
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, **ends, "has_more": False}
