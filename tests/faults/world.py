"""A real server to break: its processes, their files, and whether all is as before when it has recovered."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx

from faults.load import TINY, VOCAB, Case, Load, Told, ask, case_of, check
from octavo.serve.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
SHIM = str(Path(__file__).resolve().parent / "shim")
_AT = re.compile(r"at http://([^:\s]+):(\d+)")
_TROUBLE = re.compile(r"Traceback|InvariantBroken|panic", re.I)
CLIENTS = 12
QUICK = 2.0  # seconds
HELPERS = {"templates", "grammars"}  # that front ends start at their first use, one of each


def _parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of a condition. Time in which this process was stopped does not count."""
    end, before = time.monotonic() + seconds, time.monotonic()
    while not (found := condition()):
        now = time.monotonic()
        end += now - before if now - before > 8.0 else 0.0
        assert now < end, f"not within {seconds:g} s: {what}"
        before = now
        time.sleep(0.01)
    return found


def timers(scale: float) -> dict[str, float]:
    """Every time that is a setting of the server, scaled."""
    return {each.name: each.default * scale for each in fields(ServeConfig) if each.name.endswith("_timeout")}


@dataclass
class Bare:
    """No server: what a row needs that has its own."""

    scale: float
    dice: random.Random
    output: Sequence[str] = ()


class World:
    """One server under load. ``scale`` is that of its timers: 1 is as shipped."""

    def __init__(self, scale: float, seed: int, *flags: str, log: Path | None = None, **settings: Any) -> None:
        self.scale, self.dice, self.time = scale, random.Random(seed), timers(scale)
        self.folder = Path(tempfile.mkdtemp(prefix="of"))
        self.run_folder = self.folder / "run"
        self.run_folder.mkdir()
        self.output: list[str] = []
        self.log, self.vocab = log, settings.pop("vocab", VOCAB)
        self.cases: Sequence[Case] = settings.pop("cases", ())  # of the load; none: what the null model answers
        begun = time.monotonic()
        self.process = self._started(flags, settings)
        threading.Thread(target=self._listen, daemon=True).start()
        until(lambda: self._address() or self.process.poll() is not None, 60, "it serves")
        assert self._address(), "".join(self.output)
        self.address = self._address()
        self.slow = max(
            1.0, (time.monotonic() - begun) / QUICK
        )  # limits of time are for a machine that starts it in that
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.load: Load | None = None
        self.http = httpx.Client(base_url=self.url, timeout=30, headers={"connection": "close"})
        self.baseline: dict[str, int] = {}
        self.shared = set(os.listdir("/dev/shm"))
        self.may_fail = False  # whether the fault is one that steps fail by

    def _started(self, flags: Sequence[str], settings: dict[str, Any]) -> subprocess.Popen[str]:
        step_ms = settings.pop("step_ms", 10.0)
        step_ms = self.scale * settings.pop("scaled_step_ms", step_ms / self.scale)
        self.step = step_ms / 1000  # seconds
        env = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.run_folder),
            "OCTAVO_FAULTS": str(self.folder),
            "PYTHONPATH": os.pathsep.join([SHIM, str(ROOT / "src")]),
            "OCTAVO_NULL_STEP_MS": str(step_ms),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        model = settings.pop("model", str(TINY))
        given = {"layout": "compact", "backend": "null", "port": 0, "threads": 1, **self.time, **settings}
        values = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "octavo", "serve", model, "--audit", *values, *flags]
        with open(self.log or os.devnull, "ab") as log:
            errors = log if self.log else subprocess.STDOUT
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
            )

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.output.append(line)

    def _address(self) -> Any:
        found = next((found for line in list(self.output) if (found := _AT.search(line))), None)
        return found and (found[1], int(found[2]), self.vocab)

    # -- its processes

    def processes(self) -> dict[str, int]:
        """Seat to process id of all that live and are part of it; `supervisor` is the one that was started."""
        found = {}
        mark = f"OCTAVO_FAULTS={self.folder}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    seat = next((word.decode()[7:] for word in words if word.startswith(b"octavo-")), "")
                    helper = "grammars" if b"octavo.decoding.grammar.check_worker" in words else "templates"
                    name = seat or ("supervisor" if b"serve" in words else helper)
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    if state != "Z":
                        found[name if name not in found else f"{name} again"] = int(entry.name)
        return found

    def kill(self, seat: str, number: int = signal.SIGKILL) -> int:
        """Send a signal; the process id that it went to."""
        pid = self.processes()[seat]
        os.kill(pid, number)
        return pid

    def inject(self, seat: str, fault: str, value: float) -> None:
        """Have a process do something to itself (`shim/sitecustomize.py`)."""
        order = self.folder / str(self.processes()[seat])
        order.write_text(f"{fault} {value}")
        self.kill(seat, signal.SIGUSR1)
        until(lambda: not order.exists(), 10 * self.slow, f"{seat} has heard")

    # -- load

    def begin(self, clients: int = CLIENTS) -> Load:
        """Start the load, and wait for a random moment in it."""
        self.load = Load(self.address, clients, self.dice.randrange(1 << 30), cases=self.cases)
        load = self.load
        until(lambda: sum(told.how == "right" for told in load.told) >= 3, 30, "the load runs")
        self.rest(0.0, 0.6)
        return self.load

    def rest(self, least: float, most: float) -> None:
        """A random while."""
        time.sleep(self.dice.uniform(least, most))

    def end(self, *allowed: str) -> list[Told]:
        """End the load; all its requests were answered rightly, or with what is allowed."""
        assert self.load is not None
        told, self.load = self.load.stop(), None
        check(told, *allowed)
        return told

    def fresh(self) -> float:
        """Seconds until a new request is answered: 10 at most."""
        started = time.monotonic()

        def answered() -> bool:
            body, right = case_of(self.address, self.dice, self.cases, max_tokens=5)
            told = asyncio.run(ask(self.address, body, right=right))
            assert told.how != "wrong", told.detail
            return told.how == "right"

        until(answered, 10 * self.slow, "a fresh request is answered")
        return time.monotonic() - started

    def status(self, path: str = "/health/ready") -> int:
        """Of an answer; 0: there was none."""
        try:
            return self.http.get(path, timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, with a label if one is named."""
        lines = [
            line for line in self.http.get("/metrics").text.splitlines() if line.startswith((name + "{", name + " "))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)

    def by_label(self, name: str) -> dict[str, float]:
        """A metric's samples that are not 0, by the last of their labels."""
        found = re.findall(rf'^{name}{{.*="(.*?)"}} (\S+)$', self.http.get("/metrics").text, re.MULTILINE)
        return {label: float(value) for label, value in found if float(value)}

    # -- whether all is as before

    def is_idle(self) -> bool:
        """No request inside, no page that one owns."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:pages_referenced")
        return all(self.metric(name) == 0 for name in names)

    def files(self) -> dict[str, int]:
        """Open files of each process, without the two pipes to each of its helpers, which come and go."""
        seats, found = self.processes(), {}
        masters = [_parent_of(seats[name]) for name in HELPERS if name in seats]
        for seat, pid in seats.items():
            with suppress(OSError):
                found[seat] = len(os.listdir(f"/proc/{pid}/fd")) - 2 * masters.count(pid)
        return found

    def settle(self) -> None:
        """What is open when nothing goes on: to be compared with later."""
        clients = CLIENTS if not self.cases else 4
        with Load(self.address, clients, 1, cases=self.cases) as load:
            until(lambda: len(load.told) > 3 * clients, 30 + 200 * self.step, "it warms up")
        self.fresh()
        until(self.is_idle, 10 * self.slow, "it is idle")
        time.sleep(0.1)
        self.baseline = self.files()

    def audit(self, *seats: str) -> None:
        """A fresh request is answered; no page, file, process, socket or shared memory is left over."""
        self.fresh()
        until(self.is_idle, 10 * self.slow, "it is idle, and nobody owns a page")
        expected = {"supervisor", *(seats or ("engine", "api-0"))}
        until(lambda: set(self.processes()) - HELPERS == expected, 10 * self.slow, f"only {expected} run")
        self._wait_for_flat_files()
        self._check_sockets()
        assert set(os.listdir("/dev/shm")) <= self.shared, "shared memory"
        said = "".join(self.output) + (self.log.read_text(errors="replace") if self.log else "")
        assert not _TROUBLE.search(said), said[-2000:]
        assert self.metric("octavo:rollbacks_total") == 0 or self.may_fail

    def _wait_for_flat_files(self) -> None:
        def more() -> dict[str, int]:
            found = self.files()
            return {seat: number for seat, number in found.items() if number > self.baseline.get(seat, number)}

        try:
            until(lambda: not more(), 5 * self.slow, f"open files {self.baseline}")
        except AssertionError:
            open_now = {seat: sorted(self._open_files(seat)) for seat in more()}
            raise AssertionError(f"open files: {self.baseline} before, now {open_now}") from None

    def _open_files(self, seat: str) -> list[str]:
        folder = Path(f"/proc/{self.processes().get(seat, 0)}/fd")
        return [os.readlink(path) for path in folder.iterdir()] if folder.is_dir() else []

    def _check_sockets(self) -> None:
        for folder in self.run_folder.iterdir():
            names = {path.name.rsplit("-", 1)[0] for path in folder.iterdir()}
            assert len(list(folder.iterdir())) == len(names), f"sockets of the dead: {sorted(folder.iterdir())}"

    def close(self, code: int | None = 0) -> None:
        """End it with SIGTERM; nothing may be left. ``code`` None: it may be dead already."""
        if self.load is not None:
            self.load.stop()
        self.http.close()
        try:
            if code is not None:
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(60) == code, "".join(self.output)[-2000:]
                until(lambda: not self.processes(), 5, "no process is left")
                assert not list(self.run_folder.iterdir()), "sockets are left"
        finally:
            for pid in self.processes().values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def limit(self, seat: str, what: int, most: int) -> None:
        """Bound what a process may have (`resource.RLIMIT_...`)."""
        pid = self.processes()[seat]
        resource.prlimit(pid, what, (most, resource.prlimit(pid, what)[1]))


@contextmanager
def closing_of(world: World) -> Iterator[World]:
    """It ends as it should, or, where something else was wrong, at once."""
    try:
        yield world
    except BaseException:
        world.close(None)
        raise
    world.close()
