"""A million short requests to the null model, with cancels and a fault every minute: nothing wrong, and nothing grows.

    make soak-null                                   10^6 requests against a server of its own (compact layout)
    python benchmarks/soak_null.py --requests 20000 --fault-every 10

64 wires of `null_load` ask beside 1,000 idle connections. The faults take turns: kill -9 of the engine and of the front
end (in the first half, so that the processes of the second half live long), SIGSTOP for 2 s of each process, readers
that do not read, malformed bodies. Every 10 s memory, files, threads and live objects of each process are noted. At the
end the server must be idle with all pages free. Prints a line; exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "serve"))

from live_server import live_server
from null_load import FIXTURE, Broken, Load, Questions, Wire
from soak_plot import plot

from octavo.serve.http import run_loop

MIB = 1 << 20
FLAGS = ("--layout", "compact", "--max-connections", "2048", "--kv-memory", "2MiB", "--offline", "--log-level", "error")
KILLS = ("kill the engine", "kill the front end")
QUIET = ("stop the engine", "stop the front end", "stop the supervisor", "slow readers", "malformed bodies")
BAD = (
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe{}",
    b'{"prompt": [1, -1]}',
    b'{"n": 64, "prompt": 5}',
)


@dataclass
class Life:
    """One process: when it was first seen, and what it held, as (time, PSS, files, threads)."""

    name: str
    pid: int
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def growth(self, warm_up: float) -> dict[str, Any]:
        """From the first third of what follows the warm-up to the last third; nothing for a short life."""
        warm = [sample for sample in self.samples if sample[0] >= self.samples[0][0] + warm_up]
        part = len(warm) // 3
        told: dict[str, Any] = {"process": self.name, "seconds": round(self.samples[-1][0] - self.samples[0][0])}
        if part < 2:
            return told
        first, last = warm[:part], warm[-part:]
        for at, what in enumerate(("memory", "files", "threads"), 1):
            told[what] = [median(s[at] for s in first), median(s[at] for s in last)]
        told["memory_mib"] = [round(value / MIB, 2) for value in told.pop("memory")]
        return {**told, "growth_mib": round(told["memory_mib"][1] - told["memory_mib"][0], 2)}


class Watch:
    """The processes of a server, by their names."""

    def __init__(self, pid: int) -> None:
        self.pid, self.lives = pid, {pid: Life("supervisor", pid)}

    def find(self) -> dict[str, int]:
        """Process ids by name; one that has just died may be missing."""
        found = {"supervisor": self.pid}
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {word.decode()[7:]: int(child) for word in words if word.startswith(b"octavo-")}
        return found

    def note(self, now: float) -> None:
        """Sample all of them."""
        for name, pid in self.find().items():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                files, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
            size = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
            self.lives.setdefault(pid, Life(name, pid)).samples.append((now, size, files, threads))


class Soak:
    """One run."""

    def __init__(self, given: argparse.Namespace, url: str, pid: int) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.given, self.address, self.watch = given, (host, int(port)), Watch(pid)
        self.load = Load(self.address, Questions(f"{host}:{port}", given.seed, given.cancels), self.excuses)
        self.began = time.monotonic()
        self.awake = 0.0  # seconds, without those in which nothing of this ran
        self.faults: list[tuple[float, str]] = []
        self.objects: list[dict[str, float]] = []
        self.reopened = 0  # idle connections
        self.unanswered: list[str] = []  # malformed bodies
        self._struck: dict[str, float] = {}  # when each kind of fault was last made

    def excuses(self, what: str) -> bool:
        """Whether this may happen: a cut soon after a front end's death, 503 until another engine is there."""
        fault = KILLS[1] if what == "cut" else KILLS[0]
        return self.awake - self._struck.get(fault, -1e9) < 10.0

    async def _stay_awake(self) -> None:
        """Count the seconds in which this process runs: what a stopped machine does late is not late."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            self.awake += min(0.5, time.monotonic() - before)
            self._find_stuck(time.monotonic() - before > 5.0)

    async def run(self) -> dict[str, Any]:
        """All of it."""
        beside = (self._strike(), self._sample(), self._hold_idle(), self._stay_awake())
        tasks = [asyncio.ensure_future(work) for work in beside]
        await self.load.run(self.given.wires, lambda counts: self._progress >= 1.0)
        self.seconds = time.monotonic() - self.began
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [repr(error) for error in results if not isinstance(error, asyncio.CancelledError)]
        await asyncio.sleep(3.0)
        return {**self._report(await self._audit()), "harness": broken}

    @property
    def _progress(self) -> float:
        """How much is done, 0 to 1."""
        minutes = (time.monotonic() - self.began) / 60.0
        of_time = minutes / self.given.minutes if self.given.minutes else 0.0
        return max(self.load.counts.requests / self.given.requests, of_time)

    # -- faults

    async def _strike(self) -> None:
        """A fault whenever it is time."""
        mild, kills = cycle(QUIET), cycle(KILLS)
        for number in range(1 << 30):
            await asyncio.sleep(self.given.fault_every)
            fault = next(kills) if self._progress < 0.5 and number % 2 == 0 else next(mild)
            self.faults.append((time.monotonic() - self.began, fault))
            self._struck[fault] = self.awake
            await self._make(fault)

    async def _make(self, fault: str) -> None:
        verb, _, whom = fault.partition(" ")
        if verb in ("kill", "stop"):
            seat = {"the engine": "engine", "the front end": "api-0", "the supervisor": "supervisor"}[whom]
            pid = self.watch.find().get(seat)
            if pid is not None and verb == "kill":
                os.kill(pid, signal.SIGKILL)
            elif pid is not None:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(2.0)
                os.kill(pid, signal.SIGCONT)
        elif fault == "slow readers":
            await asyncio.gather(*(self._read_slowly() for _ in range(8)))
        else:
            for body in BAD:
                await self._send_bad(body)

    async def _read_slowly(self) -> None:
        """Ask for much, read nothing for a while, then leave."""
        reader, writer = await asyncio.open_connection(*self.address, limit=64)
        body = json.dumps({"prompt": "abc", "max_tokens": 100, "n": 32, "stream": True, "logprobs": 5}).encode()
        writer.write(_post(self.address[0], body))
        await asyncio.sleep(5.0)
        await reader.read(64)
        writer.transport.abort()

    async def _send_bad(self, body: bytes) -> None:
        """A body that must be refused."""
        wire = await Wire.to(*self.address)
        try:
            answer = await asyncio.wait_for(wire.ask(_post(self.address[0], body)), 60.0)
            if answer[9:10] != b"4":
                self.unanswered.append(f"{body[:40]!r}: {answer[:40]!r}")
        except (Broken, asyncio.TimeoutError) as error:
            self.unanswered.append(f"{body[:40]!r}: {error!r}")
        wire.leave()

    # -- idle connections

    async def _hold_idle(self) -> None:
        """Connections that ask for their server's health once in a while: often enough not to be closed."""
        await asyncio.gather(*(self._idle(place) for place in range(self.given.idle)))

    async def _idle(self, place: int) -> None:
        await asyncio.sleep(place * 50.0 / self.given.idle)
        wire: Wire | None = None
        while True:
            try:
                if wire is None or not wire.is_open:
                    self.reopened += wire is not None
                    wire = await Wire.to(*self.address)
                await wire.ask(b"GET /health/live HTTP/1.1\r\nHost: %b\r\n\r\n" % self.address[0].encode())
            except (Broken, OSError):
                await asyncio.sleep(1.0)
                continue
            await asyncio.sleep(50.0)

    # -- what it looks like

    async def _sample(self) -> None:
        for number in range(1 << 30):
            self.watch.note(time.monotonic() - self.began)
            self.objects.append({"at": round(time.monotonic() - self.began), **await self._metrics("live_objects")})
            if number % 6 == 5:
                counts = self.load.counts
                print(f"{counts.requests} requests, {len(counts.wrong)} wrong, {self.objects[-1]}", file=sys.stderr)
            await asyncio.sleep(10.0)

    def _find_stuck(self, slept: bool) -> None:
        now = time.monotonic()
        for wire in self.load.wires:
            if wire is not None and wire.began and slept:
                wire.began = now
            elif wire is not None and wire.began and now - wire.began > 60.0:
                self.load.counts.wrong.append("no answer for 60 s")
                wire.leave()

    async def _metrics(self, *names: str) -> dict[str, float]:
        """Samples of the server's metrics by name, or by their last label; empty while it cannot be asked."""
        try:
            wire = await Wire.to(*self.address)
            text = (await wire.ask(b"GET /metrics HTTP/1.1\r\nHost: %b\r\n\r\n" % self.address[0].encode())).decode()
            wire.leave()
        except (Broken, OSError):
            return {}
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            bare, _, labels = name.partition("{")
            if not line.startswith("#") and bare.split(":")[-1] in names:
                label = labels.rstrip("}").split(",")[-1]
                found[label.split("=")[1].strip('"') if "process" in label else bare.split(":")[-1]] = float(value)
        return found

    async def _audit(self) -> dict[str, float]:
        pages = ("pages_total", "pages_free", "pages_cached", "pages_referenced", "pages_ticketed")
        rest = ("num_requests_running", "num_requests_waiting", "active_requests", "requests_resumed_total")
        return await self._metrics(*pages, *rest, "engine_restarts_total")

    def _report(self, audit: dict[str, float]) -> dict[str, Any]:
        counts = self.load.counts
        lives = [life.growth(self.given.warm_up) for life in self.watch.lives.values() if life.samples]
        return {
            "requests": counts.requests,
            "requests_wanted": self.given.requests,
            "seconds": round(self.seconds),
            "requests_per_s": round(counts.requests / self.seconds, 1),
            **{name: value for name, value in asdict(counts).items() if name != "statuses"},
            "statuses": {str(status): number for status, number in counts.statuses.items()},
            "wires": self.given.wires,
            "idle_connections": self.given.idle,
            "idle_reopened": self.reopened,
            "malformed_not_refused": self.unanswered,
            "faults": [[round(at), fault] for at, fault in self.faults],
            "processes": lives,
            "objects": self.objects,
            "audit": audit,
        }


def _post(host: str, body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def judged(result: dict[str, Any]) -> dict[str, bool]:
    """Each bar, and whether it was met."""
    audit, lives = result["audit"], [life for life in result["processes"] if "growth_mib" in life]
    free = audit.get("pages_free", -1.0) + audit.get("pages_cached", 0.0)
    idle = ("pages_referenced", "pages_ticketed", "num_requests_running", "num_requests_waiting", "active_requests")
    return {
        "requests": result["requests"] >= result["requests_wanted"],
        "answers": not result["wrong"] and not result["malformed_not_refused"] and not result["harness"],
        "pages": free == audit.get("pages_total") and all(audit.get(name) == 0 for name in idle),
        "memory": {life["process"] for life in lives} >= {"engine", "api-0", "supervisor"}
        and all(life["growth_mib"] <= 2.0 for life in lives),
        # who leaves has a socket at the server until it is noticed: as many may come and go as there are wires
        "files": all(abs(life["files"][1] - life["files"][0]) <= result["wires"] for life in lives),
        "objects": _is_flat([sample for sample in result["objects"] if "engine" in sample]),
    }


def _is_flat(samples: list[dict[str, float]]) -> bool:
    """Whether the least of the last quarter is not more than that of the quarter before, but for 5%.

    What is counted holds garbage that the collector has not come to yet; the least of many samples is what lives.
    """
    part = len(samples) // 4
    if not part:
        return False
    for process in ("engine", "front"):
        before, after = (min(s[process] for s in some) for some in (samples[-2 * part : -part], samples[-part:]))
        if after > 1.05 * before + 200:
            return False
    return True


def line_of(result: dict[str, Any]) -> str:
    """The whole in a line."""
    worst = max((life["growth_mib"] for life in result["processes"] if "growth_mib" in life), default=float("nan"))
    met = " ".join(f"{name} {'held' if held else 'BROKEN'}" for name, held in result["met"].items())
    return (
        f"soak-null: {result['requests']} requests at {result['requests_per_s']:.0f}/s ({result['left']} left, "
        f"{result['cut']} cut, {len(result['wrong'])} wrong), {len(result['faults'])} faults, growth at most "
        f"{worst:.2f} MiB; {met}"
    )


def main() -> int:
    """Parse, start a server, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="end there at the latest; 0: when all are done")
    parser.add_argument("--wires", type=int, default=64)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--cancels", type=float, default=0.2)
    parser.add_argument("--fault-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds of a process's life that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    with live_server(FIXTURE, "--backend", "null", *FLAGS, audit=False) as server:
        soak = Soak(given, server.url, server.process.pid)
        result = run_loop(soak.run())
    result["met"] = judged(result)
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    if given.svg:
        given.svg.write_text(plot(soak.watch.lives.values(), soak.faults), encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(line_of(result))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
