"""An engine under an open load: requests come when they come, and every token is timed.

In process and in one thread: what is measured is scheduling, not HTTP.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.config import EngineConfig
from octavo.engine.loader import LoadedEngine, load_engine

__all__ = ["Arrival", "Load", "Times", "drive", "percentile", "quiet_engine"]

_NAP = 0.0005


@dataclass(frozen=True)
class Arrival:
    """A request of random tokens that comes `at` seconds after the beginning."""

    at: float
    prompt: int
    output: int
    tenant: str = ""


@dataclass
class Times:
    """Seconds on the clock of the run: when a request came, and when each of its tokens did."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.arrival


class Load:
    """Arrivals as requests for one engine, each with a prompt of its own."""

    def __init__(self, loaded: LoadedEngine, name: str, seed: int = 0) -> None:
        self.loaded, self.name = loaded, name
        self.rng, self.count = random.Random(f"{name}/{seed}"), 0

    def request(self, arrival: Arrival, now: float) -> Request:
        """Greedy, to the full length."""
        self.count += 1
        parts = self.loaded.parts
        prompt = [self.rng.randrange(parts.config.vocab_size) for _ in range(arrival.prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        name = f"{self.name}/{arrival.tenant}/{self.count}"
        return Request(
            name, prompt, params, tenant=arrival.tenant, arrival=now, namespace=parts.namespace(""), model=parts.name
        )


def quiet_engine(settings: EngineConfig) -> LoadedEngine:
    """Load without the memory plan on the screen."""
    return load_engine(settings, say=lambda line: None)


def drive(
    loaded: LoadedEngine,
    name: str,
    arrivals: Iterable[Arrival],
    clock: Callable[[], float] = time.perf_counter,
    until: float | None = None,
) -> dict[str, Times]:
    """Submit each arrival when its time has come and step until all have ended, or `until` seconds have passed (what is
    left is cancelled then). By request id, which holds the tenant."""
    load, core = Load(loaded, name), loaded.core
    waiting = sorted(arrivals, key=lambda arrival: arrival.at)
    times: dict[str, Times] = {}
    begin = clock()
    while waiting or core.has_work:
        now = clock()
        if until is not None and now - begin > until:
            for request_id in times:
                core.cancel(request_id)
            waiting = []
        while waiting and begin + waiting[0].at <= now:
            arrival = waiting.pop(0)
            request = load.request(arrival, begin + arrival.at)
            times[request.request_id] = Times(begin + arrival.at)
            core.submit(request, now)
        if not core.has_work:
            time.sleep(min(_NAP, max(0.0, begin + waiting[0].at - now)) if waiting else 0)
            continue
        events = core.step(clock())
        done = clock()
        for event in events:
            if event.kind is EventKind.TOKEN:
                times[event.request_id].tokens.append(done)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN without any."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else float("nan")
