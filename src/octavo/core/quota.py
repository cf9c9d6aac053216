"""How much of something may be taken in a minute: a bucket that fills up again. Time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bucket"]


@dataclass
class Bucket:
    """``per_minute`` units, taken as they come and given back evenly; 0: any number.

    What is taken may be more than there is (a request's output is known at its end): the debt is waited for. One that
    asks for more than a whole minute's worth waits for a full bucket.
    """

    per_minute: int
    taken: float = 0.0  # of them, given back since ``at``
    at: float = 0.0

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much may be taken; 0: now."""
        if not self.per_minute:
            return 0.0
        self._fill(now)
        excess = self.taken + min(amount, self.per_minute) - self.per_minute
        return max(0.0, excess) * 60.0 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """So much is gone."""
        self._fill(now)
        self.taken += amount

    def _fill(self, now: float) -> None:
        self.taken = max(0.0, self.taken - max(0.0, now - self.at) * self.per_minute / 60.0)
        self.at = now
