"""The row of sixteen clients: our server and those of the peers, each started once, loaded one after the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from bars import Sample, Value
from contest import Duel, PeerFailed
from load_client import Asked, LoadFailed, one_token_words, requests, run

__all__ = ["CLIENTS", "Server", "http_duel", "http_value"]

CLIENTS = 16
_START_S = 120.0
_P95 = {"first token": "first_p95_ms", "gap": "gap_p95_ms"}


class Server:
    """A server process on a port of its own. Use as a context: it answers when entered, and ends at the exit."""

    def __init__(self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command, self.environment = list(command(self.port)), dict(environment)

    def __enter__(self) -> Server:
        self.log = TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self.command, stdout=self.log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        except OSError as error:
            self.log.close()
            raise PeerFailed(str(error)) from error
        return self

    def wait(self, model: str) -> None:
        """Until a short request is answered. Raises PeerFailed."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise PeerFailed(f"the server ended with {self.process.returncode}: {self.tail()}")
            try:
                run(self.url, model, [Asked(" hello", 1, 2)], 1)
            except (OSError, LoadFailed):
                time.sleep(0.2)
            else:
                return
        raise PeerFailed(f"the server did not answer within {_START_S:.0f} s: {self.tail()}")

    def tail(self) -> str:
        """The end of what it printed."""
        size = self.log.seek(0, 2)
        self.log.seek(max(0, size - 2000))
        return self.log.read().decode(errors="replace").strip()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def own_server(model: str, weight_format: str) -> Server:
    """`octavo serve` as a user would start it, but for the format."""
    more = ["--format", weight_format, "--backend", "native", "--port"]
    command = [sys.executable, "-m", "octavo", "serve", model, *more]
    return Server(lambda port: [*command, str(port)], os.environ)


class _Client:
    """Loads one server with new texts each time."""

    def __init__(self, server: Server, model: str, words: Sequence[str], state: Callable[[], str]) -> None:
        self.server, self.model, self.words, self.state, self.count = server, model, words, state, 0

    def __call__(self, keep: bool) -> Sample:
        if not self.count:
            self.server.wait(self.model)
        self.count += 1
        state = self.state()
        try:
            found = run(self.server.url, self.model, requests(self.words, self.count), CLIENTS)
        except (OSError, LoadFailed, TimeoutError) as error:
            raise PeerFailed(f"{error}; {self.server.tail()}") from error
        return Sample(found["tokens_per_s"], state, found)


def http_duel(
    stack: ExitStack,
    model: str,
    weight_format: str,
    tokenizer: Any,
    peers: Mapping[str, tuple[Any, str]],
    state: Callable[[], str],
) -> Duel:
    """The row, with every server started under `stack`. `peers`: label -> (peer, kind)."""
    words = one_token_words(tokenizer)

    def client(server: Server) -> _Client:
        return _Client(stack.enter_context(server), model, words, state)

    def command(peer: Any, kind: str) -> Server:
        return Server(lambda port: peer.server(kind, port), peer.environment)

    found = {label: client(command(*which)) for label, which in peers.items()}
    return Duel("http", client(own_server(model, weight_format)), found)


def http_value(duel: Duel) -> Value:
    """The ratio of speeds; it holds where both 95th percentiles are below those of the best peer."""
    found = duel.value()
    if found.value is None:
        return found
    ours, theirs = (
        {key: median(sample.more[key] for sample in every) for key in _P95.values()}
        for every in (duel.samples, duel.theirs[duel.best])
    )
    told = [f"p95 {name} {ours[key]:.0f} against {theirs[key]:.0f} ms" for name, key in _P95.items()]
    holds = all(ours[key] < theirs[key] for key in _P95.values())
    return Value(found.value, "; ".join([found.note, *told]), holds)
