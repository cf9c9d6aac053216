"""What a step costs: seconds as a linear function of its work, fitted while serving.

    seconds = 1 * c0 + decodes * c1 + context * c2 + chunks * c3 + prefill * c4 + attention * c5 + scored * c6

Least squares on relative errors, with forgetting; no coefficient is negative. Steps with and without prefill forget
apart, so that a long stretch of plain decoding does not wash out what is known of prompts. A time far above the
prediction counts as one at the edge of what is usual (winsorizing), and what is usual follows the errors.

Nothing here reads a clock: the same works and seconds give the same coefficients.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import log
from operator import add
from typing import NamedTuple

from octavo.core.batch import ScheduledRow, StepRows
from octavo.core.errors import InvalidInput

__all__ = ["StepModel", "StepWork", "Tail", "work_of"]

FORGET = 0.995  # weight of a step when the next one of its kind comes: about the last 200 count
RIDGE = 3e-4  # of a feature's own weight: what splits a cost between features that always came together
USUAL = 4.0  # times the usual relative error is what one measurement may say at most
ADAPT = 1.05  # how fast the usual error follows
ERROR_RANGE = (0.01, 1.0)  # of the usual relative error
FADE = 0.99  # of the largest work seen, with every step with prefill: what was long ago is known less well
REFIT_EVERY = 8  # steps; every step while there are fewer than FRESH of its kind, and after a surprise
FRESH = 32
ENOUGH_CHUNKS = 4  # steps with prefill before the model is called fitted; steps with logprobs that are just believed
TAIL_SIZE = 4096
PEAKS = 0.05  # of all values, the largest ones, tell how the tail falls off
FEWEST_PEAKS = 16
PACE = 1 / 64  # of the newest step in their mean time
LONG = 4.0  # times what was foretold is what one step counts at most


class StepWork(NamedTuple):
    """What a step computes, in the units that cost: rows and positions read."""

    decodes: int = 0  # rows of one token
    context: int = 0  # positions that they read, over all of them
    chunks: int = 0  # rows of more tokens
    prefill: int = 0  # their tokens
    attention: int = 0  # positions that each of these tokens reads, over all of them
    scored: int = 0  # tokens whose logprobs are asked for

    def with_chunk(self, start: int, tokens: int, scored: bool = False) -> StepWork:
        """This and one more row: ``tokens`` tokens from position ``start`` on."""
        return StepWork(
            self.decodes,
            self.context,
            self.chunks + 1,
            self.prefill + tokens,
            self.attention + positions_read(start, tokens),
            self.scored + tokens * scored,
        )


_WIDTH = 1 + len(StepWork._fields)


def positions_read(start: int, tokens: int) -> int:
    """Keys that the tokens at ``start, start + 1, ...`` read, each its own among them."""
    return tokens * start + tokens * (tokens + 1) // 2


def work_of(rows: Sequence[ScheduledRow]) -> StepWork:
    """The work of a decision's rows."""
    decodes = context = chunks = prefill = attention = scored = 0
    others = rows
    if isinstance(rows, StepRows):
        decodes, context, others = len(rows.starts), sum(rows.starts) + len(rows.starts), rows.others
    for row in others:
        tokens, flags = len(row.token_ids), row.flags
        if tokens == 1:
            decodes, context = decodes + 1, context + row.start + 1
        else:
            chunks, prefill = chunks + 1, prefill + tokens
            attention += positions_read(row.start, tokens)
        scored += tokens if flags.prompt_logprobs >= 0 else int(flags.logprobs >= 0)
    return StepWork(decodes, context, chunks, prefill, attention, scored)


class Tail:
    """Recent values, and what few of them exceed: the last ``size``, or the later ``part`` of all if that is less."""

    def __init__(self, size: int = TAIL_SIZE, part: float = 1.0) -> None:
        if size < 1:
            raise InvalidInput("size", size, "give at least 1")
        self.size, self.part = size, part
        self.seen = 0
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        """One more value; the oldest goes where there are too many."""
        self.seen += 1
        if len(self._order) >= min(self.size, max(FRESH, self.part * self.seen)):
            oldest = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._order.append(value)
        insort(self._sorted, value)

    def above(self, share: float) -> float:
        """The value that at most ``share`` of all are above: the largest while there are few. 0 without values."""
        if not self._sorted:
            return 0.0
        return self._sorted[-1 - min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    def beyond(self, share: float) -> float:
        """The value that ``share`` of what comes is above, if the largest values fall off exponentially: by their mean
        excess (peaks over a threshold; Pickands 1975). 0 without values."""
        seen = len(self._sorted)
        if not seen:
            return 0.0
        count = min(max(int(PEAKS * seen), FEWEST_PEAKS), seen)
        edge = self._sorted[-count]
        excess = sum(self._sorted[-count:]) / count - edge
        return edge + excess * max(0.0, log(count / (share * seen)))


class _Sums:
    """Weighted sums of products of one kind of step: what least squares needs of it."""

    def __init__(self) -> None:
        self.products = [[0.0] * _WIDTH for _ in range(_WIDTH)]
        self.targets = [0.0] * _WIDTH
        self._new: list[tuple[StepWork, float, float]] = []

    def add(self, work: StepWork, weight: float, target: float) -> None:
        """One more step. `settle` before the sums are read."""
        self._new.append((work, weight, target))

    def settle(self) -> None:
        """Sum up what was added: before each step, everything before it loses weight."""
        for work, weight, target in self._new:
            self._sum([weight, *(value * weight for value in work)], target * weight)
        self._new.clear()

    def _sum(self, features: Sequence[float], target: float) -> None:
        for i, value in enumerate(features):
            row = self.products[i]
            for j in range(i + 1):
                row[j] = FORGET * row[j] + value * features[j]
            self.targets[i] = FORGET * self.targets[i] + value * target


class StepModel:
    """Predicts the seconds of a step. ``coefficients`` are those of 1 and of the fields of `StepWork`, in seconds."""

    def __init__(self) -> None:
        self.coefficients: tuple[float, ...] = (0.0,) * _WIDTH
        self.num_steps = 0
        self.num_chunked = self.num_scored = 0  # of them, those with prefill, and with logprobs
        self.most_prefill = self.most_attention = self.most_scored = 0.0  # of one step, lately
        self.step_seconds = 0.0  # of a step lately, whatever it did
        self.usual_error = 0.1  # relative: half of all are larger
        self._kinds = (_Sums(), _Sums())  # without prefill, with prefill

    @property
    def is_fitted(self) -> bool:
        """True once steps with prefill have been seen often enough to say what the next one costs."""
        return self.num_chunked >= ENOUGH_CHUNKS

    def predict(self, work: StepWork) -> float:
        """Seconds that a step of this work takes; 0 before anything was measured."""
        constant, decodes, context, chunks, prefill, attention, scored = self.coefficients
        return (
            constant
            + decodes * work.decodes
            + context * work.context
            + chunks * work.chunks
            + prefill * work.prefill
            + attention * work.attention
            + scored * work.scored
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one step. A time that is not above 0 says nothing and is passed over."""
        if not 0.0 < seconds < float("inf"):
            return
        expected = self.predict(work)
        self._keep_pace(min(seconds, LONG * expected) if self.num_steps >= FRESH else seconds)
        fresh = not expected or (self.num_chunked if work.prefill else self.num_steps) < FRESH
        fresh = fresh or (work.scored > 0 and self.num_scored < ENOUGH_CHUNKS)
        target = seconds if fresh else self._within_reason(expected, seconds)
        weight = 1.0 / (max(expected, 0.25 * target) if self.num_steps >= FRESH else target)
        self._kinds[work.prefill > 0].add(work, weight, target)
        self.num_steps += 1
        if work.prefill:
            self.num_chunked += 1
            self.most_prefill = max(FADE * self.most_prefill, work.prefill)
            self.most_attention = max(FADE * self.most_attention, work.attention)
            self.most_scored = max(FADE * self.most_scored, work.scored)
        self.num_scored += work.scored > 0
        if fresh or target != seconds or not self.num_steps % REFIT_EVERY:
            self.coefficients = self._fit()

    def _keep_pace(self, seconds: float) -> None:
        """That one step took very long does not say that the next ones will: of it comes in what is likely."""
        self.step_seconds += (seconds - self.step_seconds) * max(PACE, 1.0 / (self.num_steps + 1))

    def _within_reason(self, expected: float, seconds: float) -> float:
        """The measurement, or the most that is believed if it is far above the prediction; updates what is usual.

        What disturbs a step makes it longer: a short time is always believed.
        """
        error = seconds / expected - 1.0
        self.usual_error *= ADAPT if abs(error) > self.usual_error else 1.0 / ADAPT
        self.usual_error = min(max(self.usual_error, ERROR_RANGE[0]), ERROR_RANGE[1])
        return min(seconds, expected * (1.0 + USUAL * self.usual_error))

    def _fit(self) -> tuple[float, ...]:
        """Least squares over the features that were seen, dropping one after the other that comes out negative."""
        plain, chunked = self._kinds
        plain.settle()
        chunked.settle()
        products = [list(map(add, *rows)) for rows in zip(plain.products, chunked.products, strict=True)]
        targets = list(map(add, plain.targets, chunked.targets))
        used = [i for i in range(_WIDTH) if products[i][i] > 0.0]
        while used:
            found = _solve(products, targets, used)
            worst = min(range(len(used)), key=lambda i: found[i] * products[used[i]][used[i]] ** 0.5)
            if found[worst] >= 0.0:
                values = dict(zip(used, found, strict=True))
                return tuple(values.get(i, 0.0) for i in range(_WIDTH))
            del used[worst]
        return self.coefficients


def _solve(products: Sequence[Sequence[float]], targets: Sequence[float], used: Sequence[int]) -> list[float]:
    """The normal equations of the features ``used``, by Cholesky of the matrix scaled to a unit diagonal."""
    scale = [products[i][i] ** 0.5 for i in used]
    lower: list[list[float]] = []
    half: list[float] = []
    for r, i in enumerate(used):
        row = [products[i][used[c]] / (scale[r] * scale[c]) for c in range(r)]
        for c in range(r):
            row[c] = (row[c] - sum(row[k] * lower[c][k] for k in range(c))) / lower[c][c]
        row.append(max(1.0 + RIDGE - sum(value * value for value in row), RIDGE) ** 0.5)
        lower.append(row)
        half.append((targets[i] / scale[r] - sum(row[k] * half[k] for k in range(r))) / row[r])
    found = [0.0] * len(used)
    for r in reversed(range(len(used))):
        later = sum(lower[k][r] * found[k] for k in range(r + 1, len(used)))
        found[r] = (half[r] - later) / lower[r][r]
    return [value / factor for value, factor in zip(found, scale, strict=True)]
