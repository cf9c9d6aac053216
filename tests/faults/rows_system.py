"""Rows 10, 11, 13, 14, 15, 16: too little memory, disk, files or threads; links and clocks that are wrong."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from faults.load import TINY, Load, counts
from faults.rows import row
from faults.rows_clients import connect
from faults.world import Bare, World, closing_of, until


@row(
    "10", "64 pages of 4 for 200 requests at once", "all get their tokens, with many preempted; impossible: 400",
    kv_memory="32KiB", page_size=4, max_seq_len=128, max_running_requests=64, step_ms=2,
    request_timeout=600.0, header_timeout=10.0,
)  # fmt: skip
def pool_exhausted(world: World) -> str:
    before = world.metric("vllm:num_preemptions_total")
    load = Load(world.address, 200, world.dice.randrange(1 << 30))
    world.load = load
    until(lambda: len(load.told) > 250, 200, "all of them, and more")
    told = world.end()
    preempted = world.metric("vllm:num_preemptions_total") - before
    assert preempted > 20, preempted
    assert world.metric("octavo:pages_total") == 64
    too_long = {"prompt": [5] * 127, "max_tokens": 9}
    assert world.http.post("/v1/completions", json=too_long).status_code == 400
    world.audit()
    return f"{counts(told)}; {preempted:.0f} preemptions"


@row(
    "11a",
    "the next 1 to 20 calls of the model find no memory",
    "a batch fails by halves, or not at all; the engine goes on",
)
def no_memory_for_a_step(world: World) -> str:
    world.may_fail = True
    world.begin()
    before, engine = world.metric("octavo:rollbacks_total"), world.processes()["engine"]
    world.inject("engine", "fail", world.dice.randrange(1, 21))
    time.sleep(0.5)
    told = world.end("error")
    assert world.metric("octavo:rollbacks_total") > before
    assert world.processes()["engine"] == engine
    world.audit()
    return counts(told)


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@row(
    "11b",
    "the engine gets no more memory from the system, for a second",
    "it goes on or is started again; no wrong token",
)
def no_memory_from_the_system(world: World) -> str:
    world.may_fail = True
    world.begin()
    engine = world.processes()["engine"]
    world.limit("engine", resource.RLIMIT_AS, _address_space(engine))
    time.sleep(1.0)
    if world.processes().get("engine") == engine:
        world.limit("engine", resource.RLIMIT_AS, resource.RLIM_INFINITY)
    told = world.end("error", "refused")
    world.audit()
    return f"{'the same engine' if world.processes()['engine'] == engine else 'another engine'}; {counts(told)}"


@row("11c", "too little memory to load the model", "the reason, no traceback, and exit code 1 or 2", bare=True)
def no_memory_to_load(bare: Bare) -> str:
    most = bare.dice.randrange(200, 330) << 20
    command = [sys.executable, "-m", "octavo", "serve", str(TINY), "--port=0", "--layout=compact", "--backend=native"]
    found = subprocess.run(["prlimit", f"--as={most}", *command], capture_output=True, text=True, timeout=60)
    told = found.stdout + found.stderr
    assert found.returncode in (1, 2) and "Traceback" not in told, (found.returncode, told[-2000:])
    return f"{most >> 20} MiB: {told.strip().splitlines()[-1][:100]}"


@row(
    "13",
    "links: each message 0.1 s late, then each a hundred times, at both ends",
    "no token twice, order kept, all is answered",
    step_ms=50, request_timeout=600,
)  # fmt: skip
def bad_links(world: World) -> str:
    load = world.begin(3)
    for fault, value in (("late", 0.1), ("repeat", 100)):
        for seat in ("engine", "api-0"):
            world.inject(seat, fault, value)
        since = time.monotonic()
        until(lambda since=since: load.right_since(since), 60 * world.slow, f"it goes on, with {fault}")
        world.rest(0.5, 1.0)
    for seat in ("engine", "api-0"):
        world.inject(seat, "repeat", 1)
    told = world.end()
    world.audit()
    return counts(told)


@row(
    "14",
    "the wall clock jumps by an hour, back by two, stands still, in every process",
    "no timeout fires, nothing is negative",
)
def clock_jumps(world: World) -> str:
    world.begin()
    before = world.processes()
    for fault, value in (("clock", 3600), ("clock", -3600), ("stop_clock", 0), ("clock", 0)):
        for seat in world.dice.sample(("engine", "api-0", "supervisor"), 3):
            world.inject(seat, fault, value)
        world.rest(0.2, 0.5)
        lines = world.http.get("/metrics").text.splitlines()
        negative = [line for line in lines if line[:1] not in ("", "#") and float(line.rsplit(" ", 1)[1]) < 0]
        assert not negative, negative
        ids = {world.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["id"] for _ in range(5)}
        assert len(ids) == 5
    told = world.end()
    assert world.processes() == before
    world.audit()
    return counts(told)


@contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of that size."""
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


DISK = {
    "page_size": 16,
    "kv_memory": "64KiB",
    "host_kv_memory": "32KiB",
    "disk_kv_memory": "1MiB",
    "log_format": "json",
}


def _fill(disk: Path) -> Path:
    """Leave no byte free."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def _on(disk: Path) -> dict[str, Any]:
    return {**DISK, "record": disk / "recording", "disk_kv": disk / "kv"}


@row(
    "15a",
    "the disk of log, recording and disk tier fills up under load, and is emptied",
    "serving goes on, what is lost is counted",
    bare=True,
)
def disk_full(bare: Bare) -> str:
    return _with_disk(bare, _full)


@row("15b", "the disk turns read-only under load", "serving goes on", bare=True)
def disk_read_only(bare: Bare) -> str:
    return _with_disk(bare, _read_only)


@row(
    "15c",
    "each read and write of the disk tier takes half a second",
    "steps wait 0.2 s at most, serving goes on",
    bare=True,
)
def disk_slow(bare: Bare) -> str:
    return _with_disk(bare, _slow)


def _with_disk(bare: Bare, do: Any) -> str:
    """A server with all its files on a small disk; then another one over what is left there."""
    seed = bare.dice.randrange(1 << 30)
    with TemporaryDirectory() as folder, small_disk(Path(folder) / "disk", "3m") as disk:
        with closing_of(World(bare.scale, seed, log=disk / "log", **_on(disk))) as broken:
            broken.may_fail = True  # what does not come from disk is computed, in a step of its own
            broken.settle()
            told = do(broken, disk)
            broken.audit()
        (disk / "ballast").unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        with closing_of(World(bare.scale, seed, log=disk / "log", **_on(disk))) as again:
            again.settle()
            again.begin()
            more = again.end()
            restored, lost = again.metric("octavo:disk_bytes_in_total"), again.by_label("octavo:restore_failures_total")
            # who ended before its disk had taken everything left an index that is older than its pages
            assert set(lost) <= {"stale"}, lost
            again.may_fail = bool(lost)
            again.audit()
    return f"{told}; afterwards {counts(more)}, {restored:.0f} bytes from disk, {lost or 'nothing'} lost"


def _full(world: World, disk: Path) -> str:
    load = world.begin()
    _fill(disk)
    since = time.monotonic()
    until(lambda: world.metric("octavo:log_lines_dropped_total") > 0, 20 * world.slow, "lines are dropped and counted")
    until(lambda: load.right_since(since), 20 * world.slow, "the load goes on")
    dropped = world.metric("octavo:log_lines_dropped_total")
    (disk / "ballast").unlink()
    size = os.path.getsize(disk / "log")
    until(lambda: os.path.getsize(disk / "log") > size + 300, 20 * world.slow, "the log goes on")
    world.rest(0.0, 1.0)
    told = world.end()
    lost = world.metric("octavo:disk_write_failures_total")
    return f"{dropped:.0f} lines and {lost:.0f} pages dropped; {counts(told)}"


def _read_only(world: World, disk: Path) -> str:
    load = world.begin()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True)
    since = time.monotonic()
    until(lambda: load.right_since(since), 20 * world.slow, "the load goes on")
    world.rest(0.5, 1.0)
    return counts(world.end())


def _slow(world: World, disk: Path) -> str:
    load = world.begin()
    world.inject("engine", "slow_disk", 0.5)
    since = time.monotonic()
    until(lambda: load.right_since(since), 20 * world.slow, "the load goes on")
    world.rest(1.0, 2.0)
    return counts(world.end())


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@row(
    "16a",
    "the front end may open 40 more files, and gets 200 connections",
    "503 or a closed connection; no spinning; recovers",
)
def no_files(world: World) -> str:
    world.begin(4)
    pid = world.processes()["api-0"]
    most = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 40
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    clients = [connect(world) for _ in range(200)]
    answers = [_ask(client) for client in clients]
    used = _cpu(pid)
    time.sleep(1.0)
    used = _cpu(pid) - used
    assert used < 0.7, f"{used} s of CPU in a second"
    assert answers.count("503") >= 5 and set(answers) <= {"200", "503", "closed", ""}, set(answers)
    for client in clients:
        client.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    world.fresh()
    told = world.end("refused", "broken")
    world.audit()
    return f"{answers.count('503')} got 503, {answers.count('closed')} were closed; {used:.2f} s of CPU; {counts(told)}"


def _ask(client: Any) -> str:
    """The status of an answer on a connection that stays open."""
    client.settimeout(1.0)
    try:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        said = client.recv(1 << 16)
    except TimeoutError:
        return ""
    except OSError:
        return "closed"
    found = re.match(rb"HTTP/1.1 (\d+)", said)
    return found[1].decode() if found else "closed"


@row("16b", "no thread can be started, in engine and front end, for a second", "serving goes on, and recovers")
def no_threads(world: World) -> str:
    world.begin()
    for seat in ("engine", "api-0"):
        world.inject(seat, "no_threads", 1.0)
    large = {"prompt": [4] * 20, "max_tokens": 1, "user": "x" * 100_000}
    statuses = [world.http.post("/v1/completions", json=large).status_code for _ in range(5)]
    assert set(statuses) <= {200, 503}, statuses
    time.sleep(1.0)
    assert world.http.post("/v1/completions", json=large).status_code == 200
    told = world.end()
    world.audit()
    return f"{statuses}; {counts(told)}"
