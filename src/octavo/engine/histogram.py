"""Counts of values by upper edge: what Prometheus calls a histogram, at the cost of a list and a search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["SECONDS", "SEQUENCES", "TOKENS", "Histogram"]

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64,
    1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram:
    """``counts[i]`` values were at most ``edges[i]`` and above the edge before it; the last count is of the rest."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float] = SECONDS) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0  # sum of all values

    def add(self, value: float, count: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.edges, value)] += count
        self.total += value * count

    def told(self, name: str) -> dict[str, float]:
        """The counts as flat statistics, ``name/le/EDGE``, and ``name/sum``; callable from any thread."""
        edges = (*self.edges, float("inf"))
        counts = dict(zip((f"{name}/le/{edge}" for edge in edges), self.counts.copy(), strict=True))
        return {**counts, f"{name}/sum": self.total}
