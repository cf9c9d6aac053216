"""Gaps between the tokens of a choice, as they leave the engine; and what a bound on them costs, told to the operator.

A gap ends with the commit of the step that drew its second token, so it holds all that lies between: planning, the
model, other requests' events, what readers of the last step did.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.gap import GapControl
from octavo.core.request import Branch
from octavo.engine.histogram import Histogram

__all__ = ["GapMeter", "GapWatch"]

_LEAST, _RATIO = 1e-5, 1.02  # the buckets' first edge in seconds, and from each to the next
_LOG_RATIO = math.log(_RATIO)
_TELL_EVERY = 60.0  # seconds
_log = logging.getLogger(__name__)


class GapMeter:
    """Counts gaps in buckets of 2%. The plain decodes of equal steps cost one entry, however many they are."""

    def __init__(self, bound: float = 0.0) -> None:
        self.bound = bound  # seconds; 0: none
        self.num_gaps = self.num_above = 0  # of all, those above the bound
        self._counts: dict[int, int] = {}
        self._seconds = 0.0  # of all gaps
        self._steady: Sequence[Branch] = ()  # whose last token came at `_at`
        self._at = 0.0
        self._last: dict[tuple[str, int], float] = {}  # time of the last token of other choices

    def saw(self, events: Sequence[TokenEvent], now: float) -> None:
        """The events of a step that ended ``now``."""
        listed = events
        if isinstance(events, StepEvents):
            self._saw_drawn(events.branches, now)
            listed = events.others
        if listed:
            self._part()
        for event in listed:
            key = (event.request_id, event.choice)
            if event.kind is EventKind.TOKEN:
                self._saw_token(key, now)
            elif event.kind is EventKind.CHOICE_END:
                self._last.pop(key, None)

    def _saw_drawn(self, branches: Sequence[Branch], now: float) -> None:
        if branches == self._steady:
            self._add(now - self._at, len(branches))
        else:
            self._part()
            for branch in branches:
                self._saw_token(branch.key, now)
        self._steady, self._at = branches, now

    def _part(self) -> None:
        """From here on the choices go each its own way."""
        self._last.update((branch.key, self._at) for branch in self._steady)
        self._steady = ()

    def _saw_token(self, key: tuple[str, int], now: float) -> None:
        last = self._last.get(key)
        if last is not None:
            self._add(now - last, 1)
        self._last[key] = now

    def _add(self, gap: float, count: int) -> None:
        self.num_gaps += count
        self._seconds += gap * count
        self.num_above += count * (0.0 < self.bound < gap)
        bucket = math.ceil(math.log(gap / _LEAST) / _LOG_RATIO) if gap > _LEAST else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of all gaps are not above, to 2%; 0 without any. Callable from any thread."""
        counts = sorted(self._counts.copy().items())
        left = share * sum(count for _, count in counts)
        for bucket, count in counts:
            left -= count
            if left <= 0.0:
                return _LEAST * _RATIO**bucket
        return 0.0

    def histogram(self) -> Histogram:
        """All gaps, to 2%. Callable from any thread."""
        found = Histogram()
        for bucket, count in self._counts.copy().items():
            found.add(_LEAST * _RATIO**bucket, count)
        found.total = self._seconds
        return found

    def summary(self) -> dict[str, float]:
        """Quantiles in seconds, and counts."""
        return {
            "token_gaps": self.num_gaps,
            "token_gaps_above_bound": self.num_above,
            "token_gap_p50_s": self.quantile(0.5),
            "token_gap_p99_s": self.quantile(0.99),
            "token_gap_p999_s": self.quantile(0.999),
        }


class GapWatch:
    """Warns once where the bound cannot be kept, and says now and then what it costs."""

    def __init__(self, gap: GapControl, meter: GapMeter) -> None:
        self._gap, self._meter = gap, meter
        self._warned = False
        self._told_at: float | None = None
        self._told_of = 0

    def look(self, now: float, busy_seconds: float) -> None:
        """After a step; ``busy_seconds`` is what all steps have taken."""
        if self._gap.steps_hopeless and not self._warned:
            self._warned = True
            _log.warning(
                "decodes alone take longer than max_token_gap_ms = %.0f: prompts progress by a token a step; lower "
                "max_running_requests or raise the bound (counted as gap_steps_hopeless)",
                1e3 * self._gap.bound,
            )
        if self._told_at is None:
            self._told_at = now
        if now - self._told_at >= _TELL_EVERY and self._gap.steps_limited > self._told_of:
            self._told_at, self._told_of = now, self._gap.steps_limited
            _log.info(
                "token gaps: p99.9 %.1f ms of at most %.0f; %d steps cut their prefill, which cost %.1f%% of the time",
                1e3 * self._meter.quantile(0.999),
                1e3 * self._gap.bound,
                self._gap.steps_limited,
                100.0 * self._gap.seconds_lost / max(busy_seconds, 1e-9),
            )
