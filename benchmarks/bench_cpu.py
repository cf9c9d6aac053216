"""Own engine and peers in one interleaved run, read against the bars of the CPU engine.

    python benchmarks/bench_cpu.py [--peers DIR] [--full] [--rounds 3] [--only stream,http] [--json FILE]

See peers.py for what makes a peer run; a peer that is not there is never replaced by an old number.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bars import DISTURBED, FULL_ROWS, ROWS, STREAM, TILE_ROWS, Row, Value, rows_of_state, shape_rows, verdict
from contest import Contest, Duel
from footprint import footprint_values
from load_client import tokenizer_of
from own import (
    BATCHES,
    LOW_BIT,
    PREFILLS,
    Own,
    config,
    kernel_table,
    load_duels,
    other_duels,
    share_values,
    stream_duel,
)
from peaks import VECTORS_OF, Peaks, measure_again, measure_peaks, share_of_peak
from peers import Peers, find_peers
from servers import http_duel, http_value
from shapes import SHAPES, shape_folder

from octavo.core.errors import InvalidInput
from octavo.engine.bench_machine import machine_card, native_engine
from octavo.engine.bench_ops import OpsBench, Point, require_native
from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_parts

OTHER_FORMATS = ("w8pc", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128")
PARTS = (
    *("stream", "batch", "batch 16", "batch 64", "prefill", "prefill 512", "prefill 1024"),
    *("context", "prefix", "cache", "ops", "http"),
)


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


class Report:
    """Rows, their values, and everything that was measured."""

    def __init__(self, card: dict[str, Any], peaks: Peaks) -> None:
        self.card, self.peaks = card, peaks
        self.rows: list[Row] = []
        self.values: dict[str, Value] = {}
        self.records: dict[str, Any] = {}
        self.failures: list[str] = []
        self.begin = time.monotonic()

    def add(self, rows: Sequence[Row], values: dict[str, Value], prefix: str = "") -> None:
        """Rows, and values under their keys."""
        self.rows += rows
        self.values.update({prefix + key: value for key, value in values.items()})

    def lines(self) -> list[str]:
        """One line a row, what was met, and the machine."""
        native, width = self.card["native"], max(len(row.what) for row in self.rows)
        state, threads = native["state"], native["threads"]
        dots, tiles = _rates(self.peaks.dots), _rates(self.peaks.tiles)
        lines = [
            f"{self.card['cpu']}, kernel table {native['table']}, {threads} threads, load {self.card['load']}",
            f"read {_rates(native['read_gb_s'][str(threads)])} GB/s, barrier {state['barrier_ns']:.0f} ns "
            f"({state['name'] or 'one thread'}); Gop/s of dots: {dots}; of tiles: {tiles}",
            *(f"a peer failed: {failure}" for failure in self.failures),
            "",
            f"{'row':<{width}}  {'floor':>7}  {'goal':>7}  {'value':>8}  met    note",
        ]
        for row in self.rows:
            found = self.values.get(row.key, Value(None, "not measured"))
            bars = f"{row.show(row.floor):>7}  {row.show(row.goal):>7}  {row.show(found.value):>8}"
            lines.append(f"{row.what:<{width}}  {bars}  {row.met(found):<5}  {found.note}")
        took = f"{(time.monotonic() - self.begin) / 60:.1f} minutes"
        return [*lines, "", took, *verdict(self.rows, self.values)]

    def record(self) -> dict[str, Any]:
        """As plain values."""
        table = [{**asdict(row), **self.values.get(row.key, Value(None, "not measured")).record()} for row in self.rows]
        return {"schema": 2, "machine": self.card, "peaks": asdict(self.peaks), "rows": table, **self.records}


def _rates(found: Any) -> str:
    if not isinstance(found, dict):
        return f"{found:.1f}"
    return ", ".join(f"{kind} {rate:.0f}" for kind, rate in found.items()) or "none"


def small(report: Report, model: str, peers: Peers, parts: Sequence[str], rounds: int) -> None:
    """All rows about the small model."""
    own = Own(model)
    own.bench("w8g64")
    duels: list[Duel] = []
    if "stream" in parts:
        duels += [stream_duel(own, peers, name) for name in STREAM]
    loads = [w for w in (*BATCHES, *PREFILLS) if {w.name, w.kind}.intersection(parts)]
    duels += load_duels(own, peers, "w8g64", tuple(loads))
    if {"context", "prefix", "cache"}.intersection(parts):
        duels += [duel for duel in other_duels(own, peers) if duel.key in parts]
    contest = Contest(duels, say, report.failures)
    contest.rounds(rounds, model)
    peers.close()
    values, state = share_values(own, duels)
    values = {**contest.values(), **values}
    if "http" in parts:
        fast = [duel for duel in duels if duel.key == "batch 16"]
        values["http"] = http(report, model, _servers(peers, fast), own, rounds)
    report.add(rows_of_state(ROWS, state), values)
    if "ops" in parts:
        report.add(*ops_values(report, model, rounds))
    report.records[model] = {"own": own.record(), "duels": [duel.record() for duel in duels]}


def _servers(peers: Peers, fast: Sequence[Duel]) -> dict[str, tuple[Any, str]]:
    """The peers that serve: those that were fastest at 16 streams, or all of low-bit weights where that was not run."""
    found = peers.of(*LOW_BIT)
    return {label: which for label, which in found.items() if all(label in duel.theirs for duel in fast)}


def http(report: Report, model: str, peers: dict[str, tuple[Any, str]], own: Own, rounds: int) -> Value:
    """The row of sixteen clients. The servers run beside the loaded engines, which sleep meanwhile."""
    with ExitStack() as stack:
        duel = http_duel(stack, model, "w8g64", tokenizer_of(model), peers, own.state)
        Contest([duel], say, report.failures).rounds(rounds, f"{model}, HTTP")
    report.records["http"] = duel.record()
    return http_value(duel)


def ops_values(report: Report, model: str, rounds: int) -> tuple[Sequence[Row], dict[str, Value]]:
    """Values about single ops: of the machine's vectors, which the bars were written for, and with more rows of its
    tiles."""
    table = report.card["native"]["table"]
    values = _ops_values(report, model, rounds, VECTORS_OF.get(table, table), False)
    if table not in VECTORS_OF:
        return (), values
    found = _ops_values(report, model, rounds, table, True)
    return TILE_ROWS, {**values, **{f"tiles {key.removeprefix('products ')}": value for key, value in found.items()}}


def _ops_values(report: Report, model: str, rounds: int, table: str, tiles: bool) -> dict[str, Value]:
    """Of one kernel table: prefill of 512 from 0 and behind 512. The head is no product of a prefill."""
    values: dict[str, Value] = {}
    rates: dict[str, tuple[Sequence[Any], bool]] = {}  # records, and whether the machine was disturbed
    for name in ("bf16", "w8pc", "w8g64", "w4g32"):
        say(f"{model}: ops, {name}, {table}")
        with kernel_table(table):
            bench = OpsBench(load_parts(config(model, name)), [Point(1, 512, 0), Point(1, 512, 512)], 16)
        for at in range(rounds + 1):
            bench.round(at > 0)
        found = bench.results(report.card["native"])
        disturbed = sum(state["name"] == DISTURBED for state in bench.states) * 2 > len(bench.states)
        products = [r for r in found if r["cached"] == 0 and r["gop_s"] and r["op"] not in ("attention", "lm_head")]
        attention = [r for r in found if r["op"] == "attention"]
        rates[f"products {name}"] = products, disturbed
        if name == "bf16":
            rates["attention"] = attention, disturbed
        report.peaks = measure_again(report.peaks, VECTORS_OF.get(table, table), report.card["native"]["threads"])
        report.records[f"ops {name} {table}"] = {"states": bench.states, "ops": found}
    for key, (ops, disturbed) in rates.items():
        nothing = Value(None, "the machine was disturbed")
        values[key] = nothing if disturbed else share_of_peak(ops, report.peaks, tiles)
    return values


def full(report: Report, given: argparse.Namespace) -> None:
    """The other formats of the small model, then the larger shapes; and what loading takes."""
    model, rounds, threads = given.model, given.rounds, report.card["native"]["threads"]
    others = Own(model)
    duels = [stream_duel(others, Peers(None, None), name) for name in OTHER_FORMATS]
    for name in OTHER_FORMATS:
        for duel in load_duels(others, Peers(None, None), name, (BATCHES[0], PREFILLS[1])):
            duels.append(Duel(f"{duel.key} {name}", duel.own, {}))
    Contest(duels, say, report.failures).rounds(min(rounds, 3), f"{model}, other formats")
    report.records["other formats"] = {"duels": [duel.record() for duel in duels]}
    del others, duels
    for shape in given.shapes:
        _shape(report, shape, find_peers(given.peers, shape, threads, given.against), rounds)
    report.add(FULL_ROWS, footprint_values(model, say))


def _shape(report: Report, shape: str, peers: Peers, rounds: int) -> None:
    """One format after the other, so that memory holds one engine and its peers at a time."""
    values: dict[str, Value] = {}
    states = []
    for name in STREAM:
        found, state = _shape_in(report, shape, name, peers, rounds)
        values.update(found)
        states.append(state)
    report.add(rows_of_state(shape_rows(shape), max(states, key=states.count)), values, f"{shape} ")


def _shape_in(report: Report, shape: str, name: str, peers: Peers, rounds: int) -> tuple[dict[str, Value], str]:
    """A shape in one format: the values of its rows, and the state of the run."""
    own = Own(str(shape_folder(shape, say)))
    duels = [stream_duel(own, peers, name)]
    if name == "w8g64":
        duels += load_duels(own, peers, name, (BATCHES[0], *PREFILLS))
    contest = Contest(duels, say, report.failures)
    try:
        contest.rounds(rounds, f"{shape}, {name}")
    finally:
        peers.close()
    found, state = share_values(own, duels)
    report.records[f"{shape} {name}"] = {"own": own.record(), "duels": [duel.record() for duel in duels]}
    return {**contest.values(), **found}, state


def arguments() -> argparse.Namespace:
    """What was asked for. Raises InvalidInput."""
    parser = argparse.ArgumentParser(description="The CPU engine against its bars.")
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--peers", default=os.environ.get("OCTAVO_PEERS", ""), help="folder of the peers (peers.py)")
    parser.add_argument("--against", default="", help="only these peers, such as 'llama.cpp Q8_0,OpenVINO int4'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--full", action="store_true", help="also the other formats and the larger shapes")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with --full: some of " + ",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--table", type=Path, help="write the table here")
    given = parser.parse_args()
    if given.rounds < 1:
        raise InvalidInput("rounds", given.rounds, "give at least 1")
    if given.peers and not Path(given.peers).is_dir():
        raise InvalidInput("peers", given.peers, "no such folder; benchmarks/install_peers.sh DIR makes one")
    given.only = _names("only", given.only, PARTS)
    given.shapes = _names("shapes", given.shapes, tuple(SHAPES))
    return given


def _names(field: str, given: str, known: Sequence[str]) -> list[str]:
    """Names between commas. Raises InvalidInput for one that is not known."""
    found = [name for name in given.split(",") if name]
    unknown = sorted(set(found).difference(known))
    if unknown:
        raise InvalidInput(field, ",".join(unknown), "give some of " + ", ".join(known))
    return found


def main() -> None:
    """Measure, print, write."""
    given = arguments()
    backend = load_parts(config(given.model, "bf16")).backend
    require_native(backend)
    card = machine_card(backend)
    report = Report(card, measure_peaks(card["native"]))
    peers = find_peers(given.peers, given.model, native_engine(backend).threads, given.against)
    say(f"peers: {peers.describe()}")
    try:
        small(report, given.model, peers, given.only, given.rounds)
    finally:
        peers.close()
    if given.full:
        full(report, given)
    lines = report.lines()
    if given.json:
        given.json.write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
    if given.table:
        given.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main()
    except InvalidInput as error:
        sys.exit(f"error: {error}")
