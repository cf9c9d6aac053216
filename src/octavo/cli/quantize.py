"""`octavo quantize`: a model into a folder of fewer bytes, and what that cost it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.cli.speed import Speed, measure_speeds
from octavo.core.errors import InvalidInput
from octavo.engine.memory import show_size
from octavo.weights.quant.job import MatrixReport, Plan, QuantizeJob
from octavo.weights.quant.measure import Comparison, compare
from octavo.weights.quant.targets import find_target

__all__ = ["QuantizeOptions", "run_quantize"]

_WINDOW = 256  # tokens of one sequence
_BEFORE = "bf16"  # what the speed is compared with


@dataclass(frozen=True)
class QuantizeOptions:
    """What the command was asked for. `text` is measured on, `calibration` is looked at while quantizing."""

    model: str
    to: str
    out: Path
    method: str = "rtn"
    text: Path | None = None
    calibration: Path | None = None
    alpha: float = 0.5
    max_tokens: int = 2048
    as_json: bool = False
    cache_dir: str = ""


def run_quantize(options: QuantizeOptions) -> None:
    """Quantize, write, measure and print. Raises ``InvalidInput`` before anything is written where it can."""
    from octavo.tokenizers.load import from_folder, from_gguf_metadata
    from octavo.weights.names import open_weights
    from octavo.weights.quant.builtin_text import CALIBRATION, EVALUATION
    from octavo.weights.store import ModelStore

    plan = Plan(find_target(options.to), options.method, options.alpha)
    if options.max_tokens < 2:
        raise InvalidInput("max_tokens", options.max_tokens, "give at least 2")
    path = ModelStore(options.cache_dir or None).resolve(options.model).path
    with open_weights(path) as source, _progress() as bar:
        tokenizer = from_folder(path) if path.is_dir() else from_gguf_metadata(source.metadata)
        job = QuantizeJob(source, plan, options.out)
        limit = job.model.config.max_position_embeddings
        looked_at = _sequences(tokenizer, _text(options.calibration, CALIBRATION), limit, options.max_tokens)
        measured = _sequences(tokenizer, _text(options.text, EVALUATION), limit, options.max_tokens)
        job.tick = bar("quantizing", len(job.shapes))
        job.run(looked_at if plan.needs_inputs else [])
        job.companions(path)
        result = _measure(job, source, options.out, measured, bar("measuring", 2 * len(job.shapes)))
    _show(options, job, result, measure_speeds([(path, _BEFORE), (options.out, plan.target.name)]))


def _text(path: Path | None, builtin: str) -> str:
    if path is None:
        return builtin
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput("text", str(path), f"byte {error.start} is no UTF-8") from None


def _sequences(tokenizer: Any, text: str, limit: int, most: int) -> list[list[int]]:
    """The first tokens of a text, in windows that the model can take."""
    ids = tokenizer.encode(text, parse_special=False)[:most]
    if len(ids) < 2:
        raise InvalidInput("text", text[:40], "is too short: give at least two tokens")
    window = min(_WINDOW, limit)
    return [ids[at : at + window] for at in range(0, len(ids), window)]


def _measure(
    job: QuantizeJob, source: Any, out: Path, sequences: Sequence[Sequence[int]], tick: Callable[[str], None]
) -> Comparison:
    from octavo.weights.names import open_weights

    def reader(weights: Any) -> Callable[[str], Any]:
        def read(name: str) -> Any:
            tick(name)
            return job.model.prepare(name, weights.read(name))

        return read

    with open_weights(out) as after:
        target = job.plan.target
        return compare(job.model, job.program, sequences, reader(source), reader(after), target, job.names)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[str], None]]]:
    """Bars on standard error: call with a label and a total, then with each name that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:

        def bar(label: str, total: int) -> Callable[[str], None]:
            task = progress.add_task(label, total=total)
            return lambda name: progress.advance(task)

        yield bar


# ---- what is printed


def _show(options: QuantizeOptions, job: QuantizeJob, result: Comparison, speeds: list[Speed] | None) -> None:
    after = job.file.size
    if options.as_json:
        value = {
            "format": job.plan.target.name,
            "method": job.plan.method,
            "bytes_before": job.bytes_before,
            "bytes_after": after,
            "speeds": None if speeds is None else [asdict(speed) for speed in speeds],
            **asdict(result),
            "matrices": [asdict(report) for report in job.reports],
        }
        print(json.dumps(value, indent=2))
        return
    _show_layers(job.reports)
    _show_notes(job)
    print(f"\n{options.out}: {job.plan.target.name} by {job.plan.method}")
    print(f"bytes       {show_size(job.bytes_before)} before, {show_size(after)} after")
    print(f"speed       {_speed(speeds)}")
    print(f"KL          {result.kl_mean:.5f} nats a token (largest {result.kl_max:.3f}), {result.positions} tokens")
    print(f"perplexity  {result.perplexity_before:.3f} before, {result.perplexity_after:.3f} after")
    print(f"top token   the same in {100 * result.same_top:.1f}%")


def _speed(speeds: list[Speed] | None) -> str:
    if speeds is None:
        return "not measured: the native backend is not here (octavo doctor tells why)"
    before, after = speeds
    times = f"{before.decode:.0f} tok/s as {before.format} before, {after.decode:.0f} after ({after.format})"
    return f"{times}; prompts {before.prefill:.0f} and {after.prefill:.0f} tok/s"


def _show_layers(reports: Sequence[MatrixReport]) -> None:
    """One row a layer: mean relative error of its weights, of their outputs where seen, and the worst matrix."""
    from rich.console import Console
    from rich.table import Table

    layers: dict[str, list[MatrixReport]] = {}
    for report in sorted(reports, key=lambda report: _layer(report.name)):
        layers.setdefault(str(_layer(report.name)), []).append(report)
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "weight error", "output error", "worst"):
        table.add_column(heading, justify="left" if heading in ("layer", "worst") else "right", no_wrap=True)
    for layer, found in layers.items():
        seen = [report.output_error for report in found if report.output_error is not None]
        worst = max(found, key=lambda report: report.weight_error)
        short = ".".join(worst.name.split(".")[3:-1]) or worst.name
        table.add_row(
            layer,
            f"{100 * sum(report.weight_error for report in found) / len(found):.2f}%",
            f"{100 * sum(seen) / len(seen):.2f}%" if seen else "-",
            f"{short} {100 * worst.weight_error:.2f}%",
        )
    Console(highlight=False).print(table)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else -1


def _show_notes(job: QuantizeJob) -> None:
    size = job.plan.target.group_size
    odd = sorted({job.shapes[name][1] for name in job.names if size and job.shapes[name][1] % size})
    if odd:
        widths = ", ".join(map(str, odd))
        print(f"\nnote: inputs of {widths} are no multiple of {size}: the last group of a row is shorter,")
        print("      which Octavo reads and other loaders may not")
