"""The gaps between the tokens of running requests while long prompts arrive, with a bound on them and without.

    python benchmarks/token_gap.py [--bound-ms 60] [--seconds 60] [--model smollm2-135m-instruct] [--json FILE]

Some requests decode all the time. In the first half prompts of 2,000 tokens arrive at random; in the second there is
always one more of them waiting, so that tokens of prompt and output together tell what the bound costs. Gaps are those
that readers see: from one delta of a request to its next, in the event loop. Exits with 1 if p99.9 is above the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.params import SamplingParams
from octavo.engine.async_engine import AsyncEngine, EngineStopped
from octavo.engine.config import EngineConfig


@dataclass
class Half:
    """What happened in one half of a run."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)  # of the long prompts
    seconds: float = 0.0
    tokens: int = 0  # computed by the engine, prompt and output

    def report(self) -> dict[str, float]:
        """In milliseconds and tokens a second."""
        gaps, firsts = sorted(self.gaps), sorted(self.first_tokens)
        return {
            "gaps": len(gaps),
            **{f"gap_{name}_ms": round(1e3 * at(gaps, share), 2) for name, share in SHARES.items()},
            "prompts": len(firsts),
            "first_token_p50_ms": round(1e3 * at(firsts, 0.5), 1),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
        }


SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}


def at(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are not above."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Bench:
    """One engine, its decoders and its prompts."""

    def __init__(self, engine: AsyncEngine, given: argparse.Namespace) -> None:
        self.engine, self.given = engine, given
        self.dice = random.Random(given.seed)
        self.half = Half()

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids: no two prompts share a prefix."""
        return [self.dice.randrange(100, self.engine.vocab_size) for _ in range(tokens)]

    async def decode(self) -> None:
        """One request after the other that decodes; every gap is kept."""
        while True:
            params = SamplingParams(temperature=1.0, max_tokens=self.given.output, ignore_eos=True)
            last: float | None = None
            async for _ in self.engine.generate(self.prompt(32), params):
                now = time.perf_counter()
                if last is not None:
                    self.half.gaps.append(now - last)
                last = now

    async def ask(self) -> None:
        """One long prompt with a short answer."""
        begun, first = time.perf_counter(), True
        params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
        with suppress(EngineStopped):
            async for _ in self.engine.generate(self.prompt(self.given.prompt), params):
                if first:
                    self.half.first_tokens.append(time.perf_counter() - begun)
                    first = False

    async def arrive(self) -> None:
        """Prompts at random."""
        tasks: list[asyncio.Future[None]] = []
        while True:
            await asyncio.sleep(self.dice.expovariate(1.0 / self.given.every))
            tasks.append(asyncio.ensure_future(self.ask()))

    async def press(self) -> None:
        """Always a prompt in work, and one that waits."""
        await asyncio.gather(*(self._press() for _ in range(2)))

    async def _press(self) -> None:
        while True:
            await self.ask()

    async def run_half(self, load: Any) -> Half:
        """Run a load beside the decoders."""
        self.half = half = Half()
        before, begun = self.engine.stats()["scheduled_tokens"], time.perf_counter()
        task = asyncio.ensure_future(load)
        await asyncio.sleep(self.given.seconds / 2)
        half.seconds = time.perf_counter() - begun
        half.tokens = int(self.engine.stats()["scheduled_tokens"] - before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return half


async def measure(given: argparse.Namespace, bound_ms: int) -> dict[str, Any]:
    """Both halves under one bound."""
    config = EngineConfig(given.model, max_token_gap_ms=bound_ms, max_seq_len=4096, prefix_cache=False)
    engine = await asyncio.to_thread(AsyncEngine.load, config, say=lambda line: None)
    async with engine:
        bench = Bench(engine, given)
        decoders = [asyncio.ensure_future(bench.decode()) for _ in range(given.decoders)]
        await asyncio.sleep(1.0)
        random_half = await bench.run_half(bench.arrive())
        pressed = await bench.run_half(bench.press())
        stats = engine.stats()
        for task in decoders:
            task.cancel()
        await asyncio.gather(*decoders, return_exceptions=True)
        model = engine.loaded.core.scheduler.step_model
    kept = {name: round(value, 4) for name, value in stats.items() if name.startswith(("gap_", "token_gap"))}
    return {
        "bound_ms": bound_ms,
        "random": random_half.report(),
        "pressed": pressed.report(),
        "engine": kept,
        "step_model_us": [round(1e6 * value, 4) for value in model.coefficients],
    }


def main() -> int:
    """Parse, run without a bound and with it, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--bound-ms", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two runs")
    parser.add_argument("--decoders", type=int, default=8)
    parser.add_argument("--output", type=int, default=500, help="tokens of a request that decodes")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long prompts, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs = [asyncio.run(measure(given, bound)) for bound in (0, given.bound_ms)]
    free, bound = runs
    price = 1.0 - bound["pressed"]["tokens_per_s"] / free["pressed"]["tokens_per_s"]
    worst = max(bound[half]["gap_p999_ms"] for half in ("random", "pressed"))
    result = {
        "price": round(price, 4),
        "holds": worst <= given.bound_ms,
        "runs": runs,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if worst <= given.bound_ms else 1


if __name__ == "__main__":
    sys.exit(main())
