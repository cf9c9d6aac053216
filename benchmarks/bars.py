"""The bars of the CPU engine: a row each, and how a row gets its value out of samples.

A sample is (speed, state of the machine just before it). Ratios compare medians within one state only, and the worst
state counts; samples of a disturbed machine count nowhere. A row without samples is neither met nor missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

__all__ = [
    *("DISTURBED", "FULL_ROWS", "MISSING", "ROWS", "STREAM", "TILE_ROWS", "Row", "Sample", "Value"),
    *("rows_of_state", "ratio", "shape_rows", "share", "speed", "state_of", "state_over", "verdict"),
]

MISSING = "peer not measured here"
DISTURBED = "disturbed"
_UNITS = {"%": (100, ".1f", "%"), "x": (1, ".2f", "x"), "s": (1, ".2f", " s")}


@dataclass(frozen=True)
class Row:
    """A bar, or a figure without one (floor and goal None). `unit`: % (shares), x (ratios) or s (seconds); `most`: the
    value may be the bar at most."""

    key: str
    what: str
    floor: float | None
    goal: float | None
    unit: str = "%"
    most: bool = False

    def show(self, value: float | None) -> str:
        """A value in the unit of the row."""
        if value is None:
            return "-"
        scale, digits, unit = _UNITS[self.unit]
        return f"{scale * value:{digits}}{unit}"

    def reaches(self, value: Value, bar: float | None) -> bool:
        """Whether a measured value meets floor or goal; never when what else the row asks for does not hold."""
        if value.value is None or bar is None or not value.holds:
            return False
        return value.value <= bar if self.most else value.value >= bar

    def met(self, value: Value) -> str:
        """In a word."""
        if value.value is None or self.goal is None:
            return "-"
        return "goal" if self.reaches(value, self.goal) else "floor" if self.reaches(value, self.floor) else "no"


@dataclass(frozen=True)
class Sample:
    """One measured speed (or share), in a state of the machine: near, far, disturbed, or empty for one thread."""

    value: float
    state: str
    more: Mapping[str, float] = field(default_factory=dict)  # what else was seen, such as latencies

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {"value": self.value, "state": self.state, **self.more}


@dataclass(frozen=True)
class Value:
    """What a row came to; None: not measured, for the reason in `note`. `holds`: so does what else it asks for."""

    value: float | None
    note: str = ""
    holds: bool = True

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def _by_format(
    key: str, what: str, formats: Sequence[str], bars: Sequence[tuple[float, float]], unit: str = "%"
) -> list[Row]:
    pairs = zip(formats, bars, strict=True)
    return [Row(f"{key} {name}", f"{what}, {name}", floor, goal, unit) for name, (floor, goal) in pairs]


STREAM = ("bf16", "w8g64", "w4g32")
_SHARES = {
    "near": ((0.85, 0.93), (0.80, 0.93), (0.75, 0.95)),
    "far": ((0.70, 0.82), (0.70, 0.83), (0.62, 0.78)),
}
_PEER = ((0.9, 1.05), (1.4, 1.75), (1.6, 2.1))
_PRODUCTS = (("bf16", "w8pc", "w8g64", "w4g32"), ((0.85, 0.95), (0.80, 0.92), (0.70, 0.82), (0.60, 0.72)))

ROWS: tuple[Row, ...] = (
    *_by_format("near", "one stream, share of the bandwidth bound, near", STREAM, _SHARES["near"]),
    *_by_format("far", "one stream, share of the bandwidth bound, far", STREAM, _SHARES["far"]),
    *_by_format("stream", "one stream against the best peer's own bench", STREAM, _PEER, "x"),
    Row("context", "one stream, 8k context, int8 KV, share of the bound", 0.70, 0.80),
    Row("batch 16", "16 streams, w8g64, against the best peer", 1.4, 1.9, "x"),
    Row("batch 64", "64 streams, w8g64, against the best peer", 1.4, 1.95, "x"),
    Row("prefill 512", "prefill of 512, w8g64, against the best peer", 1.1, 1.35, "x"),
    Row("prefill 1024", "prefill of 1,024, w8g64, against the best peer", 1.1, 1.35, "x"),
    *_by_format("products", "products in prefill, share of peak", *_PRODUCTS),
    Row("attention", "paged attention in prefill, share of bf16 peak", 0.50, 0.70),
    Row("http", "16 clients over HTTP against the best peer, and lower p95s", 1.5, 1.9, "x"),
    Row("prefix", "shared prefix, cold, against the best peer", 1.6, 2.2, "x"),
    Row("cache", "the same load, own prefix cache on against off", 2.0, 3.0, "x"),
)


# on a machine with tiles its own kernels, against what its tiles give: no bar was written for such a machine
TILE_ROWS: tuple[Row, ...] = (
    *(
        Row(f"tiles {name}", f"products in prefill on tiles, share of their peak, {name}", None, None)
        for name in _PRODUCTS[0]
    ),
    Row("tiles attention", "paged attention in prefill on tiles, share of their peak", None, None),
)


def _footprint(shape: str, seconds: float) -> tuple[Row, Row]:
    memory = "peak memory over weights + KV + printed activations"
    return (
        Row(f"{shape} load", f"{shape}: load, packed and ready, w8g64", seconds, seconds, "s", True),
        Row(f"{shape} memory", f"{shape}: {memory}, w8g64", 1.15, 1.15, "x", True),
    )


FULL_ROWS = (*_footprint("smollm2-135m", 1.0), *_footprint("llama-1b-shape", 3.0))


def rows_of_state(rows: Sequence[Row], state: str) -> tuple[Row, ...]:
    """Without the bars of another state than the run's; all of them where it is neither near nor far."""
    others = {name for name in _SHARES if name != state} if state in _SHARES else set()
    return tuple(row for row in rows if not others.intersection(row.key.split()))


def state_over(before: str, after: str) -> str:
    """Of a sample: what it was before, if it still is so; else nobody knows which part of the sample was in which."""
    return before if before == after else DISTURBED


def state_of(samples: Iterable[Sample]) -> str:
    """The state that most samples were taken in, of those that nobody disturbed; empty for none."""
    seen = Counter(sample.state for sample in samples if sample.state != DISTURBED)
    return seen.most_common(1)[0][0] if seen else ""


def shape_rows(shape: str) -> tuple[Row, ...]:
    """The bars of a larger shape: shares of the bound, and ratios at one stream, 16 streams and prefill."""
    kept = [row for row in ROWS if row.key.split()[0] in (*_SHARES, "stream", "prefill") or row.key == "batch 16"]
    return tuple(Row(f"{shape} {row.key}", f"{shape}: {row.what}", row.floor, row.goal, row.unit) for row in kept)


def _states(samples: Iterable[Sample]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        if sample.state != DISTURBED:
            found.setdefault(sample.state, []).append(sample.value)
    return found


def share(samples: Sequence[Sample], state: str | None = None) -> Value:
    """Median share in one state; for None in each, the worst."""
    found = {name: median(values) for name, values in _states(samples).items() if state in (None, name)}
    if not found:
        why = f"the machine was not seen in state {state}" if state else "the machine was disturbed throughout"
        return Value(None, why if samples else "not measured")
    worst = min(found, key=lambda name: found[name])
    speeds = [
        sample.more["tokens_per_s"] for sample in samples if sample.state == worst and "tokens_per_s" in sample.more
    ]
    told = f", {median(speeds):.4g} tok/s" if speeds else ""
    return Value(found[worst], f"{worst or 'one thread'}, {len(_states(samples)[worst])} samples{told}")


def ratio(own: Sequence[Sample], other: Sequence[Sample], missing: str = MISSING, name: str = "") -> Value:
    """Median of own speed over the other's, within each state that both were seen in; the worst of them."""
    ours, theirs = _states(own), _states(other)
    both = {state: median(ours[state]) / median(theirs[state]) for state in ours if state in theirs}
    if both:
        worst = min(both, key=lambda state: both[state])
        speeds = f"{median(ours[worst]):.4g} against {median(theirs[worst]):.4g}"
        return Value(both[worst], f"{worst or 'one thread'}: {speeds}{' of ' * bool(name)}{name}")
    if not other:
        return Value(None, missing + _own_speed(own))
    return Value(None, "the two were never seen in the same undisturbed state")


def _own_speed(own: Sequence[Sample]) -> str:
    if not own:
        return ""
    quiet = any(sample.state != DISTURBED for sample in own)
    return f"; own speed {speed(own):.4g}" + ("" if quiet else ", disturbed")


def speed(samples: Sequence[Sample]) -> float:
    """The median of what nobody disturbed, or of all if there is nothing else."""
    quiet = [sample.value for sample in samples if sample.state != DISTURBED]
    return median(quiet or [sample.value for sample in samples])


def verdict(rows: Sequence[Row], values: Mapping[str, Value]) -> list[str]:
    """The table's last lines: how many rows were not measured, and of those that were, how many meet floor and goal.
    Figures without a bar count nowhere."""
    rows = [row for row in rows if row.goal is not None]
    found = [(row, values[row.key]) for row in rows if row.key in values and values[row.key].value is not None]
    floors, goals = (sum(row.reaches(value, getattr(row, bar)) for row, value in found) for bar in ("floor", "goal"))
    return [
        f"not measured: {len(rows) - len(found)} of {len(rows)} rows, which count as neither met nor missed",
        f"floors met: {floors} of {len(found)}; goals met: {goals} of {len(found)}",
    ]
