"""The process that renders chat templates. Run as a script by `template_runner.py`; imports nothing of Octavo.

A template comes with a model, so it is data from a stranger: it runs in Jinja's immutable sandbox, in a process that
holds nothing else, under limits that the kernel enforces: CPU time by a timer whose default action ends the process,
memory by an address-space limit. Requests and answers are JSON, one a line.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's files must not hide top-level modules

from jinja2 import TemplateError, TemplateSyntaxError, ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_COMPILE_SECONDS = 2.0
_MEMORY_BYTES = 1 << 30
_KEPT_TEMPLATES = 8


class Raised(Exception):
    """The template itself refused its input."""


class GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for inference it is its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the helpers that published templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise Raised(str(message))


def answer(request: dict[str, Any], compiled: Callable[[str], Any]) -> dict[str, str]:
    """`{"text"}`, or `{"error", "message"}` with error one of syntax, raised, render, output."""
    try:
        _cpu_limit(_COMPILE_SECONDS)
        template = compiled(request["template"])
        _cpu_limit(request["seconds"])
        return _rendered(template, request["variables"], request["limit"])
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except Raised as error:
        return {"error": "raised", "message": str(error)}
    except (TemplateError, Exception) as error:
        return {"error": "render", "message": f"{type(error).__name__}: {error}"[:500]}
    finally:
        _cpu_limit(0)


def _rendered(template: Any, variables: dict[str, Any], limit: int) -> dict[str, str]:
    parts: list[str] = []
    left = limit
    for part in template.generate(**variables):
        left -= len(part)
        if left < 0:
            return {"error": "output", "message": f"more than {limit} characters"}
        parts.append(part)
    return {"text": "".join(parts)}


def _cpu_limit(seconds: float) -> None:
    """End the process after so much CPU time; 0 stops the clock. (Elsewhere than POSIX the caller's clock must do.)"""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_resources() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the owner, who closes our input
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer requests until the input ends."""
    environment = make_environment()
    kept: dict[str, Any] = {}

    def compiled(source: str) -> Any:
        if source not in kept:
            if len(kept) >= _KEPT_TEMPLATES:
                kept.pop(next(iter(kept)))
            kept[source] = environment.from_string(source)
        return kept[source]

    _limit_resources()
    for line in sys.stdin.buffer:
        reply = answer(json.loads(line), compiled)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
