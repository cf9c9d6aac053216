"""A history as pictures: a trace for Perfetto or Chrome, and a page that needs nothing but a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.core.history import CAUSES, History, Life, StepView

__all__ = ["page", "page_data", "trace_events"]

_TEMPLATE = Path(__file__).with_name("timeline_page.html")
_DATA = "{{data}}"
_ENGINE, _REQUESTS = 1, 2  # processes of the trace


def _begin(history: History) -> float:
    """The time that is 0 in what is shown: the first arrival or step."""
    times = [life.arrival for life in history.lives.values()] + [step.start for step in history.steps[:1]]
    return min(times, default=0.0)


def trace_events(history: History) -> list[dict[str, Any]]:
    """Events of the Trace Event Format, times in microseconds: one track for steps, one for each request, counters."""
    begin = _begin(history)
    events = [_named(_ENGINE, 0, "process_name", "engine"), _named(_REQUESTS, 0, "process_name", "requests")]
    events.append(_named(_ENGINE, 1, "thread_name", "steps"))
    for step in history.steps:
        events += _step_events(step, begin)
    for track, life in enumerate(history.lives.values(), 1):
        events.append(_named(_REQUESTS, track, "thread_name", life.request))
        events += _life_events(life, track, begin)
    return events


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * seconds, 3)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}


def _step_events(step: StepView, begin: float) -> Iterator[dict[str, Any]]:
    plain = len(step.names) - len(step.reasons)
    args = {
        "step": step.number,
        "decodes": plain,
        "others": [f"{name}: {why}" for name, why in zip(step.names[plain:], step.reasons, strict=True)],
        "tokens": sum(step.shares),
        "model_ms": round(1e3 * step.model, 3),
        **({"failed": step.failed} if step.failed else {}),
    }
    name = f"step {step.number}" + (" failed" if step.failed else "")
    yield _slice(_ENGINE, 1, name, step.start - begin, step.end - step.start, args)
    ts = round(1e6 * (step.start - begin), 3)
    for counter, values in (
        ("sequences", {"running": step.running, "waiting": step.waiting}),
        ("free pages", {"free": step.free}),
        ("tokens in the step", {"tokens": sum(step.shares)}),
    ):
        yield {"ph": "C", "pid": _ENGINE, "tid": 0, "name": counter, "ts": ts, "args": values}


def _life_events(life: Life, track: int, begin: float) -> Iterator[dict[str, Any]]:
    for span in life.spans:
        args = {"request": life.request, "meaning": CAUSES[span.cause]}
        yield _slice(_REQUESTS, track, span.cause, span.start - begin, span.end - span.start, args)
    if life.first_token is not None:
        ts = round(1e6 * (life.first_token - begin), 3)
        yield {"ph": "i", "s": "t", "pid": _REQUESTS, "tid": track, "name": "first token", "ts": ts, "args": {}}


def page_data(history: History, title: str) -> dict[str, Any]:
    """What the page shows, as JSON values; times in milliseconds from the beginning."""
    begin, names = _begin(history), list(CAUSES)

    def ms(seconds: float) -> float:
        return round(1e3 * seconds, 3)

    return {
        "title": title,
        "causes": CAUSES,
        "steps": [
            [
                *(step.number, ms(step.start - begin), ms(step.end - begin), len(step.names), sum(step.shares)),
                *(step.waiting, step.running, step.free, ms(step.model), step.failed),
            ]
            for step in history.steps
        ],
        "lives": [
            {
                "request": life.request,
                "tenant": life.tenant,
                "arrival": ms(life.arrival - begin),
                "wall": ms(life.wall),
                "first": None if life.first_token is None else ms(life.first_token - life.arrival),
                "gap": ms(life.longest_gap),
                "prompt": life.prompt,
                "cached": life.cached,
                "outputs": life.outputs,
                "end": life.reason if life.end is not None else "still running",
                "error": life.error,
                "by": list(dict.fromkeys(life.preempted_by)),
                "spans": [[ms(s.start - begin), ms(s.end - begin), names.index(s.cause)] for s in life.spans],
                "sums": {name: ms(life.sums[name]) for name in names if name in life.sums},
            }
            for life in history.lives.values()
        ],
        "refused": len(history.refused),
    }


def page(history: History, title: str) -> str:
    """The whole page as HTML. Nothing in a recording can end the script element that holds the data."""
    data = json.dumps(page_data(history, title), separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_DATA, data)
