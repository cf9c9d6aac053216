"""A mixed load recorded, replayed twice, and every request of it explained.

    python benchmarks/record_replay.py [--seconds 600] [--model smollm2-135m-instruct] [--rate 3] [--out run.octl]

Requests arrive at random: short and long prompts, shared beginnings, several choices, sampled and greedy, stop strings,
logprobs, clients that go away and clients that are slow. Prints what was recorded, whether both replays were identical,
and how far the causes of each request are from the time that its client measured. Exits with 1 if a replay differs or
a request's causes are more than 1% (and 5 ms) off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

from octavo.core.explain import explain
from octavo.core.history import history_of
from octavo.core.params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.recorder import read_epochs
from octavo.engine.replay import replay_epoch

SLACK_S = 0.005  # of the event loop, around what the engine's clock can see


def some_request(rng: random.Random, vocab_size: int, room: int) -> tuple[list[int], SamplingParams, dict[str, float]]:
    """Prompt, parameters, and what the client does: go away after ``leave`` seconds, or read late by ``slow``."""
    start = [7 + rng.randrange(3)] * (48 if rng.random() < 0.5 else 0)
    longest = min(room // 2, 900)
    prompt = start + [rng.randrange(vocab_size) for _ in range(rng.choice([4, 30, 120, longest - 48]))]
    params: dict[str, Any] = {"max_tokens": rng.choice([1, 16, 60, 120]), "ignore_eos": rng.random() < 0.5}
    params["temperature"] = rng.choice([0.0, 0.8])
    params["n"] = rng.choice([1, 1, 1, 1, 2, 3])
    params["stop"] = rng.choice([(), (), ("e",), ("\n\n",)])
    params["logprobs"] = rng.choice([None, None, None, 2])
    client = {"leave": rng.random() * 2} if rng.random() < 0.1 else {"slow": 0.2 * (rng.random() < 0.1)}
    return prompt, SamplingParams(**params), client


async def client(engine: AsyncEngine, name: str, asked: tuple[Any, ...], walls: dict[str, float]) -> None:
    """One request; its wall time, unless its client goes away."""
    prompt, params, does = asked
    begun = time.monotonic()
    async with aclosing(engine.generate(prompt, params, request_id=name, tenant=f"t{len(prompt) % 3}")) as deltas:
        async for delta in deltas:
            if time.monotonic() - begun > does.get("leave", 1e9):
                return
            if delta.last:
                await asyncio.sleep(does.get("slow", 0.0))
    walls[name] = time.monotonic() - begun


async def drive(engine: AsyncEngine, seconds: float, rate: float, seed: int) -> dict[str, float]:
    """Requests at random for so long; the wall times of those that were read to the end."""
    rng, walls, tasks = random.Random(seed), {}, []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        asked = some_request(rng, engine.vocab_size, engine.max_seq_len)
        tasks.append(asyncio.create_task(client(engine, f"r{len(tasks)}", asked, walls)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks)
    return walls


async def record(options: argparse.Namespace) -> dict[str, float]:
    """Run the load on an engine that records."""
    config = EngineConfig(model=options.model, max_seq_len=options.max_seq_len, record=str(options.out))
    async with AsyncEngine.load(config, say=lambda line: None) as engine:
        return await drive(engine, options.seconds, options.rate, options.seed)


def check(path: Path, walls: dict[str, float], run_model: bool) -> bool:
    """Replay twice, explain all, print; whether all is as it must be."""
    epochs, damage = read_epochs(path)
    epoch, fine = epochs[-1], damage is None
    kinds = Counter(event["kind"] for event in epoch)
    print(f"{len(epoch)} events in {path.stat().st_size / 1e6:.2f} MB: {dict(kinds.most_common())}")
    for run in (1, 2):
        begun = time.monotonic()
        report = replay_epoch(epoch, run_model=run_model and run == 2)
        fine = fine and report.difference is None
        what = "identical" if report.difference is None else str(report.difference)
        model = " with the model" if report.ran_model else ""
        took = time.monotonic() - begun
        print(f"replay {run}{model}: {report.num_steps} steps, {report.num_tokens} tokens, {took:.1f} s: {what}")
    history = history_of(epoch)
    off = {name: abs(explain(history, name).total - wall) for name, wall in walls.items()}
    worst = max(off, key=lambda name: off[name] / walls[name])
    wrong = [name for name, seconds in off.items() if seconds > max(0.01 * walls[name], SLACK_S)]
    print(f"{len(walls)} requests read to the end; the causes of {len(walls) - len(wrong)} add up within 1% or 5 ms;")
    print(f"farthest: {worst}, {1e3 * off[worst]:.2f} ms of {1e3 * walls[worst]:.1f} ms")
    sums: Counter[str] = Counter()
    for life in history.lives.values():
        sums.update(life.sums)
    print("seconds by cause: " + ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in sums.most_common()))
    return fine and not wrong


def main() -> int:
    """Exit status 1 if a replay differs or a request's causes do not add up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("run.octl"))
    parser.add_argument("--run-model", action="store_true", help="the second replay draws the tokens again")
    options = parser.parse_args()
    walls = asyncio.run(record(options))
    return 0 if check(options.out, walls, options.run_model) else 1


if __name__ == "__main__":
    sys.exit(main())
