"""When a request will have its first token, from who is ahead of it: Little's law and the step model.

    wait for those ahead, whichever is slower:
      slots    as many of them as find no free slot wait for that many departures. Sequences in slots S stay W steps
               from their first token to their end on average, so S / W of them leave in a step (Little's law
               L = lambda W, with the slots as its scope).
      prompts  all their tokens are computed at the rate that the step model foretells.
    + its own prompt at that rate, and a step

Stays are counted in steps, and a step takes what steps took lately: a machine that becomes slower, or stands still,
changes one number and not the memory of all that have left. Waits for slots and for prompts are each corrected by what
they were off by lately. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.step_model import StepModel, StepWork, positions_read

__all__ = ["Ahead", "FirstTokenForecast", "Forecast", "Pace", "prefill_rate", "prefill_seconds"]

WEIGHT = 1 / 32  # of the newest departure in the mean stay
LEARN = 0.05  # of the newest error in the correction
MOST_ERROR = math.log(1.5)  # that one request may teach: a machine that stood still says nothing of the next
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
class Pace:
    """How fast an engine goes. 0: unknown."""

    slots: int = 0  # sequences that may run at once
    tokens_per_s: float = 0.0  # at which prompts are computed
    steps: int = 0  # that it has done
    step_seconds: float = 0.0  # of one step lately


@dataclass(frozen=True)
class Ahead:
    """Who has arrived and has no first token yet, and those that they wait for."""

    sequences: int
    tokens: int  # of their prompts
    running: int  # sequences from their first token to their end


@dataclass(frozen=True)
class Forecast:
    """Seconds until the first token; ``raw`` without correction; ``by`` is what holds it up: slots or prompts."""

    seconds: float
    raw: float
    by: str
    steps: float = 0.0  # that ``raw`` stands for; 0: unknown


class FirstTokenForecast:
    """Learns how many steps sequences stay and how far off its forecasts were."""

    def __init__(self) -> None:
        self.stay = 0.0  # mean steps from first token to end; 0: nobody has left yet
        self._corrections = {"slots": 0.0, "prompts": 0.0}  # logarithms

    def departure_rate(self, running: int, pace: Pace) -> float:
        """Sequences that leave in a second; 0 if unknown."""
        seconds = self.stay * pace.step_seconds
        return running / seconds if seconds > 0.0 else 0.0

    def forecast(self, ahead: Ahead, sequences: int, tokens: int, pace: Pace) -> Forecast:
        """For a request of so many sequences and prompt tokens, with these ahead of it."""
        each = 1.0 / pace.tokens_per_s if pace.tokens_per_s > 0.0 else 0.0
        departures = max(0, ahead.sequences + sequences - max(0, pace.slots - ahead.running))
        rate = self.departure_rate(pace.slots, pace)
        waits = {"prompts": ahead.tokens * each, "slots": departures / rate if rate > 0.0 else 0.0}
        by = max(waits, key=lambda name: waits[name])
        raw = waits[by] + tokens * each + pace.step_seconds
        steps = raw / pace.step_seconds if pace.step_seconds > 0.0 else 0.0
        return Forecast(raw * math.exp(self._corrections[by]), raw, by, steps)

    def departed(self, steps: int) -> None:
        """A sequence ended so many steps after its first token."""
        self.stay = float(steps) if self.stay == 0.0 else (1.0 - WEIGHT) * self.stay + WEIGHT * steps

    def learn(self, forecast: Forecast, seconds: float, steps: int) -> None:
        """The request of this forecast had its first token after ``seconds``, in so many steps.

        Who waits for slots is told by the steps: what the machine did meanwhile is no error of the count.
        """
        told, waited = (forecast.steps, float(steps)) if forecast.by == "slots" else (forecast.raw, seconds)
        if told <= 0.0 or waited <= 0.0:
            return
        before = self._corrections[forecast.by]
        error = min(max(math.log(waited / told) - before, -MOST_ERROR), MOST_ERROR)
        self._corrections[forecast.by] = min(max(before + LEARN * error, -MOST_CORRECTION), MOST_CORRECTION)
