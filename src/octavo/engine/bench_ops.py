"""`octavo bench ops`: what each op of a model takes, within its own program, against what the machine gives.

Steps of the whole model are run with a clock around every record, so that weights stream past as they do in serving.
All threads meet around a record, which a plain step does not ask for: the sum is a little above a step's time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from octavo.backends import native_lib as lib
from octavo.backends.native_program import StepLimits
from octavo.core.errors import InvalidInput
from octavo.engine.bench_cost import PEAK_OF, attention_cost, matrices, matrix_cost, op_label
from octavo.engine.bench_machine import machine_state, native_engine
from octavo.engine.parts import ModelParts

__all__ = ["OpsBench", "Point", "require_native", "standard_points"]


@dataclass(frozen=True)
class Point:
    """A step: `sequences` of `tokens` new tokens each, behind `cached` tokens; every row gets logits."""

    sequences: int
    tokens: int
    cached: int

    @property
    def rows(self) -> int:
        """Rows of every product."""
        return self.sequences * self.tokens

    @property
    def name(self) -> str:
        """In words."""
        what = "prefill" if self.tokens > 1 else "decode"
        return f"{what}, {self.rows} row{'s' * (self.rows > 1)} behind {self.cached}"


def standard_points(
    rows: Sequence[int], prefill: int, context: int, long_context: int, limit: int
) -> tuple[list[Point], list[Point]]:
    """Decoding of `rows` sequences behind `context`, of one behind `long_context`, prefills from 0 and behind another.

    The second list is what does not fit into `limit` positions. Raises InvalidInput for sizes out of range, or when
    nothing fits.
    """
    for name, value, least in (("prefill", prefill, 2), ("context", context, 0), ("long_context", long_context, 0)):
        if value < least:
            raise InvalidInput(name, value, f"give at least {least}")
    points = [Point(count, 1, context) for count in rows]
    points += [Point(1, 1, long_context), Point(1, prefill, 0), Point(1, prefill, prefill)]
    points = list(dict.fromkeys(points))
    fitting = [point for point in points if point.cached + point.tokens <= limit]
    if not fitting:
        raise InvalidInput("context", context, f"the model's context is {limit} tokens; give less")
    return fitting, [point for point in points if point not in fitting]


def require_native(backend: Any) -> None:
    """Raises InvalidInput for a backend that runs no captured program."""
    if native_engine(backend) is None:
        raise InvalidInput("backend", backend.name, "ops are timed in the native library: use native")


class OpsBench:
    """Timed steps of a loaded model. Raises InvalidInput for a backend that runs no captured program."""

    def __init__(self, parts: ModelParts, points: Sequence[Point], page_size: int) -> None:
        require_native(parts.backend)
        self.parts, self.points, self.page_size = parts, tuple(points), page_size
        self.model: Any = parts.model
        groups = self.model.kv_groups()
        pages = [point.sequences * -(-(point.cached + point.tokens) // page_size) for point in self.points]
        self.pool = parts.backend.allocate_kv(max(pages) * len(groups), page_size, groups)
        self.num_groups = len(groups)
        most = max(point.rows for point in self.points)
        positions = max(point.cached + point.tokens for point in self.points)
        sequences = max(point.sequences for point in self.points)
        self.program = self.model.open(self.pool, StepLimits(most, sequences, positions, most))
        self._seconds: dict[Point, list[dict[str, float]]] = {point: [] for point in self.points}
        self.states: list[dict[str, Any]] = []  # of the machine, just before each round
        self._fill(max(pages) * len(groups), min(most, positions, page_size))

    def _fill(self, pages: int, tokens: int) -> None:
        """Keys and values of some tokens into every page: what was never written is read faster, from a cache."""
        self.program.run(self._batch(Point(1, tokens, 0)))
        written = self.num_groups  # pages of that step, the first ones
        self.parts.backend.copy_pages(self.pool, [(page % written, page) for page in range(written, pages)])

    def round(self, keep: bool = True) -> None:
        """Time one step of every point; `keep` False: a warm-up."""
        state = machine_state(self.parts.backend)
        if keep and state is not None:
            self.states.append(state)
        for point in self.points:
            seconds = self.program.time_ops(self._batch(point))
            if keep:
                sums: dict[str, float] = {}
                for op, took in zip(self.model.lowered.ops, seconds.tolist(), strict=True):
                    sums[op_label(op)] = sums.get(op_label(op), 0.0) + took
                self._seconds[point].append(sums)

    def _batch(self, point: Point) -> Any:
        rng = random.Random(point.rows)
        each = -(-(point.cached + point.tokens) // self.page_size)
        order = list(range(self.num_groups * point.sequences * each))
        rng.shuffle(order)  # pages of a pool that has been in use for a while
        tables = [
            [order[(g * point.sequences + s) * each :][:each] for s in range(point.sequences)]
            for g in range(self.num_groups)
        ]
        vocab = self.parts.config.vocab_size
        return self.parts.backend.batch(
            [rng.randrange(vocab) for _ in range(point.rows)],
            [point.cached + i for _ in range(point.sequences) for i in range(point.tokens)],
            [point.tokens] * point.sequences,
            tables,
            self.pool,
            logit_rows=list(range(point.rows)),
        )

    def results(self, native: dict[str, Any]) -> list[dict[str, Any]]:
        """One record for each op at each point. `native` is that part of the machine card: dot peaks are from there,
        the read rate from the rounds themselves."""
        peaks = native["dots_gop_s"][str(native["threads"])]
        read = median(state["read_gb_s"] for state in self.states)
        return [
            self._result(point, label, read, peaks)
            for point in self.points
            for label in dict.fromkeys(map(op_label, self.model.lowered.ops))
            if self._seconds[point]
        ]

    def _result(self, point: Point, label: str, read: float, peaks: dict[str, float]) -> dict[str, Any]:
        seconds = max(median(sums[label] for sums in self._seconds[point]), 1e-9)
        whole = max(median(sum(sums.values()) for sums in self._seconds[point]), 1e-9)
        ops = [op for op in self.model.lowered.ops if op_label(op) == label]
        size, work, kind = 0, 0, ""
        for op in ops:
            more, done, kind = self._cost(point, op)
            size, work = size + more, work + done
        peak = peaks.get(PEAK_OF.get(kind, ""), 0.0)
        return {
            "point": point.name,
            "rows": point.rows,
            "cached": point.cached,
            "prefill": point.tokens > 1,
            "op": label,
            "count": len(ops),
            "format": kind,
            "microseconds": 1e6 * seconds,
            "bytes": size,
            "operations": work,
            "share_of_step": seconds / whole,
            "gb_s": size / seconds / 1e9 if size else None,
            "gop_s": work / seconds / 1e9 if work else None,
            "share_of_read": size / seconds / 1e9 / read if size else None,
            "peak": PEAK_OF.get(kind) if peak else None,
            "share_of_peak": work / seconds / 1e9 / peak if work and peak else None,
        }

    def _cost(self, point: Point, op: Any) -> tuple[int, int, str]:
        """Bytes read, operations, and the format that says which dot; nothing for ops that only pass rows along."""
        if op.code == lib.LINEAR:
            return *matrix_cost(self.model, op, point.rows), matrices(op)[0].format
        if op.code == lib.ATTENTION:
            queries = [(point.cached, point.tokens)] * point.sequences
            return *attention_cost(self.model, self.pool, op, queries), self.model.kv_dtype
        return 0, 0, ""
