"""The process that renders chat templates, begun by `template_runner.py`.

A template comes with a model, so it is data from a stranger: it runs in Jinja's immutable sandbox, in a process that
holds nothing else, under limits that the kernel enforces: CPU time by a timer whose default action ends the process,
memory by an address-space limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.tokenizers.worker_process import limit_cpu, serve

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
        limit_cpu(_COMPILE_SECONDS)
        template = compiled(request["template"])
        limit_cpu(request["seconds"])
        return _rendered(template, request["variables"], request["limit"])
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except Raised as error:
        return {"error": "raised", "message": str(error)}
    except (TemplateError, Exception) as error:
        return {"error": "render", "message": f"{type(error).__name__}: {error}"[:500]}
    finally:
        limit_cpu(0)


def _rendered(template: Any, variables: dict[str, Any], limit: int) -> dict[str, str]:
    parts: list[str] = []
    left = limit
    for part in template.generate(**variables):
        left -= len(part)
        if left < 0:
            return {"error": "output", "message": f"more than {limit} characters"}
        parts.append(part)
    return {"text": "".join(parts)}


def main() -> None:
    """Answer requests until the input ends."""
    serve(_prepared, memory_bytes=_MEMORY_BYTES)


def _prepared(_: object) -> Callable[[dict[str, Any]], dict[str, str]]:
    environment = make_environment()
    kept: dict[str, Any] = {}

    def compiled(source: str) -> Any:
        if source not in kept:
            if len(kept) >= _KEPT_TEMPLATES:
                kept.pop(next(iter(kept)))
            kept[source] = environment.from_string(source)
        return kept[source]

    return lambda request: answer(request, compiled)
