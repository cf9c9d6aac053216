"""`octavo replay`, `explain` and `timeline`: what a recording holds, for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.explain import Explanation, explain
from octavo.core.history import CAUSES, History, history_of
from octavo.core.what_if import Outcome, load_of, outcome_of, simulate
from octavo.engine.explained import engine_names
from octavo.engine.recorder import Epoch, read_epochs
from octavo.engine.replay import ReplayReport, replay_epoch
from octavo.engine.trace import page, trace_events

__all__ = ["chosen_epoch", "explanation_text", "run_explain", "run_replay", "run_timeline", "run_what_if", "warn"]


def warn(text: str) -> None:
    """To standard error: it is about the answer, and no part of it."""
    print(text, file=sys.stderr)


def chosen_epoch(path: Path, number: int | None) -> Epoch:
    """One epoch of a recording, the last one for None. Says so if the end is damaged. Raises ``InvalidInput``."""
    epochs, damage = read_epochs(path)
    if damage is not None:
        warn(f"the end cannot be read ({damage}); here is what comes before it")
    if number is None:
        if len(epochs) > 1:
            warn(f"the last of {len(epochs)} epochs; --epoch names another")
        return epochs[-1]
    for epoch in epochs:
        if epoch[0]["epoch"] == number:
            return epoch
    raise InvalidInput("epoch", number, f"the recording has epochs 0 to {epochs[-1][0]['epoch']}")


def run_replay(path: Path, number: int | None, run_model: bool, model: str, as_json: bool) -> bool:
    """Replay and print; whether everything came out as recorded."""
    report = replay_epoch(chosen_epoch(path, number), run_model=run_model, model=model, say=warn)
    if as_json:
        print(json.dumps(_report_json(report), indent=2))
    else:
        print(_report_text(report))
    return report.difference is None


def run_what_if(path: Path, number: int | None, pages: int | None, changes: dict[str, Any], as_json: bool) -> None:
    """Print what the recorded load would have met with other settings. Raises ``InvalidInput``."""
    epoch = chosen_epoch(path, number)
    load = load_of(epoch)
    asked = {**changes, **({} if pages is None else {"pages": pages})}
    outcomes = {
        "as recorded": outcome_of(history_of(epoch), epoch),
        "the same, simulated": simulate(load),
        ", ".join(f"{name} {value}" for name, value in asked.items()): simulate(load, num_pages=pages, **changes),
    }
    if as_json:
        print(json.dumps({name: {**vars(o), "tokens_per_s": o.tokens_per_s} for name, o in outcomes.items()}, indent=2))
        return
    for line in _outcome_lines(outcomes):
        print(line)


def _outcome_lines(outcomes: dict[str, Outcome]) -> list[str]:
    rows: list[tuple[str, Callable[[Outcome], Any]]] = [
        ("requests finished", lambda o: f"{o.finished} of {o.requests}"),
        ("refused, shed, late, failed", lambda o: o.dropped),
        ("first token, median", lambda o: _ms(o.ttft_median)),
        ("first token, p99", lambda o: _ms(o.ttft_p99)),
        ("longest gap, median", lambda o: _ms(o.gap_median)),
        ("longest gap, p99", lambda o: _ms(o.gap_p99)),
        ("output tokens/s", lambda o: f"{o.tokens_per_s:.1f}"),
        ("seconds in all", lambda o: f"{o.seconds:.2f}"),
        ("steps", lambda o: o.steps),
        ("preemptions", lambda o: o.preemptions),
    ]
    widths = [max(len(name), 12) for name in outcomes]
    lines = [" " * 28 + "  ".join(f"{name:>{width}s}" for name, width in zip(outcomes, widths, strict=True))]
    for label, of in rows:
        cells = [f"{of(o)!s:>{width}s}" for o, width in zip(outcomes.values(), widths, strict=True)]
        lines.append(f"{label:28s}" + "  ".join(cells))
    made_up = max(outcome.made_up for outcome in outcomes.values())
    if made_up:
        lines.append(f"{made_up} tokens were made up: their requests ended earlier when they were recorded")
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _report_json(report: ReplayReport) -> dict[str, Any]:
    values = {name: value for name, value in vars(report).items() if name != "difference"}
    return {**values, "difference": None if report.difference is None else str(report.difference)}


def _report_text(report: ReplayReport) -> str:
    done = f"{report.num_events} events, {report.num_steps} steps, {report.num_tokens} tokens"
    if report.difference is not None:
        return f"different after {done}:\n{report.difference}"
    tokens = "the model ran again and drew the same tokens" if report.ran_model else "tokens were taken as recorded"
    end = "" if report.is_whole else "; the recording was not closed"
    return f"identical: {done}; {tokens}{end}"


# ---- explain


def run_explain(path: Path, number: int | None, request: str, as_json: bool) -> None:
    """Print one request's causes, or a table of all. Raises ``InvalidInput`` for a request that is not there."""
    history = history_of(chosen_epoch(path, number))
    asked = re.sub("^(chatcmpl-|cmpl-|msg_|resp_)", "", request)  # the ``id`` of an answer names its request
    names = engine_names(history, asked) or [request]
    explained = [explain(history, name) for name in (names if request else history.lives)]
    if as_json:
        values = [one.to_dict() for one in explained]
        print(json.dumps(values[0] if request and len(values) == 1 else values, indent=2))
    elif request:
        print("\n".join(map(explanation_text, explained)))
    else:
        _print_table(explained, history)


def explanation_text(one: Explanation) -> str:
    """A request's causes, a line each, and their sum."""
    life = one.life
    end = life.reason + (f" ({life.error})" if life.error else "") if life.end is not None else "still running"
    first = "" if life.first_token is None else f", first token after {life.first_token - life.arrival:.3f} s"
    lines = [f"{life.request}: {life.wall:.3f} s{first}; {life.prompt} + {life.outputs} tokens; {end}"]
    for cause in one.causes:
        share = 100.0 * cause.seconds / life.wall if life.wall else 0.0
        lines.append(f"  {cause.seconds:9.3f} s {share:5.1f}%  {cause.name:10s}  {cause.detail}")
    return "\n".join([*lines, f"  {one.total:9.3f} s         in all"])


def _print_table(explained: list[Explanation], history: History) -> None:
    used = [name for name in CAUSES if any(name in one.life.sums for one in explained)]
    width = max([len(one.life.request) for one in explained] + [7])
    print(" ".join([f"{'seconds':{width}s}", *(f"{name:>10s}" for name in [*used, "in all", "wall"])]))
    for one in explained:
        values = [one.life.sums.get(name, 0.0) for name in used]
        cells = [f"{value:10.3f}" if value else f"{'':10s}" for value in values]
        print(" ".join([f"{one.life.request:{width}s}", *cells, f"{one.total:10.3f} {one.life.wall:10.3f}"]))
    whole = sum(one.life.wall for one in explained) or 1.0
    shares = [100 * sum(one.life.sums.get(name, 0.0) for one in explained) / whole for name in used]
    print(" ".join([f"{'of all':{width}s}", *(f"{share:9.1f}%" for share in shares)]))
    if history.refused:
        print(f"{len(history.refused)} requests were refused; the first: {history.refused[0]['reason']}")


# ---- timeline


def run_timeline(path: Path, number: int | None, out: Path | None, trace: Path | None) -> None:
    """Write the page, and the trace beside it. Raises ``InvalidInput`` for a recording that cannot be read."""
    page_file = path.with_suffix(".html") if out is None else out
    trace_file = page_file.with_suffix(".trace.json") if trace is None else trace
    epoch = chosen_epoch(path, number)
    history = history_of(epoch)
    model = epoch[0]["facts"].get("model") or "a run"
    page_file.write_text(page(history, f"Octavo timeline: {model}"), encoding="utf-8")
    print(f"{page_file}: open it in a browser")
    events = {"traceEvents": trace_events(history), "displayTimeUnit": "ms"}
    trace_file.write_text(json.dumps(events, separators=(",", ":")), encoding="utf-8")
    print(f"{trace_file}: open it in https://ui.perfetto.dev or chrome://tracing")
