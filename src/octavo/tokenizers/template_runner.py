"""Rendering chat templates under limits, in a process that can be killed (`template_worker.py`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.worker import KillableWorker, WorkerEnded

__all__ = ["TemplateRunner", "shared_runner"]

_MAX_TEMPLATE = 256 << 10
_SLACK = 64 << 10


class TemplateRunner:
    """One worker process, started at the first use and again after a template that had to be killed.

    Limits: `cpu_seconds` of CPU time for a render, output of 4 times the input and 64 Ki characters, a template of
    256 Ki characters, 1 GiB of memory. Thread-safe: one render at a time. `render` may wait for the worker, so call it
    from a thread where an event loop runs.
    """

    def __init__(self, cpu_seconds: float = 0.25) -> None:
        self.cpu_seconds = cpu_seconds
        self._worker = KillableWorker("octavo.tokenizers.template_worker")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises `InvalidInput`: what the template refused, its fault, or the limit it passed."""
        if len(template) > _MAX_TEMPLATE:
            raise InvalidInput("chat_template", len(template), f"must be at most {_MAX_TEMPLATE} characters")
        try:
            size = len(json.dumps(variables)) + len(template)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput("messages", str(error)[:120], "must be made of JSON values") from None
        request = {"template": template, "variables": dict(variables), "seconds": self.cpu_seconds}
        try:
            reply = self._worker.ask(request | {"limit": 4 * size + _SLACK})
        except WorkerEnded:
            what = f"took more than {self.cpu_seconds:g} s of CPU time or its memory"
            reply = {"error": "killed", "message": what}
        return _text_of(reply)

    def close(self) -> None:
        """End the worker. A later render starts a new one."""
        self._worker.close()


@functools.cache
def shared_runner() -> TemplateRunner:
    """The process-wide runner: starting a worker costs a tenth of a second, and it keeps no state between renders."""
    return TemplateRunner()


def _text_of(reply: Mapping[str, str]) -> str:
    error = reply.get("error")
    if error is None:
        return reply["text"]
    message = reply["message"]
    if error == "raised":
        raise InvalidInput("messages", message, "the model's chat template refused them")
    if error == "syntax":
        raise InvalidInput("chat_template", message, "must be a valid Jinja template")
    if error == "render":
        raise InvalidInput("messages", message, "the model's chat template cannot render them")
    raise InvalidInput("chat_template", message, "rendering passed its limit; use another template")
