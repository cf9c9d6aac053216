"""Three times as many requests as the server can take: what it gets done, how fast it refuses, how well it foretells.

    python benchmarks/overload.py [--seconds 300] [--factor 3] [--model NAME] [--json FILE] [--svg FILE]

A server of its own. First its peak: requests come as fast as they are answered, and those done in a second, within the
bound on the first token, are its goodput at peak. Then requests arrive at random at ``factor`` times that rate
(an open loop: nobody waits for an answer to send the next). Exits with 1 unless goodput stays at 90% of the peak,
refusals come within 50 ms (p99), memory is flat and half of the forecasts are within 20%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "serve"))

from live_server import live_server

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Phase:
    """What came back in one phase. Times in seconds."""

    seconds: float = 0.0
    sent: int = 0
    done: int = 0  # whole answers whose first token came within the bound
    late: int = 0
    errors: list[str] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)  # how long each took
    retry_after: list[float] = field(default_factory=list)
    forecasts: list[tuple[float, float]] = field(default_factory=list)  # of the first token: foretold, real

    def report(self) -> dict[str, Any]:
        """As plain numbers."""
        errors = sorted(abs(told - real) / real for told, real in self.forecasts if real > 0)
        refusals = sorted(self.refusals)
        return {
            "sent": self.sent,
            "goodput_per_s": round(self.done / self.seconds, 3),
            "late": self.late,
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else "",
            "refused": len(refusals),
            "refusal_p50_ms": round(1e3 * at(refusals, 0.5), 1),
            "refusal_p99_ms": round(1e3 * at(refusals, 0.99), 1),
            "retry_after_p50_s": at(sorted(self.retry_after), 0.5),
            "forecasts": len(errors),
            "forecast_error_p50": round(at(errors, 0.5), 4),
            "forecast_error_p90": round(at(errors, 0.9), 4),
        }


def at(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are not above."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Load:
    """Clients of one server."""

    def __init__(self, client: httpx.AsyncClient, given: argparse.Namespace) -> None:
        self.client, self.given = client, given
        self.dice = random.Random(given.seed)
        self.phase = Phase()

    def body(self) -> dict[str, Any]:
        """A request of its own: no two share a prefix."""
        words = ["".join(self.dice.choices(LETTERS, k=4)) for _ in range(self.dice.randrange(*self.given.words))]
        output = self.dice.randrange(*self.given.output)
        return {"prompt": " ".join(words), "max_tokens": output, "ignore_eos": True, "stream": True}

    async def ask(self) -> None:
        """One request, counted in the phase in which it was sent."""
        phase, begun, first = self.phase, time.perf_counter(), 0.0
        phase.sent += 1
        try:
            async with self.client.stream("POST", "/v1/completions", json=self.body()) as answer:
                if answer.status_code == 429:
                    await answer.aread()
                    phase.refusals.append(time.perf_counter() - begun)
                    phase.retry_after.append(float(answer.headers["retry-after"]))
                    return
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not first and line.startswith("data: {"):
                        first = time.perf_counter() - begun
        except httpx.HTTPError as error:
            if phase is self.phase:  # else the phase has ended, and the client with it
                phase.errors.append(f"{type(error).__name__}: {error}"[:100])
            return
        told = float(answer.headers.get("x-octavo-first-token-forecast", 0.0))
        if told:
            phase.forecasts.append((told, first))
        if phase is self.phase:  # what is done after the phase is not its goodput
            phase.done += first <= self.given.first_token
            phase.late += first > self.given.first_token

    async def at_peak(self, seconds: float) -> Phase:
        """As many clients as run at once and a few that wait, each with one request after the other."""

        async def client() -> None:
            while True:
                await self.ask()

        tasks = [asyncio.ensure_future(client()) for _ in range(self.given.slots + 2)]
        await asyncio.sleep(seconds / 4)  # until all slots are in use
        return await self._over(seconds, tasks)

    async def arriving(self, rate: float, seconds: float) -> Phase:
        """At random, so many a second."""

        async def arrivals() -> None:
            tasks: set[asyncio.Future[None]] = set()
            while True:
                await asyncio.sleep(self.dice.expovariate(rate))
                task = asyncio.ensure_future(self.ask())
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        return await self._over(seconds, [asyncio.ensure_future(arrivals())])

    async def _over(self, seconds: float, tasks: list[asyncio.Future[None]]) -> Phase:
        self.phase = phase = Phase()
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        phase.seconds = time.perf_counter() - begun
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.phase = Phase()
        return phase


def resident(pid: int) -> int:
    """Bytes of memory that a server holds: its process and those that it started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return sum(_resident(process) for process in [str(pid), *started])


def _resident(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


async def watch(pid: int, every: float, seen: list[int]) -> None:
    """Note the memory of a process again and again."""
    while True:
        seen.append(resident(pid))
        await asyncio.sleep(every)


async def run(given: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    """Both phases against one server."""
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=200)
    memory: list[int] = []
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(120.0)) as client:
        load = Load(client, given)
        peak = await load.at_peak(given.peak_seconds)
        rate = given.factor * peak.done / peak.seconds
        watcher = asyncio.ensure_future(watch(pid, given.seconds / 60, memory))
        over = await load.arriving(rate, given.seconds)
        watcher.cancel()
    middle = len(memory) // 2
    growth = max(memory[middle:]) / max(memory[: middle or 1]) - 1.0
    return {
        "peak": peak.report(),
        "rate_per_s": round(rate, 3),
        "overload": over.report(),
        "goodput_share": round(over.done / over.seconds / max(peak.done / peak.seconds, 1e-9), 4),
        "memory_growth": round(growth, 4),
        "pairs": [[round(told, 4), round(real, 4)] for told, real in over.forecasts],
    }


def passed(result: dict[str, Any]) -> dict[str, bool]:
    """Each bar, and whether it was met."""
    over = result["overload"]
    return {
        "goodput": result["goodput_share"] >= 0.9,
        "refusals": over["refusal_p99_ms"] <= 50.0,
        "memory": result["memory_growth"] <= 0.02,
        "forecast": 0.0 < over["forecast_error_p50"] < 0.2,
    }


def plot(pairs: Sequence[Sequence[float]]) -> str:
    """Forecasts against real first-token times, as an SVG picture; the grey band is 20% either way."""
    size, edge = 480, 44
    most = max([max(pair) for pair in pairs], default=1.0) * 1.05
    scale = (size - 2 * edge) / most

    def place(told: float, real: float) -> tuple[float, float]:
        return edge + told * scale, size - edge - real * scale

    (x0, y0), (x1, y1), (bx, by) = place(0, 0), place(most, most), place(most / 1.2, most)
    cx, cy = place(most, most * 0.8)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#1565c0" fill-opacity="0.4"/>'
        for x, y in (place(told, real) for told, real in pairs)
    )
    step = 10.0 ** math.floor(math.log10(most / 2))
    marks = ""
    for i in range(int(most / step) + 1):
        x, y = place(i * step, i * step)
        marks += f'<text x="{x:.0f}" y="{y0 + 16:.0f}" text-anchor="middle">{i * step:g}</text>'
        marks += f'<text x="{x0 - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{i * step:g}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="11">'
        f'<rect width="{size}" height="{size}" fill="white"/>'
        f'<path d="M{x0} {y0} L{bx:.1f} {by:.1f} L{x1:.1f} {y1:.1f} L{cx:.1f} {cy:.1f} Z" fill="#eceff1"/>'
        f'<path d="M{x0} {y0} L{x1:.1f} {y1:.1f} M{x0} {y1:.1f} V{y0} H{x1:.1f}" stroke="#546e7a" fill="none"/>'
        f"{dots}{marks}"
        f'<text x="{size / 2}" y="{size - 8}" text-anchor="middle">first token foretold, s</text>'
        f'<text transform="translate(12 {size / 2}) rotate(-90)" text-anchor="middle">first token, s</text></svg>\n'
    )


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("..")
    return int(low), int(high) + 1


def main() -> int:
    """Parse, start a server, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=300.0, help="of overload")
    parser.add_argument("--peak-seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=3.0, help="times the goodput at peak")
    parser.add_argument("--first-token", type=float, default=5.0, help="seconds: the bound on the first token")
    parser.add_argument("--slots", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--words", type=_range, default="20..120", help="of a prompt, four letters each")
    parser.add_argument("--output", type=_range, default="16..64", help="tokens of an answer")
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    flags = ["--max-running-requests", str(given.slots), "--max-first-token-s", str(0.8 * given.first_token)]
    flags += ["--max-seq-len", "2048", "--no-prefix-cache"]
    flags += given.flags.split()
    with live_server(given.model, *flags, audit=False) as server:
        result = asyncio.run(run(given, server.url, server.process.pid))
    result["met"] = passed(result)
    result["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    if given.svg:
        given.svg.write_text(plot(result["pairs"]), encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "pairs"}, indent=2))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
