"""Sixteen streaming clients on the real model, each with a marker of its own: no error, no mixing, pages back to idle.

    make soak                                        two minutes against a server of its own
    python benchmarks/soak.py --seconds 10 --url http://127.0.0.1:8000

Each client asks for the continuation of a text in which one word, its marker, is certain. A quarter of the streams are
left in the middle. Prints what happened as JSON, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "serve"))

from live_server import live_server, metric, wait_idle

MODEL = "smollm2-135m-instruct"
MARKERS = (
    *("river", "apple", "stone", "cloud", "tiger", "piano", "lemon", "chair"),
    *("ocean", "bread", "robot", "candle", "garden", "window", "silver", "banana"),
)


@dataclass
class Report:
    """What happened."""

    seconds: float = 0.0
    answers: int = 0
    left: int = 0
    tokens: int = 0
    idle_at_end: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything was wrong."""
        return bool(self.errors) or not self.idle_at_end or not self.answers


async def converse(client: openai.AsyncOpenAI, marker: str, seed: int, until: float, report: Report) -> None:
    """One client: stream after stream until the time is over, at least one."""
    dice = random.Random(seed)
    for turn in itertools.count():
        leave_early = dice.random() < 0.25 and turn
        try:
            text = await ask(client, marker, dice.randrange(1, 5), leave_early=bool(leave_early), report=report)
        except openai.OpenAIError as error:
            report.errors.append(f"{marker}: {error}")
        else:
            expected = f" {marker} is here.\n"
            if not (expected.startswith(text) if leave_early else text == expected):
                report.errors.append(f"{marker}: answered {text!r}")
        if time.monotonic() >= until:
            return


async def ask(client: openai.AsyncOpenAI, marker: str, extra: int, *, leave_early: bool, report: Report) -> str:
    """One stream; the text that arrived."""
    prompt = f"The {marker} is here.\n" * (3 + extra) + "The"
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    pieces: list[str] = []
    async for chunk in stream:
        pieces += [choice.text for choice in chunk.choices]
        report.tokens += chunk.usage.completion_tokens if chunk.usage else 0
        if leave_early and len(pieces) == 2:
            await stream.close()
            report.left += 1
            return "".join(pieces)
    report.answers += 1
    return "".join(pieces)


async def soak(url: str, seconds: float, clients: int) -> Report:
    """Run all clients and wait until the server is idle again."""
    report, started = Report(), time.monotonic()
    limits = httpx.Limits(max_connections=clients * 2)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=120,
        http_client=httpx.AsyncClient(limits=limits, timeout=120),
    ) as client:
        markers = itertools.islice(itertools.cycle(MARKERS), clients)
        talks = (converse(client, m, seed, started + seconds, report) for seed, m in enumerate(markers))
        await asyncio.gather(*talks)
    report.seconds = round(time.monotonic() - started, 2)
    report.idle_at_end = await asyncio.to_thread(wait_idle, url)
    return report


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--url", default="", help="a running server; without it one is started")
    given = parser.parse_args()
    server: Any = nullcontext() if given.url else live_server(MODEL, "--max-seq-len", "1024", "--kv-memory", "512MiB")
    with server as started:
        url = given.url or started.url
        report = asyncio.run(soak(url, given.seconds, given.clients))
        preemptions = metric(url, "vllm:num_preemptions_total")
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(
        json.dumps(
            {**asdict(report), "clients": given.clients, "preemptions": preemptions, "machine": machine}, indent=2
        )
    )
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
