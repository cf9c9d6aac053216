"""`octavo bench`: what this machine gives, and what the engine and its ops make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.flags import config_flags
from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig

__all__ = ["bench_app"]

_SCHEMA = 1  # of the JSON that is written

bench_app = typer.Typer(no_args_is_help=True, help="Measure the engine: tokens/s (offline), each op (ops).")
Model = Annotated[str, typer.Argument(help="A known name, a hub id, a folder, or a .gguf file.", show_default=True)]
Rounds = Annotated[int, typer.Option("--rounds", help="Samples of each, taken in turn; the median is shown.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything here; - prints it instead.")]


@bench_app.command()
@config_flags(engine=EngineConfig)
def offline(
    engine: EngineConfig,
    model: Model = EngineConfig.model,
    rounds: Rounds = 5,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of a stream.")] = 128,
    output: Annotated[int, typer.Option(help="Output tokens of a stream.")] = 128,
    streams: Annotated[str, typer.Option(help="Streams at once.")] = "1,16,64",
    prefill: Annotated[str, typer.Option(help="Prompts to prefill alone.")] = "512,1024",
    context: Annotated[int, typer.Option(help="Tokens before a long-context stream; 0: none.")] = 4096,
    json_file: JsonFile = None,
) -> None:
    """Tokens a second of the whole engine in process: one stream, many, prefill, long context."""
    from octavo.engine.bench_machine import machine_card
    from octavo.engine.bench_offline import OfflineBench, standard_workloads
    from octavo.engine.loader import load_engine

    _check_rounds(rounds)
    workloads = standard_workloads(prompt, output, _numbers("streams", streams), _numbers("prefill", prefill), context)
    loaded = load_engine(engine, say=_say)
    card = machine_card(loaded.parts.backend)
    bench = OfflineBench(loaded, workloads)
    _rounds(rounds, bench.round)
    _give(
        {
            **_head("offline", engine, loaded.parts, card, rounds),
            "workloads": bench.results(),
            "left_out": bench.left_out,
        },
        json_file,
        _show_offline,
    )


@bench_app.command()
@config_flags(engine=EngineConfig)
def ops(
    engine: EngineConfig,
    model: Model = EngineConfig.model,
    rounds: Rounds = 5,
    rows: Annotated[str, typer.Option(help="Sequences that decode at once.")] = "1,8,16,64",
    prefill: Annotated[int, typer.Option(help="Tokens of a prefill.")] = 512,
    context: Annotated[int, typer.Option(help="Tokens behind each decoding sequence.")] = 128,
    long_context: Annotated[int, typer.Option(help="Tokens behind one sequence alone.")] = 4096,
    json_file: JsonFile = None,
) -> None:
    """GB/s and GOP/s of each op of the model, decoding and in prefill, against what the machine gives."""
    from octavo.engine.bench_machine import machine_card
    from octavo.engine.bench_ops import OpsBench, require_native, standard_points
    from octavo.engine.loader import load_parts

    _check_rounds(rounds)
    counts = _numbers("rows", rows)
    parts = load_parts(engine)
    require_native(parts.backend)
    limit = parts.config.max_position_embeddings
    points, left_out = standard_points(counts, prefill, context, long_context, limit)
    bench = OpsBench(parts, points, engine.page_size)
    card = machine_card(parts.backend)
    _rounds(rounds, bench.round)
    results = bench.results(card["native"])
    _give(
        {
            **_head("ops", engine, parts, card, rounds),
            "states": bench.states,
            "ops": results,
            "left_out": {point.name: f"does not fit into {limit} tokens" for point in left_out},
        },
        json_file,
        _show_ops,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _numbers(field: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise InvalidInput(field, text, "give whole numbers of at least 1 with commas between them")
    return values


def _check_rounds(count: int) -> None:
    if count < 1:
        raise InvalidInput("rounds", count, "give at least 1")


def _rounds(count: int, run: Callable[[bool], None]) -> None:
    """A warm-up, then `count` rounds."""
    for at in range(count + 1):
        run(at > 0)


def _head(what: str, engine: EngineConfig, parts: Any, card: dict[str, Any], rounds: int) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "bench": what,
        "machine": card,
        "model": parts.name,
        "weight_format": parts.weight_format,
        "weight_bytes": parts.weight_bytes,
        "kv_dtype": getattr(parts.model, "kv_dtype", "fp32"),
        "config": asdict(engine),
        "rounds": rounds,
    }


def _give(result: dict[str, Any], json_file: Path | None, show: Callable[[dict[str, Any]], None]) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if json_file is not None and str(json_file) == "-":
        sys.stdout.write(text)
        return
    _show_machine(result)
    show(result)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")


# ---- tables


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _print(value: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a pipe gets whole lines
    console.print(value, soft_wrap=isinstance(value, str))


def _show_machine(result: dict[str, Any]) -> None:
    card, native = result["machine"], result["machine"]["native"]
    load = "" if card["load"] is None else f", load {card['load'][0]:.2f}"
    _print(f"{result['model']}: weights {result['weight_format']}, keys and values {result['kv_dtype']}")
    _print(f"{card['cpu']}, {card['cores']['usable']} cores{load}, {card['numerics']}")
    if native is None:
        _print("limits not measured: that takes the native backend\n")
        return
    for threads, read in native["read_gb_s"].items():
        dots = ", ".join(f"{name} {rate:.0f}" if rate else f"{name} -" for name, rate in _dots(native, threads))
        _print(f"{threads} thread{'s' * (threads != '1')}: read {read:.1f} GB/s; dots in Gop/s: {dots}")
    state = native["state"]
    if state["name"]:
        _print(f"barrier {state['barrier_ns']:.0f} ns: {state['name']}")
    _print("")


def _dots(native: dict[str, Any], threads: str) -> list[tuple[str, float]]:
    return list(native["dots_gop_s"][threads].items())


def _show_offline(result: dict[str, Any]) -> None:
    table = _table("workload", "tok/s", "lowest", "highest", "first token", "Python a step", "of the bound")
    for record in result["workloads"]:
        low, high = record["tokens_per_s_range"]
        table.add_row(
            record["name"],
            f"{record['tokens_per_s']:.1f}",
            f"{low:.1f}",
            f"{high:.1f}",
            f"{record['first_token_ms']:.1f} ms",
            f"{record['python_ms_per_step']:.2f} ms, {100 * record['python_share']:.1f}%",
            _shares(record),
        )
    _print(table)
    for name, reason in result["left_out"].items():
        _print(f"left out: {name}: {reason}")
    _print("\none stream: from the first token on; streams: output over the whole time; bound: bytes of weights and KV")
    _print("read by a step, over the read rate measured just before; Python a step: all but the model, mean and share")


def _shares(record: dict[str, Any]) -> str:
    shares = record["share_by_state"]
    return ", ".join(f"{_percent(found['share'])} {name}" for name, found in shares.items()) or "-"


def _show_ops(result: dict[str, Any]) -> None:
    table = _table("op", "format", "n", "us", "of step", "GB/s", "of read", "Gop/s", "of peak")
    for name in dict.fromkeys(record["point"] for record in result["ops"]):
        table.add_row(f"{name}:")
        for record in result["ops"]:
            if record["point"] == name:
                table.add_row(
                    f"  {record['op']}",
                    record["format"],
                    str(record["count"]),
                    f"{record['microseconds']:.0f}",
                    _percent(record["share_of_step"]),
                    _number(record["gb_s"]),
                    _percent(record["share_of_read"]),
                    _number(record["gop_s"]),
                    _percent(record["share_of_peak"]),
                )
    _print(table)
    for name, reason in result["left_out"].items():
        _print(f"left out: {name}: {reason}")
    _print("\nGB/s counts packed weights, or keys and values, once; activations are not counted")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
