"""Rendering chat templates under limits, in a process that can be killed (`template_worker.py`)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["TemplateRunner", "shared_runner"]

_WORKER = Path(__file__).with_name("template_worker.py")
_MAX_TEMPLATE = 256 << 10
_SLACK = 64 << 10
_WALL_SECONDS = 10.0  # for a machine so busy that CPU time says nothing; includes starting the process


class TemplateRunner:
    """One worker process, started at the first use and again after a template that had to be killed.

    Limits: `cpu_seconds` of CPU time for a render, output of 4 times the input and 64 Ki characters, a template of
    256 Ki characters, 1 GiB of memory. Thread-safe: one render at a time. `render` may wait for the worker, so call it
    from a thread where an event loop runs.
    """

    def __init__(self, cpu_seconds: float = 0.25) -> None:
        self.cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = -1
        self._end: weakref.finalize[..., TemplateRunner] | None = None  # also runs when the interpreter exits

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises `InvalidInput`: what the template refused, its fault, or the limit it passed."""
        if len(template) > _MAX_TEMPLATE:
            raise InvalidInput("chat_template", len(template), f"must be at most {_MAX_TEMPLATE} characters")
        try:
            size = len(json.dumps(variables)) + len(template)
            request = {"template": template, "variables": dict(variables), "seconds": self.cpu_seconds}
            line = json.dumps(request | {"limit": 4 * size + _SLACK}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput("messages", str(error)[:120], "must be made of JSON values") from None
        with self._lock:
            reply = self._exchange(line)
        return _text_of(reply)

    def close(self) -> None:
        """End the worker. A later render starts a new one."""
        with self._lock:
            self._stop()

    def _exchange(self, line: bytes) -> dict[str, str]:
        worker = self._started()
        clock = threading.Timer(_WALL_SECONDS, worker.kill)
        clock.start()
        try:
            answer = _ask(worker, line)
        finally:
            clock.cancel()
        if not answer.endswith(b"\n"):
            self._stop()
            return {"error": "killed", "message": f"took more than {self.cpu_seconds:g} s of CPU time or its memory"}
        reply: dict[str, str] = json.loads(answer)
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._owner == os.getpid() and self._worker.poll() is None:
            return self._worker
        self._stop()
        command = [sys.executable, str(_WORKER)]
        pipe = subprocess.PIPE
        self._worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._worker, self._owner)
        return self._worker

    def _stop(self) -> None:
        self._worker = None
        if self._end is not None:
            self._end()


def _ask(worker: subprocess.Popen[bytes], line: bytes) -> bytes:
    """The worker's answer; no whole line if it ended before it answered."""
    if worker.stdin is None or worker.stdout is None:
        return b""
    try:
        worker.stdin.write(line)
        worker.stdin.flush()
        return worker.stdout.readline()
    except OSError:
        return b""


def _end(worker: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():  # a fork of the process has no child to end
        worker.kill()
        worker.communicate()


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
