"""One batch: its record, replaced whole at each change of state, and its journals, a line for each request done.

batches/batch_ID.json   the record          batches/batch_ID.out, .err   answers and errors, as they come

A request is done once its line is on disk. A line that a crash has cut short is cut off, and its request runs again.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from octavo.serve.batches.files import file_id
from octavo.serve.batches.folder import Folder

__all__ = ["OPEN", "BatchRecord", "Journal", "ended", "new_batch"]

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_USAGE = (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens"), ("total_tokens", "total_tokens"))


class BatchRecord(msgspec.Struct, kw_only=True):
    """What is known of a batch; names and states are OpenAI's. ``output``, ``errors_in``: files that it will have."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output: str
    errors_in: str
    model: str
    status: str = "validating"
    then: str = "completed"  # what it is to become once its files are there
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = []
    times: dict[str, int] = {}  # when it came into its states
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: dict[str, int] = {}

    def turn(self, status: str) -> None:
        """Take another state, now."""
        self.status = status
        self.times = {**self.times, f"{status}_at": int(time.time())}

    def told(self) -> dict[str, Any]:
        """As its owner sees it."""
        plain = ("id", "endpoint", "input_file_id", "completion_window", "created_at", "expires_at", "status", "model")
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            **{name: getattr(self, name) for name in plain},
            **{f"{state}_at": self.times.get(f"{state}_at") for state in states},
            "object": "batch",
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            "usage": self._usage() if self.tokens else None,
        }

    def _usage(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: self.tokens.get(name, 0) for name, _ in _USAGE}
        told["input_tokens_details"] = {"cached_tokens": self.tokens.get("cached_tokens", 0)}
        return {**told, "output_tokens_details": {"reasoning_tokens": self.tokens.get("reasoning_tokens", 0)}}

    def count(self, line: dict[str, Any]) -> None:
        """A line of a journal: one request is done."""
        response = line.get("response")
        if response is None or response["status_code"] >= 300:
            self.failed += 1
            return
        self.completed += 1
        usage = response["body"].get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        used = {name: usage.get(name, usage.get(other, 0)) for name, other in _USAGE}
        used["cached_tokens"] = details.get("cached_tokens", 0)
        of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        used["reasoning_tokens"] = of_output.get("reasoning_tokens", 0)
        self.tokens = {name: self.tokens.get(name, 0) + value for name, value in used.items()}


def new_batch(owner: str, window: tuple[str, int], **about: Any) -> BatchRecord:
    """A batch that begins now, with a window in words and in seconds."""
    now = int(time.time())
    return BatchRecord(
        id=f"batch_{uuid.uuid4().hex[:24]}",
        owner=owner,
        completion_window=window[0],
        created_at=now,
        expires_at=now + window[1],
        output=file_id(),
        errors_in=file_id(),
        **about,
    )


class Journal:
    """What is on disk of one batch."""

    def __init__(self, folder: Folder, record: BatchRecord) -> None:
        self._folder, self._record = folder, record

    def save(self) -> None:
        """Replace the record."""
        self._folder.write(f"batches/{self._record.id}.json", msgspec.json.encode(self._record))

    def name(self, suffix: str) -> str:
        """Of the journal of answers (out) or of errors (err)."""
        return f"batches/{self._record.id}.{suffix}"

    def add(self, line: dict[str, Any]) -> None:
        """A request is done: its line is on disk, and then counted."""
        response = line["response"]
        fine = response is not None and response["status_code"] < 300
        self._folder.append(self.name("out" if fine else "err"), msgspec.json.encode(line) + b"\n")
        self._record.count(line)

    def done(self) -> set[str]:
        """Which requests are done; what a crash has cut short is cut off. The record counts them anew."""
        record, found = self._record, set[str]()
        record.completed, record.failed, record.tokens = 0, 0, {}
        for suffix in ("out", "err"):
            found |= self._recover(self.name(suffix))
        return found

    def _recover(self, name: str) -> set[str]:
        size = self._folder.size(name)
        if size is None:
            return set()
        found, whole = set[str](), 0
        with (self._folder.path / name).open("rb") as file:
            for raw in file:
                line = _line(raw)
                if line is None:
                    break
                self._record.count(line)
                found.add(line["custom_id"])
                whole += len(raw)
        if whole < size:
            self._folder.cut(name, whole)
        return found

    def forget(self) -> None:
        """Remove all of it."""
        for suffix in ("out", "err", "json"):
            self._folder.remove(self.name(suffix))


def _line(raw: bytes) -> dict[str, Any] | None:
    """A line of a journal; None for what a crash has cut short."""
    try:
        return dict(msgspec.json.decode(raw)) if raw.endswith(b"\n") else None
    except (msgspec.DecodeError, TypeError):
        return None


def ended(
    custom_id: str, *, response: dict[str, Any] | None = None, code: str = "", message: str = ""
) -> dict[str, Any]:
    """The line of a request that is done: with what was answered, or why it never ran."""
    error = {"code": code, "message": message} if code else None
    return {"id": f"batch_req_{uuid.uuid4().hex[:24]}", "custom_id": custom_id, "response": response, "error": error}
