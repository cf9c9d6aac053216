"""Iteration-level against static batching, eight slots, output lengths uniform from 1 to 128 (Orca's effect).

    python benchmarks/iteration_level.py [--requests 256] [--rounds 2]          (make iteration-level)

Static: eight requests go together, and the next eight wait for the last of them. Steps of equal cost would give
E[max] / E[mean] = 1.77 at eight slots, less what the last of all requests leave empty: 5% with 128 requests, half of
that with 256. A step of eight rows costs more than one of the five that static batching has on average.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from statistics import median

from pressure import Arrival, drive, quiet_engine

from octavo.engine.config import EngineConfig
from octavo.engine.loader import LoadedEngine

SLOTS, LONGEST, PROMPT = 8, 128, 16
BAR = 1.5


def arrivals(requests: int, seed: int) -> list[Arrival]:
    """All at once."""
    rng = random.Random(seed)
    return [Arrival(0.0, PROMPT, rng.randint(1, LONGEST)) for _ in range(requests)]


def rate(loaded: LoadedEngine, name: str, batches: list[list[Arrival]]) -> float:
    """Output tokens a second of batches, one after the other."""
    begin = time.perf_counter()
    tokens = 0
    for number, batch in enumerate(batches):
        tokens += sum(len(one.tokens) for one in drive(loaded, f"{name}/{number}", batch).values())
    return tokens / (time.perf_counter() - begin)


def main() -> int:
    """Measure in turns and print; 1 where the gain is below the bar."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--format", default="bf16")
    given = parser.parse_args()
    loaded = quiet_engine(EngineConfig(backend="native", format=given.format, max_running_requests=SLOTS))
    found: dict[str, list[float]] = {"static": [], "iteration": []}
    for number in range(given.rounds + 1):  # the first one warms up
        work = arrivals(given.requests if number else 2 * SLOTS, number)
        batches = [work[at : at + SLOTS] for at in range(0, len(work), SLOTS)]
        for name, parts in (("static", batches), ("iteration", [work])):
            speed = rate(loaded, f"{name}{number}", parts)
            if number:
                found[name].append(speed)
    static, iteration = (median(found[name]) for name in ("static", "iteration"))
    print(f"static {static:.0f} tok/s, iteration-level {iteration:.0f} tok/s: {iteration / static:.2f}x (bar {BAR}x)")
    return 0 if iteration / static >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
