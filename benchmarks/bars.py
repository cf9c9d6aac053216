"""The bars of the CPU engine: a row each, and how a row gets its value out of samples.

A sample is (speed, state of the machine just before it). Ratios compare medians within one state only, and the worst
state counts; samples of a disturbed machine count nowhere. A row without samples is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["ROWS", "Row", "Sample", "Value", "ratio", "shape_rows", "share", "verdict"]

NEEDS_SERVER = "not measured here: it takes a load client and peers that serve"
PEER_MISSING = "peer not measured here"
DISTURBED = "disturbed"


@dataclass(frozen=True)
class Row:
    """`percent`: shares; else ratios, where more is better."""

    key: str
    what: str
    floor: float
    goal: float
    percent: bool = True

    def show(self, value: float | None) -> str:
        """A value in the unit of the row."""
        if value is None:
            return "-"
        return f"{100 * value:.1f}%" if self.percent else f"{value:.2f}x"


@dataclass(frozen=True)
class Sample:
    """One measured speed (or share), in a state of the machine: near, far, disturbed, or empty for one thread."""

    value: float
    state: str


@dataclass(frozen=True)
class Value:
    """What a row came to; None: not measured, for the reason in `note`."""

    value: float | None
    note: str = ""


def _by_format(
    key: str, what: str, formats: Sequence[str], bars: Sequence[tuple[float, float]], percent: bool
) -> list[Row]:
    pairs = zip(formats, bars, strict=True)
    return [Row(f"{key} {name}", f"{what}, {name}", floor, goal, percent) for name, (floor, goal) in pairs]


STREAM = ("bf16", "w8g64", "w4g32")
_NEAR = ((0.85, 0.93), (0.80, 0.93), (0.75, 0.95))
_FAR = ((0.70, 0.82), (0.70, 0.83), (0.62, 0.78))
_PEER = ((0.9, 1.05), (1.4, 1.75), (1.6, 2.1))
_PRODUCTS = (("bf16", "w8pc", "w8g64", "w4g32"), ((0.85, 0.95), (0.80, 0.92), (0.70, 0.82), (0.60, 0.72)))

ROWS: tuple[Row, ...] = (
    *_by_format("near", "one stream, share of the bandwidth bound, near", STREAM, _NEAR, True),
    *_by_format("far", "one stream, share of the bandwidth bound, far", STREAM, _FAR, True),
    *_by_format("stream", "one stream against the best peer's own bench", STREAM, _PEER, False),
    Row("context", "one stream, 8k context, int8 KV, share of the bound", 0.70, 0.80),
    Row("batch 16", "16 streams, w8g64, against the best peer", 1.4, 1.9, False),
    Row("batch 64", "64 streams, w8g64, against the best peer", 1.4, 1.95, False),
    Row("prefill 512", "prefill of 512, w8g64, against the best peer", 1.1, 1.35, False),
    Row("prefill 1024", "prefill of 1,024, w8g64, against the best peer", 1.1, 1.35, False),
    *_by_format("products", "products in prefill, share of peak", *_PRODUCTS, True),
    Row("attention", "paged attention in prefill, share of bf16 peak", 0.50, 0.70),
    Row("http", "16 clients over HTTP against the best peer", 1.5, 1.9, False),
    Row("prefix", "shared prefix, cold, against the best peer", 1.6, 2.2, False),
    Row("cache", "the same load, own prefix cache on against off", 2.0, 3.0, False),
)


def shape_rows(shape: str) -> tuple[Row, ...]:
    """The bars of a larger shape: shares of the bound, and ratios at one stream, 16 streams and prefill."""
    kept = [row for row in ROWS if row.key.split()[0] in ("near", "far", "stream", "prefill") or row.key == "batch 16"]
    return tuple(Row(f"{shape} {row.key}", f"{shape}: {row.what}", row.floor, row.goal, row.percent) for row in kept)


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
    return Value(found[worst], f"{worst or 'one thread'}, {len(_states(samples)[worst])} samples")


def ratio(own: Sequence[Sample], other: Sequence[Sample], missing: str = PEER_MISSING) -> Value:
    """Median of own speed over the other's, within each state that both were seen in; the worst of them."""
    ours, theirs = _states(own), _states(other)
    both = {state: median(ours[state]) / median(theirs[state]) for state in ours if state in theirs}
    if both:
        worst = min(both, key=lambda name: both[name])
        return Value(
            both[worst], f"{worst or 'one thread'}: {median(ours[worst]):.4g} against {median(theirs[worst]):.4g}"
        )
    if not other:
        return Value(None, missing + _own_speed(own))
    return Value(None, "the two were never seen in the same undisturbed state")


def _own_speed(own: Sequence[Sample]) -> str:
    if not own:
        return ""
    quiet = [sample.value for sample in own if sample.state != DISTURBED]
    told = median(quiet or [sample.value for sample in own])
    return f"; own speed {told:.4g}" + ("" if quiet else ", disturbed")


def verdict(rows: Sequence[Row], values: dict[str, Value]) -> list[str]:
    """The table's last lines: how many rows were not measured, and of those that were, how many meet floor and goal."""
    measured = [(row, values[row.key].value) for row in rows if row.key in values]
    found = [(row, value) for row, value in measured if value is not None]
    floors, goals = (sum(value >= getattr(row, bar) for row, value in found) for bar in ("floor", "goal"))
    return [
        f"not measured: {len(rows) - len(found)} of {len(rows)} rows, which count as neither met nor missed",
        f"floors met: {floors} of {len(found)}; goals met: {goals} of {len(found)}",
    ]
