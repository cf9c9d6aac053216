"""What drafts cost, as measured, and what may be lost by finding that out. No clock is read here: seconds come in."""

from __future__ import annotations

__all__ = ["NEWEST", "Budget", "Line", "Rate"]

NEWEST = 1 / 8  # what the newest measurement counts in a mean
SHARE = 0.01  # of the seconds that pass: what trials may lose of them
OWED, SAVED = 4.0, 8.0  # steps: the most that is repaid of a loss, and that is kept of gains


class Line:
    """Seconds over a count: a line through what was measured, the older the less, nowhere falling.

    One count alone does not tell the seconds at none from those of each: it is the latter, or with ``flat`` the former.
    """

    def __init__(self, flat: bool = False) -> None:
        self._flat = flat
        self._seen = self._counts = self._squares = self._seconds = self._product = 0.0

    def saw(self, count: float, seconds: float, keep: float = 1.0 - NEWEST / 2) -> None:
        """So many took so long; what was measured before counts ``keep`` of what it did."""
        self._seen = keep * self._seen + 1.0
        self._counts = keep * self._counts + count
        self._squares = keep * self._squares + count * count
        self._seconds = keep * self._seconds + seconds
        self._product = keep * self._product + count * seconds

    def __bool__(self) -> bool:
        return self._seen > 0.0

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds at none, and of each."""
        if not self._seen:
            return 0.0, 0.0
        mean, level = self._counts / self._seen, self._seconds / self._seen
        variance = self._squares / self._seen - mean * mean
        if variance > 0.25:
            each = (self._product / self._seen - mean * level) / variance
        else:
            each = 0.0 if self._flat else level / mean
        each = min(max(each, 0.0), max(level / mean, 0.0))
        return max(level - each * mean, 0.0), each


class Rate:
    """Seconds of each, where the number varies much: of all seconds and all of them, the older the less."""

    def __init__(self) -> None:
        self._seconds = self._count = 0.0

    def saw(self, count: float, seconds: float) -> None:
        """So many took so long."""
        self._seconds, self._count = (1 - NEWEST) * self._seconds + seconds, (1 - NEWEST) * self._count + count

    def each(self, unknown: float) -> float:
        """Seconds, ``unknown`` if nothing was measured."""
        return self._seconds / self._count if self._count else unknown


class Budget:
    """Seconds that trials may lose: a share of those that pass, and what drafts have gained lately."""

    def __init__(self) -> None:
        self.left = 0.0

    def passed(self, seconds: float, lost: float, step: float) -> None:
        """So many seconds have passed, of which so many were lost, or gained; a plain step takes ``step``."""
        self.left = min(max(self.left + SHARE * seconds - lost, -OWED * step), SAVED * step)
