"""When a request will have its first token, from who is ahead of it: Little's law and the step model.

Two things may hold it up, and the slower one counts:

    slots    of those ahead, as many as find no free slot wait for that many departures. Running sequences R stay W
             seconds from their first token to their end on average, so R / W of them leave in a second (Little's law
             L = lambda W, with the running set as its scope).
    prompts  all tokens ahead and its own are computed at the rate that the step model foretells.

Each of the two is corrected by what it was off by lately. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.step_model import StepModel, StepWork, positions_read

__all__ = ["Ahead", "FirstTokenForecast", "Forecast", "prefill_rate", "prefill_seconds"]

WEIGHT = 1 / 32  # of the newest departure in the mean stay
LEARN = 0.1  # of the newest error in the correction
MOST_CORRECTION = math.log(3.0)
SURE = 0.8  # of the foretold time passes at least: what is said to be hopeless must be


def prefill_seconds(model: StepModel, tokens: int, start: int, chunk: int) -> float:
    """Seconds in which ``tokens`` tokens from position ``start`` on are computed, ``chunk`` in a step, alone."""
    steps = -(-tokens // chunk)
    work = StepWork(0, 0, steps, tokens, positions_read(start, tokens))
    return model.predict(work) + (steps - 1) * model.coefficients[0] if steps else 0.0


def prefill_rate(model: StepModel, beside: StepWork, tokens: int, chunk: int) -> float:
    """Prompt tokens a second where steps take ``tokens`` of them beside the decodes of ``beside``; 0 if unknown."""
    if tokens < 1 or not model.is_fitted:
        return 0.0
    work = StepWork(beside.decodes, beside.context, -(-tokens // chunk), tokens, positions_read(chunk, tokens))
    seconds = model.predict(work)
    return tokens / seconds if seconds > 0.0 else 0.0


@dataclass(frozen=True)
class Ahead:
    """Who has arrived and has no first token yet, and what serves them."""

    sequences: int
    tokens: int  # of their prompts
    running: int  # sequences from their first token to their end
    slots: int  # sequences that may run at once; 0: unknown
    tokens_per_s: float  # at which prompts are computed; 0: unknown


@dataclass(frozen=True)
class Forecast:
    """Seconds until the first token; ``raw`` without correction; ``by`` is what holds it up: slots or prompts."""

    seconds: float
    raw: float
    by: str


class FirstTokenForecast:
    """Learns how long sequences stay and how far off its forecasts were."""

    def __init__(self) -> None:
        self.stay = 0.0  # mean seconds from first token to end; 0: nobody has left yet
        self._corrections = {"slots": 0.0, "prompts": 0.0}  # logarithms

    def departure_rate(self, running: int) -> float:
        """Sequences that leave in a second; 0 if unknown."""
        return running / self.stay if self.stay > 0.0 else 0.0

    def forecast(self, ahead: Ahead, sequences: int, tokens: int) -> Forecast:
        """For a request of so many sequences and prompt tokens, with these ahead of it."""
        own = (ahead.tokens + tokens) / ahead.tokens_per_s if ahead.tokens_per_s > 0.0 else 0.0
        found = [Forecast(own * self._factor("prompts"), own, "prompts")]
        rate = self.departure_rate(ahead.running)
        departures = ahead.sequences + sequences - max(0, ahead.slots - ahead.running)
        if ahead.slots and departures > 0 and rate > 0.0:
            wait = departures / rate
            found.append(Forecast(wait * self._factor("slots"), wait, "slots"))
        return max(found, key=lambda forecast: forecast.seconds)

    def departed(self, stay: float) -> None:
        """A sequence ended ``stay`` seconds after its first token."""
        self.stay = stay if self.stay == 0.0 else (1.0 - WEIGHT) * self.stay + WEIGHT * stay

    def learn(self, forecast: Forecast, seconds: float) -> None:
        """The request of this forecast had its first token after ``seconds``."""
        if forecast.raw <= 0.0 or seconds <= 0.0:
            return
        before = self._corrections[forecast.by]
        after = before + LEARN * (math.log(seconds / forecast.raw) - before)
        self._corrections[forecast.by] = min(max(after, -MOST_CORRECTION), MOST_CORRECTION)

    def _factor(self, by: str) -> float:
        return math.exp(self._corrections[by])
