"""A real `octavo serve` in a process of its own, for tests and for `benchmarks/soak.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

_READY = re.compile(r"at (http://\S+)")
_START_SECONDS = 120


@dataclass
class LiveServer:
    """A running server: where it is, and what it printed."""

    url: str
    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)


def metric(url: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples; with a label of those that have it, which may be none yet."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
    assert lines or label, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_idle(url: str) -> bool:
    """No sequence inside, and no page that a sequence owns."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:pages_referenced")
    return all(metric(url, name) == 0 for name in names)


def wait_idle(url: str, seconds: float = 30.0) -> bool:
    """Whether it becomes idle within that time."""
    end = time.monotonic() + seconds
    while not is_idle(url):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def live_server(*flags: str, audit: bool = True) -> Iterator[LiveServer]:
    """Start on a free port, wait until it serves, and stop it with SIGTERM, which must end it cleanly."""
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *["--audit"] * audit, *flags]
    # one thread for matrix products: clients and other tests share the cores
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    output: list[str] = []
    try:
        server = LiveServer(_url(process, output), process, output)
        watchdog.cancel()
        reader = threading.Thread(target=_drain, args=(process, output), daemon=True)
        reader.start()
        yield server
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        reader.join(5)
        if code != 0 or output[-1:] != ["stopped\n"]:
            raise AssertionError(f"the server ended with {code}:\n{''.join(output)}")
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str], output: list[str]) -> str:
    for line in process.stdout or ():
        output.append(line)
        found = _READY.search(line)
        if found:
            return found[1]
    raise AssertionError("the server did not start:\n" + "".join(output))


def _drain(process: subprocess.Popen[str], output: list[str]) -> None:
    output.extend(process.stdout or ())
