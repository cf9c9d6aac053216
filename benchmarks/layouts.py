"""One process or more: what clients get from each layout, and what its processes take of the CPU for each token.

    python benchmarks/layouts.py [MODEL] [--layouts single,compact,full] [--rounds 3] [--requests 32] [--clients 16]

All servers run from the beginning, and are loaded in turns. The front end's price for a token is its process's CPU
time (reading, tokenizing, detokenizing, writing and all) over the tokens that it delivered.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

from load_client import Asked, one_token_words, requests, run, tokenizer_of
from servers import Server

from octavo.engine.config import EngineConfig

TINY = str(Path(__file__).resolve().parents[1] / "fixtures" / "tiny_model.json")
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time of a server's processes so far, by seat; the one that was started is ``server``."""
    found = {}
    for process in (str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        seat = next((word.decode()[7:] for word in words if word.startswith(b"octavo-")), "server")
        found[seat] = (int(fields[11]) + int(fields[12])) / _TICK
    return found


def server(model: str, layout: str, backend: str) -> Server:
    """A server of ours in a layout."""
    flags = ["--layout", layout, "--backend", backend, "--offline"]
    command = [sys.executable, "-m", "octavo", "serve", model, *flags]
    return Server(lambda port: [*command, "--port", str(port)], os.environ)


def load_of(model: str, seed: int, count: int) -> list[Asked]:
    """The usual load; for the tiny model, whose tokens are characters, one of its own."""
    if model == TINY:
        return [Asked("abcdefgh"[: 2 + (seed + i) % 6], 3 + (seed + i) % 6, 64) for i in range(4 * count)]
    return requests(one_token_words(tokenizer_of(model)), seed, count)


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default=EngineConfig.model)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layouts", default="single,compact")
    given = parser.parse_args()
    layouts = given.layouts.split(",")
    model = TINY if given.model == "tiny" else given.model
    name = "tiny-llama" if model == TINY else model
    with ExitStack() as stack:
        servers = {layout: stack.enter_context(server(model, layout, given.backend)) for layout in layouts}
        for one in servers.values():
            one.wait(name) if model != TINY else wait_tiny(one)
        found: dict[str, list[dict[str, float]]] = {layout: [] for layout in layouts}
        for number in range(given.rounds + 1):
            load = load_of(model, number, given.requests)
            for layout in layouts if number % 2 else reversed(layouts):
                row = loaded(servers[layout], name, load, given.clients)
                if number:  # the first round warms up
                    found[layout].append(row)
    for layout, rows in found.items():
        values = {key: median(row[key] for row in rows) for key in rows[0]}
        print(f"{layout:8}", ", ".join(f"{key} {value:.1f}" for key, value in values.items()))
    for first, second in pairwise(layouts):
        pairs = zip(found[first], found[second], strict=True)
        ratios = sorted(two["tokens_per_s"] / one["tokens_per_s"] for one, two in pairs)
        print(f"{second} / {first}, tokens/s:", " ".join(f"{ratio:.3f}" for ratio in ratios))


def wait_tiny(one: Server) -> None:
    """Until it answers: its prompts have other lengths than those of `Server.wait`."""
    for _ in range(600):
        try:
            run(one.url, "tiny-llama", [Asked("ab", 3, 2)], 1)
            return
        except OSError:
            time.sleep(0.1)


def loaded(one: Server, name: str, load: list[Asked], clients: int) -> dict[str, float]:
    """One round: what the clients saw, and microseconds of CPU for each token by process."""
    before = cpu_seconds(one.process.pid)
    seen = run(one.url, name, load, clients)
    after = cpu_seconds(one.process.pid)
    tokens = sum(wanted.output for wanted in load)
    cost = {f"{seat}_us": 1e6 * (after[seat] - before[seat]) / tokens for seat in sorted(after)}
    return {**seen, **cost}


if __name__ == "__main__":
    main()
