"""What one HTTP request has been through: its times by the monotonic clock, its counts, its end. No text of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.histogram import Histogram

__all__ = ["Trail"]

_OF_ENGINE = ("queue", "prefill", "sample")


@dataclass
class Trail:
    """Times are None until they come; ``parts`` are seconds, in the order in which they went by."""

    request_id: str = ""
    route: str = ""
    tenant: str = ""
    priority: int = 0
    stream: bool = False
    num_choices: int = 1
    traceparent: str = ""  # W3C trace context of whoever asks
    arrived: float = field(default_factory=time.monotonic)
    tokenize: float = 0.0
    submitted: float | None = None  # to the engine
    first_token: float | None = None  # in the front end
    last_token: float | None = None
    first_written: float | None = None  # of a stream
    last_written: float | None = None
    ended: float | None = None
    engine: Sequence[float] = ()  # as the engine measured: queue, prefill, sample
    decode: float = 0.0  # from first to last token, in the engine
    core_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens_written: int = 0
    bulk: bool = False  # a line of a batch
    socket_gaps: Histogram | None = None  # where gaps between pieces are counted
    outcome: str = ""  # a finish reason, or a class of failure

    def parts(self) -> dict[str, float]:
        """What the time until the first token was written went into; nothing if there was none."""
        if self.submitted is None or self.first_token is None:
            return {}
        read = max(0.0, self.submitted - self.arrived - self.tokenize)
        told = {"read": read, "tokenize": self.tokenize, **dict(zip(_OF_ENGINE, self.engine, strict=False))}
        if self.engine:
            told["deliver"] = max(0.0, self.first_token - self.submitted - sum(self.engine))
        if self.first_written is not None:
            told["network"] = self.first_written - self.first_token
        return told

    def gap(self, first: float | None, last: float | None) -> float | None:
        """The mean gap between the tokens of one choice, the first and the last of which came at these times."""
        if first is None or last is None or self.num_choices != 1 or self.output_tokens < 2:
            return None
        return (last - first) / (self.output_tokens - 1)

    def fields(self) -> dict[str, Any]:
        """All of it as plain values, for a log."""
        told: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("request_id", "route", "tenant", "priority", "stream", "num_choices", "outcome")
        }
        told |= {f"{kind}_tokens": getattr(self, f"{kind}_tokens") for kind in ("prompt", "cached", "output")}
        told["seconds"] = None if self.ended is None else round(self.ended - self.arrived, 6)
        told["first_token_seconds"] = None if self.first_token is None else round(self.first_token - self.arrived, 6)
        told |= {f"{part}_seconds": round(seconds, 6) for part, seconds in self.parts().items()}
        return {**told, "decode_seconds": round(self.decode, 6), "core_seconds": round(self.core_seconds, 6)}
