"""Our side of each row: engines of one model in several formats, and what they are asked to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bars import Sample, Value, share, state_of, state_over
from contest import Duel, Run
from peers import OV_KINDS, Peers

from octavo.core.errors import InvalidInput
from octavo.engine.bench_machine import machine_state
from octavo.engine.bench_offline import OfflineBench, Workload
from octavo.engine.config import EngineConfig
from octavo.engine.loader import LoadedEngine, load_engine

__all__ = [
    *("BATCHES", "LOW_BIT", "PREFILLS", "Own", "config", "kernel_table", "quietly"),
    *("load_duels", "other_duels", "share_values", "stream_duel"),
]

PEER_KINDS = {
    "bf16": ("BF16", "F16"),
    "w8g64": ("Q8_0", *(kind for kind in OV_KINDS if kind.startswith("int8"))),
    "w4g32": ("Q4_0", *(kind for kind in OV_KINDS if kind.startswith("int4"))),
}
LOW_BIT = ("Q8_0", "Q4_0", *OV_KINDS)
ONE = Workload("stream", "decode", 1, 128, 128)
BATCHES = tuple(Workload(f"batch {count}", "batch", count, 128, 128) for count in (16, 64))
PREFILLS = tuple(Workload(f"prefill {size}", "prefill", 1, size, 1) for size in (512, 1024))
PREFIX = Workload("prefix", "batch", 32, 544, 32, shared=512)
CONTEXT = Workload("context", "decode", 1, 8192 - 128, 128, fixed=True)
Load = Callable[[EngineConfig], LoadedEngine]


def config(model: str, weight_format: str, **others: Any) -> EngineConfig:
    """The settings of every engine here: a memory that holds 64 streams, chunks of a whole step."""
    settings = {"kv_memory": "1GiB", "max_prefill_chunk": 512, "backend": "native", **others}
    return EngineConfig(model=model, format=weight_format, **settings)


@contextmanager
def kernel_table(name: str) -> Iterator[None]:
    """What is loaded meanwhile uses this kernel table."""
    before = os.environ.get("OCTAVO_NATIVE_ISA")
    os.environ["OCTAVO_NATIVE_ISA"] = name
    try:
        yield
    finally:
        del os.environ["OCTAVO_NATIVE_ISA"]
        if before is not None:
            os.environ["OCTAVO_NATIVE_ISA"] = before


def quietly(settings: EngineConfig) -> LoadedEngine:
    """Load without the memory plan on the screen."""
    return load_engine(settings, say=lambda line: None)


class Own:
    """One loaded engine for each set of settings, made when it is first asked for, and its samples."""

    def __init__(self, model: str, load: Load = quietly) -> None:
        self.model, self.load = model, load
        self.benches: dict[str, OfflineBench] = {}

    def bench(self, key: str, weight_format: str = "", **others: Any) -> OfflineBench:
        """The engine of that name."""
        if key not in self.benches:
            loaded = self.load(config(self.model, weight_format or key, **others))
            self.benches[key] = OfflineBench(loaded, [])
        return self.benches[key]

    def runs(self, key: str, workload: Workload) -> Run:
        """Measure a workload on an engine once."""
        bench = self.benches[key]
        bench.add(workload)
        if bench.left_out:
            raise InvalidInput("workload", workload.name, bench.left_out[workload.name])

        def once(keep: bool) -> Sample:
            speed, state = bench.measure(workload, keep)
            after = machine_state(bench.loaded.parts.backend)
            if not state or not after:
                return Sample(speed, "")
            more = {key: (state[key] + after[key]) / 2 for key in ("read_gb_s", "barrier_ns")}
            return Sample(speed, state_over(state["name"], after["name"]), more)

        return once

    def state(self) -> str:
        """Of the machine, now."""
        found = machine_state(next(iter(self.benches.values())).loaded.parts.backend)
        return found["name"] if found else ""

    def record(self) -> dict[str, Any]:
        """Settings and all samples, as plain values."""
        return {key: {"config": str(b.loaded.config), "workloads": b.results()} for key, b in self.benches.items()}


def _theirs(own: Own, peers: Peers, workload: Workload, kinds: tuple[str, ...]) -> Mapping[str, Run]:
    """The same workload on each peer that has one of these kinds of weights."""

    def runs(peer: Any, kind: str) -> Run:
        def once(keep: bool) -> Sample:
            state, speed = own.state(), peer.run(kind, workload)
            return Sample(speed, state_over(state, own.state()))

        return once

    return {label: runs(*which) for label, which in peers.of(*kinds).items()}


def stream_duel(own: Own, peers: Peers, weight_format: str) -> Duel:
    """One stream in a format, against weights of the same class."""
    own.bench(weight_format)
    found = _theirs(own, peers, ONE, PEER_KINDS.get(weight_format, ()))
    return Duel(f"stream {weight_format}", own.runs(weight_format, ONE), found)


def load_duels(own: Own, peers: Peers, weight_format: str, workloads: tuple[Workload, ...]) -> list[Duel]:
    """Batches and prefills in a format, against whatever peer with low-bit weights is fastest."""
    own.bench(weight_format)
    found: dict[str, Duel] = {}
    for w in workloads:
        theirs, first = _theirs(own, peers, w, LOW_BIT), found.get(w.kind)
        found[w.name] = Duel(w.name, own.runs(weight_format, w), theirs, after=first)
        found.setdefault(w.kind, found[w.name])
    return [found[w.name] for w in workloads]


def other_duels(own: Own, peers: Peers) -> list[Duel]:
    """A long context, the shared prefix, and the same with our prefix cache on and off."""
    own.bench("context", "w8g64", kv_dtype="int8")
    own.bench("cache on", "w8g64")
    own.bench("cache off", "w8g64", prefix_cache=False)
    off = {"prefix cache off": own.runs("cache off", PREFIX)}
    return [
        Duel("context", own.runs("context", CONTEXT), {}),
        Duel("prefix", own.runs("cache on", PREFIX), _theirs(own, peers, PREFIX, OV_KINDS)),
        Duel("cache", own.runs("cache on", PREFIX), off, "not measured"),
    ]


def shares(own: Own, key: str, duel: Duel, workload: Workload) -> list[Sample]:
    """The samples of one stream as shares of the bandwidth bound: each by the read rate just before it."""
    size = own.benches[key].step_bytes(workload)
    return [
        Sample(s.value * size / 1e9 / s.more["read_gb_s"], s.state, {"tokens_per_s": s.value}) for s in duel.samples
    ]


def share_values(own: Own, duels: Sequence[Duel]) -> tuple[dict[str, Value], str]:
    """The rows about the bandwidth bound, and the state of the run, whose bars they are held against."""
    values: dict[str, Value] = {}
    streams = [duel for duel in duels if duel.key.startswith("stream ")]
    state = state_of(sample for duel in streams for sample in duel.samples)
    for duel in streams:
        name = duel.key.removeprefix("stream ")
        found = shares(own, name, duel, ONE)
        values.update({f"{which} {name}": share(found, which) for which in ("near", "far")})
    for duel in duels:
        if duel.key == "context":
            values["context"] = share(shares(own, "context", duel, CONTEXT))
    return values, state
