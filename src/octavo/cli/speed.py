"""How fast two models run on this machine, measured in turns: for `octavo quantize`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from octavo.backends import available_backends
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.core.request import Request

__all__ = ["Speed", "measure_speeds"]

_PROMPT, _OUTPUT, _ROUNDS = 64, 32, 3


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one stream: of its output, and of its prompt."""

    format: str
    decode: float
    prefill: float


def measure_speeds(models: Sequence[tuple[Path, str]]) -> list[Speed] | None:
    """Each (model, format) on the native backend; None where there is none."""
    if "native" not in available_backends():
        return None
    loaded = [_load(path, kind) for path, kind in models]
    times: list[list[tuple[float, float]]] = [[] for _ in models]
    for count in range(_ROUNDS + 1):
        for each, engine in zip(times, loaded, strict=True):
            each.append(_times(engine, count))
    return [_speed(kind, each[1:]) for (_, kind), each in zip(models, times, strict=True)]  # the first warms up


def _load(path: Path, kind: str) -> Any:
    from octavo.engine.config import EngineConfig
    from octavo.engine.loader import load_engine

    config = EngineConfig(
        model=str(path),
        backend="native",
        format=kind,
        prefix_cache=False,
        max_seq_len=_PROMPT + _OUTPUT,
        max_running_requests=1,
        max_batched_tokens=_PROMPT,
    )
    return load_engine(config, say=lambda line: None)


def _times(loaded: Any, count: int) -> tuple[float, float]:
    """Seconds until the first token of a prompt, and until the last."""
    core, parts = loaded.core, loaded.parts
    prompt = [(place * 7919 + count) % parts.config.vocab_size for place in range(_PROMPT)]
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    core.submit(Request(str(count), prompt, params, model=parts.name, namespace=parts.namespace()), 0.0)
    begin, came = time.perf_counter(), []
    while core.has_work:
        tokens = sum(event.kind == EventKind.TOKEN for event in core.step(0.0))
        came += [time.perf_counter() - begin] * tokens
    return came[0], came[-1]


def _speed(kind: str, times: Sequence[tuple[float, float]]) -> Speed:
    decode = median((_OUTPUT - 1) / (last - first) for first, last in times)
    return Speed(kind, decode, median(_PROMPT / first for first, _ in times))
