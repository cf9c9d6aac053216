"""Counters of several front ends as one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["Values", "added"]

# by metric: labels, and a value or those of a histogram
_Numbers = dict[str, list[tuple[tuple[str, ...], list[float]]]]


class Values(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a front end counts: what never falls, and what does not outlive it."""

    counters: _Numbers = {}
    gauges: _Numbers = {}


def added(several: Iterable[Values]) -> Values:
    """The sums, by metric and labels."""
    counters: dict[str, dict[tuple[str, ...], list[float]]] = {}
    gauges: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for values in several:
        _add(counters, values.counters)
        _add(gauges, values.gauges)
    return Values(*({name: list(rows.items()) for name, rows in sums.items()} for sums in (counters, gauges)))


def _add(sums: dict[str, dict[tuple[str, ...], list[float]]], more: _Numbers) -> None:
    for name, rows in more.items():
        known = sums.setdefault(name, {})
        for labels, numbers in rows:
            before = known.get(labels, [0.0] * len(numbers))
            known[labels] = [a + b for a, b in zip(before, numbers, strict=True)]
