"""Two tenants, one of whom floods: what the quiet one waits for its first token, by policy.

    python benchmarks/fairness.py [--seconds 30] [--rate 2] [--json FILE]      (make fairness)

The loud tenant sends prompts of 4,000 tokens at ten times what the engine can serve; the quiet one a short request now
and then. Its time to the first token alone, beside the flood under first-come, and under the fair policy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from pressure import Arrival, drive, percentile, quiet_engine

from octavo.engine.bench_machine import machine_card
from octavo.engine.config import EngineConfig

LONG, LONG_OUT, SHORT, SHORT_OUT = 4000, 32, 48, 16


def quiet(seconds: float, rate: float) -> list[Arrival]:
    """Short requests, Poisson."""
    rng, at, found = random.Random(1), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at, SHORT, SHORT_OUT, "quiet"))
    return found


def flood(seconds: float, rate: float) -> list[Arrival]:
    """Long requests, evenly, from the beginning."""
    return [Arrival(number / rate, LONG, LONG_OUT, "loud") for number in range(int(seconds * rate))]


def measure(settings: EngineConfig, seconds: float, rate: float, loud_rate: float) -> dict[str, Any]:
    """First-token times of the quiet tenant, and the longest step that ran meanwhile."""
    loaded = quiet_engine(settings)
    drive(loaded, "warm", [Arrival(0, SHORT, 4), Arrival(0, LONG, 4)])
    before = len(loaded.core.metrics.timeline())
    arrivals = quiet(seconds, rate) + (flood(seconds, loud_rate) if loud_rate else [])
    times = drive(loaded, "run", arrivals, until=seconds * 1.2)
    first = [t.first_token for name, t in times.items() if "/quiet/" in name and t.tokens]
    asked = sum("/quiet/" in name for name in times)
    loud = sum(len(t.tokens) for name, t in times.items() if "/loud/" in name)
    steps = [record["ended"] - record["started"] for record in loaded.core.metrics.timeline()[before:]]
    return {
        "answered": len(first), "asked": asked, "p50_ms": 1e3 * percentile(first, 0.5),
        "p99_ms": 1e3 * percentile(first, 0.99), "step_ms": 1e3 * percentile(steps, 0.99), "loud_tokens": loud,
    }  # fmt: skip


def main() -> int:
    """Measure and print; 1 where the fair policy misses its bar."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of the quiet tenant")
    parser.add_argument("--loud-rate", type=float, default=10.0, help="long requests a second of the other")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    base = {"backend": "native", "format": "w8g64", "max_seq_len": 8192, "kv_memory": "1GiB", "prefix_cache": False}
    runs = {"alone": ("fcfs", 0.0), "first come": ("fcfs", given.loud_rate), "fair": ("fair", given.loud_rate)}
    found = {}
    print(f"{'':<12}{'answered':>10}{'p50 ms':>10}{'p99 ms':>10}{'step p99 ms':>13}{'tokens of the loud':>20}")
    for name, (policy, loud) in runs.items():
        found[name] = one = measure(EngineConfig(policy=policy, **base), given.seconds, given.rate, loud)
        answered = f"{one['answered']}/{one['asked']}"
        print(
            f"{name:<12}{answered:>10}{one['p50_ms']:>10.1f}{one['p99_ms']:>10.1f}{one['step_ms']:>13.1f}{one['loud_tokens']:>20}"
        )
    bar = 1.5 * found["alone"]["p99_ms"] + found["fair"]["step_ms"]
    met = found["fair"]["p99_ms"] <= bar and found["fair"]["answered"] == found["fair"]["asked"]
    print(f"{'met' if met else 'MISSED'}: 1.5 times alone and one step is {bar:.1f} ms")
    if given.json:
        card = machine_card(quiet_engine(EngineConfig(**base)).parts.backend)
        given.json.write_text(json.dumps({"machine": card, "runs": found, "bar_ms": bar, "met": met}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
