"""What a response consists of: items (thoughts, a message, calls), whole and as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.decoding.pieces import Piece, Whole
from octavo.serve.answers import Reply
from octavo.serve.forms import call_id

__all__ = ["Event", "ItemEvents", "items"]

Event = tuple[str, dict[str, Any]]  # kind, fields


def items(reply: Reply, status: str, answer: Whole, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
    """The items of a whole answer; there is one at least."""
    found = []
    if answer.reasoning:
        found.append(_reasoning(reply, answer.reasoning))
    if answer.content or not answer.calls:
        found.append(_message(reply, status, [_text(answer.content, logprobs)]))
    calls = [_call(reply, status, index, call.name, call.arguments) for index, call in enumerate(answer.calls)]
    return [*found, *calls]


def _message(reply: Reply, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    name = {"id": f"msg_{reply.request_id}", "type": "message"}
    return {**name, "status": status, "role": "assistant", "content": content}


def _text(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning(reply: Reply, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{reply.request_id}", "type": "reasoning", "summary": [], "content": content}


def _call(reply: Reply, status: str, index: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{index}_{reply.request_id}",
        "type": "function_call",
        "status": status,
        "call_id": call_id(reply.form, reply.job.request_id, 0, index),
        "name": name,
        "arguments": arguments,
    }


class ItemEvents:
    """The events of a stream's items: one item after the other, each begun when its first piece comes.

    Content behind a call has an item of its own in the stream's numbering, and is part of the one message at the end.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply, self._index, self._open = reply, -1, ""
        self._item: dict[str, Any] = {}
        self._parts: list[str] = []
        self._logprobs: list[Any] = []

    def add(self, piece: Piece, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events of a piece."""
        kind = piece.kind
        if kind == "call" or (kind != "arguments" and kind != self._open):
            yield from self.end()
            yield from self._begin(piece)
        if kind == "call":
            return
        self._parts.append(piece.text)
        place = self._place()
        if kind == "content":
            self._logprobs += logprobs
            yield "output_text.delta", {**place, "delta": piece.text, "logprobs": list(logprobs)}
        else:
            name = "reasoning_text.delta" if kind == "reasoning" else "function_call_arguments.delta"
            yield name, {**place, "delta": piece.text}

    def last(self, status: str) -> Iterator[Event]:
        """The events at the end of an answer, of which there is something, even if it is empty."""
        if self._index < 0:
            yield from self._begin(Piece("content", ""))
        yield from self.end(status)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """The events that end the item that is open."""
        if not self._open:
            return
        text, place = "".join(self._parts), self._place()
        if self._open == "call":
            self._item = {**self._item, "status": status, "arguments": text}
            yield "function_call_arguments.done", {**place, "name": self._item["name"], "arguments": text}
        elif self._open == "reasoning":
            self._item = _reasoning(self._reply, text)
            yield "reasoning_text.done", {**place, "text": text}
            yield "content_part.done", {**place, "part": self._item["content"][0]}
        else:
            part = _text(text, self._logprobs)
            self._item = _message(self._reply, status, [part])
            yield "output_text.done", {**place, "text": text, "logprobs": part["logprobs"]}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": self._index, "item": self._item}
        self._open = ""

    def _begin(self, piece: Piece) -> Iterator[Event]:
        self._open, self._index, self._parts, self._logprobs = piece.kind, self._index + 1, [], []
        if piece.kind == "call":
            self._item = _call(self._reply, "in_progress", piece.index, piece.text, "")
        elif piece.kind == "reasoning":
            self._item = _reasoning(self._reply, None)
        else:
            self._item = _message(self._reply, "in_progress", [])
        yield "output_item.added", {"output_index": self._index, "item": self._item}
        if piece.kind != "call":
            part = _text("", []) if piece.kind == "content" else {"type": "reasoning_text", "text": ""}
            yield "content_part.added", {**self._place(), "part": part}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": self._index}
        return place if self._open == "call" else {**place, "content_index": 0}
