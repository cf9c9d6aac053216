"""Own engine and peers in one interleaved run, read against the bars of the CPU engine.

    python benchmarks/bench_cpu.py [--full] [--rounds 5] [--json FILE] [--model NAME]

See peers.py for what makes a peer run; a peer that is not there is never replaced by an old number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bars import DISTURBED, NEEDS_SERVER, ROWS, STREAM, Row, Sample, Value, ratio, shape_rows, share, verdict
from peers import LlamaBench, OpenVINO, PeerFailed
from shapes import SHAPES, load_shape

from octavo.core.errors import InvalidInput
from octavo.engine.bench_machine import machine_card, machine_state, native_engine
from octavo.engine.bench_offline import OfflineBench, Workload
from octavo.engine.bench_ops import OpsBench, Point
from octavo.engine.config import EngineConfig
from octavo.engine.loader import LoadedEngine, load_engine, load_parts

_PEER_FORMAT = {"bf16": "BF16", "w8g64": "Q8_0", "w4g32": "Q4_0"}
_ONE = Workload("stream", "decode", 1, 128, 128)
_BATCHES = [Workload(f"batch {count}", "batch", count, 128, 128) for count in (16, 64)]
_PREFILLS = [Workload(f"prefill {size}", "prefill", 1, size, 1) for size in (512, 1024)]
_PREFIX = Workload("prefix", "batch", 32, 544, 32, shared=512)
_CONTEXT = Workload("context", "decode", 1, 8192 - 128, 128, fixed=True)
_OTHER_FORMATS = ("w8pc", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128")
Load = Callable[[EngineConfig], LoadedEngine]


def config(model: str, weight_format: str, **others: Any) -> EngineConfig:
    """The settings of every engine here: a memory that holds 64 streams, chunks of a whole step."""
    settings = {"kv_memory": "1GiB", "max_prefill_chunk": 512, "backend": "native", **others}
    return EngineConfig(model=model, format=weight_format, **settings)


def quietly(settings: EngineConfig) -> LoadedEngine:
    """Load without the memory plan on the screen."""
    return load_engine(settings, say=lambda line: None)


class Run:
    """All benches of one model, and the peers, in rounds that alternate."""

    def __init__(self, model: str, load: Load, peers: Sequence[Any], formats: Sequence[str], small: bool) -> None:
        self.model, self.load, self.peers = model, load, peers
        self.benches: dict[str, OfflineBench] = {}
        for name in formats:
            more = [*_BATCHES, *_PREFILLS] if name == "w8g64" or name not in STREAM else []
            self._add(name, name, [_ONE, *(more if small else [w for w in more if w.name != "batch 64"])])
        if small:
            self._add("context", "w8g64", [_CONTEXT], kv_dtype="int8")
            self._add("cache on", "w8g64", [_PREFIX])
            self._add("cache off", "w8g64", [_PREFIX], prefix_cache=False)
        self.peer_samples: dict[str, list[Sample]] = {}
        self.failures: list[str] = []

    def _add(self, key: str, weight_format: str, workloads: Sequence[Workload], **others: Any) -> None:
        loaded = self.load(config(self.model, weight_format, **others))
        self.benches[key] = OfflineBench(loaded, workloads)

    def round(self, keep: bool) -> None:
        """Every own bench once, then every peer (not to warm up: they do so themselves)."""
        for bench in self.benches.values():
            bench.round(keep)
        if keep:
            for peer in self.peers:
                self._run_peer(peer)

    def _run_peer(self, peer: Any) -> None:
        state = machine_state(next(iter(self.benches.values())).loaded.parts.backend)
        try:
            found = peer.run()
        except PeerFailed as error:
            self.failures.append(str(error))
            return
        for key, value in found.items():
            samples = self.peer_samples.setdefault(f"{peer.name} {key}", [])
            samples.append(Sample(value, state["name"] if state else ""))

    def own(self, bench: str, workload: str, shares: bool = False) -> list[Sample]:
        """Speeds (or shares of the bound) of a workload, with their states."""
        found = [record for record in self.benches[bench].results() if record["name"] == workload]
        samples = [sample for record in found for sample in record["samples"]]
        size = found[0]["bytes_per_step"] if found else 0
        return [
            Sample(
                s["tokens_per_s"] * size / 1e9 / s["state"]["read_gb_s"] if shares else s["tokens_per_s"],
                s["state"]["name"],
            )
            for s in samples
        ]

    def peer(self, name: str, *keys: str) -> list[Sample]:
        """Samples of the first key that the peer has."""
        found = (self.peer_samples.get(f"{name} {key}", []) for key in keys)
        return next(filter(None, found), [])

    def values(self) -> dict[str, Value]:
        """Every row that speeds and shares of this run decide."""
        values: dict[str, Value] = {}
        for name in STREAM:
            shares = self.own(name, "stream", shares=True)
            values[f"near {name}"], values[f"far {name}"] = share(shares, "near"), share(shares, "far")
            theirs = self.peer(LlamaBench.name, f"stream {_PEER_FORMAT[name]}")
            values[f"stream {name}"] = ratio(self.own(name, "stream"), theirs)
        for workload in (*_BATCHES, *_PREFILLS):
            own = self.own("w8g64", workload.name)
            values[workload.name] = ratio(own, self.peer(OpenVINO.name, workload.name))
        if "context" in self.benches:
            values["context"] = share(self.own("context", "context", shares=True))
            on, off = self.own("cache on", "prefix"), self.own("cache off", "prefix")
            values["cache"] = ratio(on, off, "not measured")
            cold = [Sample(sample.value / (_PREFIX.streams * _PREFIX.output), sample.state) for sample in on]
            values["prefix"] = ratio(cold, self.peer(OpenVINO.name, "prefix"))
            values["http"] = Value(None, NEEDS_SERVER)
        return values

    def record(self) -> dict[str, Any]:
        """All that was measured, as plain values."""
        peers = {key: [asdict(sample) for sample in samples] for key, samples in self.peer_samples.items()}
        benches = {
            key: {"config": asdict(b.loaded.config), "workloads": b.results(), "left_out": b.left_out}
            for key, b in self.benches.items()
        }
        return {"model": self.model, "benches": benches, "peers": peers, "failures": self.failures}


def ops_values(model: str, rounds: int) -> tuple[dict[str, Value], list[dict[str, Any]]]:
    """The rows about single ops: prefill of 512 from 0 and behind 512. The head is no product of a prefill."""
    values: dict[str, Value] = {}
    records: list[dict[str, Any]] = []
    points = [Point(1, 512, 0), Point(1, 512, 512)]
    for name in ("bf16", "w8pc", "w8g64", "w4g32"):
        parts = load_parts(config(model, name))
        bench = OpsBench(parts, points, 16)
        card = machine_card(parts.backend)
        for at in range(rounds + 1):
            bench.round(at > 0)
        found = bench.results(card["native"])
        disturbed = sum(state["name"] == DISTURBED for state in bench.states) * 2 > len(bench.states)
        products = [r for r in found if r["cached"] == 0 and r["gop_s"] and r["op"] not in ("attention", "lm_head")]
        values[f"products {name}"] = _share_of_peak(products, card, disturbed)
        if name == "bf16":
            values["attention"] = _share_of_peak([r for r in found if r["op"] == "attention"], card, disturbed)
        records.append({"format": name, "machine": card, "states": bench.states, "ops": found})
    return values, records


def _share_of_peak(records: Sequence[dict[str, Any]], card: dict[str, Any], disturbed: bool) -> Value:
    if disturbed:
        return Value(None, "the machine was disturbed")
    if not records or any(record["peak"] is None for record in records):
        return Value(None, f"no peak is known for the kernel table {card['native']['table']}")
    native, kind = card["native"], records[0]["peak"]
    peak = native["dots_gop_s"][str(native["threads"])][kind]
    rate = sum(r["operations"] for r in records) / sum(r["microseconds"] for r in records) / 1e3
    return Value(rate / peak, f"{rate:.0f} of {peak:.0f} Gop/s {kind}")


def show(rows: Sequence[Row], values: dict[str, Value]) -> None:
    """One line a row, then what was met."""
    width = max(len(row.what) for row in rows)
    print(f"{'row':<{width}}  {'floor':>7}  {'goal':>7}  {'value':>7}  met    note")
    for row in rows:
        found = values.get(row.key, Value(None, "not measured"))
        met = "-" if found.value is None else "goal" if found.value >= row.goal else "floor"
        met = "no" if found.value is not None and found.value < row.floor else met
        bars = f"{row.show(row.floor):>7}  {row.show(row.goal):>7}  {row.show(found.value):>7}"
        print(f"{row.what:<{width}}  {bars}  {met:<5}  {found.note}")
    print()
    for line in verdict(rows, values):
        print(line)


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


def _rounds(run: Run, rounds: int) -> None:
    for at in range(rounds + 1):
        say(f"{run.model}: round {at} of {rounds}" if at else f"{run.model}: warming up")
        run.round(at > 0)


def _full(rounds: int, rows: list[Row], values: dict[str, Value]) -> list[dict[str, Any]]:
    """The larger shapes, one after the other, without peers: their files are of the one model that was named."""
    records = []
    for shape in SHAPES:
        run = Run(shape, lambda settings, shape=shape: load_shape(shape, settings), [], STREAM, small=False)
        _rounds(run, rounds)
        rows += shape_rows(shape)
        values.update({f"{shape} {key}": value for key, value in run.values().items()})
        records.append(run.record())
    return records


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="The CPU engine against its bars.")
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="also the other formats and the larger shapes")
    parser.add_argument("--json", type=Path, help="write everything here")
    wanted = parser.parse_args()
    if wanted.rounds < 1:
        raise InvalidInput("rounds", wanted.rounds, "give at least 1")
    formats = (*STREAM, *_OTHER_FORMATS) if wanted.full else STREAM
    first = load_parts(config(wanted.model, "bf16")).backend
    card, threads = machine_card(first), native_engine(first).threads
    peers = [peer for peer in (LlamaBench(threads), OpenVINO(threads)) if peer.files]
    say(f"peers: {', '.join(peer.name for peer in peers) or 'none (see benchmarks/peers.py)'}")
    run = Run(wanted.model, quietly, peers, formats, small=True)
    _rounds(run, wanted.rounds)
    ops, op_records = ops_values(wanted.model, wanted.rounds)
    rows, values = list(ROWS), {**run.values(), **ops}
    records = [run.record()]
    if wanted.full:
        records += _full(wanted.rounds, rows, values)
    native = card["native"]
    print(f"{card['cpu']}, table {native['table']}, {threads} threads, {wanted.rounds} rounds, load {card['load']}")
    print(f"read {native['read_gb_s']} GB/s, dots {native['dots_gop_s']} Gop/s, state {native['state']}\n")
    for failure in run.failures:
        print(f"a peer failed: {failure}")
    if wanted.json:
        table = [{**asdict(row), **asdict(values.get(row.key, Value(None, "not measured")))} for row in rows]
        result = {"schema": 1, "machine": card, "rows": table, "runs": records, "ops": op_records}
        wanted.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(rows, values)


if __name__ == "__main__":
    main()
