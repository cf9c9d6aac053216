"""What this machine gives, measured with the native library's own threads: the limits of every benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.backends import native_lib as lib

__all__ = ["DOTS", "Limits", "State", "measure_dots", "measure_limits", "measure_state"]

DOTS = ("int8", "bf16", "fp32")  # as numbered in octavo_native.h
READ_BYTES = 256 << 20  # beyond the caches of the machines in mind
DOT_REPEATS = 200_000  # of twelve dots: under a millisecond
DOT_ROUNDS = 100  # whose best is the peak: another tenant takes milliseconds at a time
BARRIERS = 20_000
NEAR_NS = 150.0  # a barrier below this: the threads share a cache (36 to 75 ns seen there, about 315 where they do not)
FAR_NS = 1000.0  # above this no pair of cores is that far apart: somebody else had one of them


@dataclass(frozen=True)
class State:
    """What swings from minute to minute on a shared machine. `name`: near, far, disturbed, or empty with one thread."""

    read_gb_s: float
    barrier_ns: float
    name: str


@dataclass(frozen=True)
class Limits:
    """Rates in GB/s and Gop/s (a product and a sum are two) by number of threads; a dot of 0 was not measured."""

    read_gb_s: dict[int, float]
    dots_gop_s: dict[int, dict[str, float]]


def measure_state(engine: Any) -> State:
    """Read rate on all threads of the engine, and the cost of a barrier between them."""
    found, threads = lib.library(), engine.threads
    read = _checked(found.octavo_measure_read(engine.handle, threads, READ_BYTES, 3)) / 1e9
    barrier = _checked(found.octavo_measure_barrier(engine.handle, threads, BARRIERS, 3)) * 1e9
    return State(read, barrier, state_name(barrier) if threads > 1 else "")


def state_name(barrier_ns: float) -> str:
    """What the cost of a barrier tells about the machine."""
    return "near" if barrier_ns < NEAR_NS else "far" if barrier_ns < FAR_NS else "disturbed"


def measure_limits(engine: Any) -> Limits:
    """Read rate and dot rates on one thread and on all of the engine."""
    found = lib.library()
    reads: dict[int, float] = {}
    dots: dict[int, dict[str, float]] = {}
    for threads in sorted({1, engine.threads}):
        reads[threads] = _checked(found.octavo_measure_read(engine.handle, threads, READ_BYTES, 5)) / 1e9
        dots[threads] = measure_dots(engine, threads)
    return Limits(reads, dots)


def measure_dots(engine: Any, threads: int) -> dict[str, float]:
    """Dot rates on so many threads, in Gop/s by kind."""
    call, kinds = lib.library().octavo_measure_dots, range(len(DOTS))
    rates = (_checked(call(engine.handle, threads, kind, DOT_REPEATS, DOT_ROUNDS)) for kind in kinds)
    return {name: rate / 1e9 for name, rate in zip(DOTS, rates, strict=True)}


def _checked(value: float) -> float:
    lib.check(-1 if value < 0 else 0, "measure")
    return value
