"""OpenTelemetry: a span for each request, with one below it for each part of its time. An extra, and off by default.

request  |read|tokenize|queue|prefill|sample|deliver|network|        decode        |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.serve.trail import Trail

__all__ = ["Tracing", "tracing_to"]

_ATTRIBUTES = {
    "request_id": "gen_ai.request.id", "route": "http.route", "tenant": "octavo.tenant", "priority": "octavo.priority",
    "num_choices": "gen_ai.request.choice.count", "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens", "cached_tokens": "octavo.usage.cached_tokens",
    "core_seconds": "octavo.usage.core_seconds", "outcome": "octavo.outcome",
}  # fmt: skip


class Tracing:
    """Makes spans of trails when they end. ``provider`` is OpenTelemetry's, and is shut down with `close`."""

    def __init__(self, provider: Any, model: str) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("octavo")
        self._inside, self._extract = set_span_in_context, TraceContextTextMapPropagator().extract

    def ended(self, trail: Trail) -> None:
        """A request is over."""
        epoch = time.time() - time.monotonic()
        end = trail.arrived if trail.ended is None else trail.ended
        told = {word: getattr(trail, name) for name, word in _ATTRIBUTES.items()}
        parent = self._extract({"traceparent": trail.traceparent}) if trail.traceparent else None
        about: Mapping[str, Any] = {**told, "gen_ai.request.model": self._model}
        span = self._tracer.start_span("request", parent, attributes=about, start_time=_ns(epoch + trail.arrived))
        for name, begin, until in _stretches(trail, end):
            below = self._tracer.start_span(name, self._inside(span), start_time=_ns(epoch + begin))
            below.end(_ns(epoch + until))
        span.end(_ns(epoch + end))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def tracing_to(endpoint: str, model: str) -> Tracing | None:
    """Spans sent to a collector (OTLP over HTTP); None without one. Raises ``InvalidInput`` without the extra."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        remedy = "needs OpenTelemetry, which is not installed: pip install 'octavo[otel]'"
        raise InvalidInput("otlp_endpoint", endpoint, remedy) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return Tracing(provider, model)


def _stretches(trail: Trail, end: float) -> Iterator[tuple[str, float, float]]:
    """Each part with its beginning and end."""
    at = trail.arrived
    for name, seconds in trail.parts().items():
        yield name, at, at + seconds
        at += seconds
    if trail.first_token is not None:
        yield "decode", trail.first_token, trail.last_token or end


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
