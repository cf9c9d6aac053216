"""When pages come back and when they are computed again: milliseconds by context length, and what the chooser takes.

    python benchmarks/swap.py MODEL [--contexts 64,512,2048] [--host-kv-memory 1GiB] [--rounds 5] [--json FILE]

Each context is a prompt of random tokens that was served before. `again`: nothing of it is left. `memory`: the page
pool has lost it and host memory has it. `disk`: only the disk has it, and the system's page cache nothing. All are the
whole time to the first token. What the chooser foretells of each and what it takes are noted before they are measured;
the ratio is the time of what it takes to that of the better one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Swaps"]

_SLICE = 32  # pages that go to disk at once


class Swaps:
    """One engine whose tiers hold the longest context."""

    def __init__(self, model: str, contexts: Sequence[int], folder: str, **settings: Any) -> None:
        from octavo.engine.llm import LLM

        disk = {"disk_kv": folder, "disk_kv_memory": "1GiB", "disk_kv_wait_ms": 60_000}
        longest = max(contexts) + 64
        self.llm = LLM(model, max_seq_len=longest, max_running_requests=1, preemption="auto", **disk, **settings)
        self.core = self.llm.loaded.core
        self.scheduler, self.kv = self.core.scheduler, self.core.scheduler.kv
        self.chooser = self.scheduler.swap_choice
        self.rng = random.Random(5)

    def slow_down(self, mb_per_s: float) -> None:
        """Have the disk read no faster than that."""
        files = self.core.tiers.disk._files
        real = files.read

        def read(offset: int, size: int) -> bytes:
            begin = time.perf_counter()
            data: bytes = real(offset, size)
            time.sleep(max(0.0, size / (1e6 * mb_per_s) - (time.perf_counter() - begin)))
            return data

        files.read = read

    def learn(self, contexts: Sequence[int]) -> None:
        """Serve prompts of all lengths, and have some of them come back, as a server has after a while."""
        for context in contexts:
            self.serve(self.prompt(context), max_tokens=4)
            self.kv.flush_prefix_cache()
        for tier in ("memory", "disk"):
            self.times(min(max(contexts), 512), tier)

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self.rng.randrange(self.llm.loaded.parts.config.vocab_size) for _ in range(length)]

    def serve(self, prompt: Sequence[int], max_tokens: int = 1) -> float:
        """Milliseconds to the first token, if there is one only."""
        from octavo.core.params import SamplingParams

        begin = time.perf_counter()
        self.llm.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        return 1e3 * (time.perf_counter() - begin)

    def times(self, context: int, tier: str) -> tuple[float, float]:
        """Milliseconds of a new prompt, and of the same again when it comes back from a tier."""
        prompt = self.prompt(context)
        again = self.serve(prompt)
        self.kv.prefix.evict(self.kv.allocator.num_pages)
        self.serve([1])  # with it the evicted pages move out
        if tier == "disk":
            self._sink_all()
        self.scheduler._planner.swap_choice = None  # it comes back whatever that costs
        back = self.serve(prompt)
        self.scheduler._planner.swap_choice = self.chooser
        self.kv.flush_prefix_cache()
        return again, back

    def _sink_all(self) -> None:
        """Have all that memory holds written to disk, and the system forget what it wrote."""
        tier, disk = self.kv.host, self.core.tiers.disk
        in_memory = list(dict.fromkeys(entry for entry in tier._holder.values() if entry.pages))
        for first in range(0, len(in_memory), _SLICE):
            for entry in in_memory[first : first + _SLICE]:
                tier._sink(entry)
                tier._leave(entry)
            self.serve([1])
            written = threading.Event()
            disk._todo.put(written.set)
            written.wait()
        os.fsync(disk._files._pages)
        os.posix_fadvise(disk._files._pages, 0, 0, os.POSIX_FADV_DONTNEED)

    def measure(self, context: int, tier: str, rounds: int) -> dict[str, Any]:
        """The median times of one context length, and what was foretold of them."""
        pages = -(-context // self.kv.page_size) * len(self.kv.groups)
        from_disk = pages if tier == "disk" else 0
        foretold = {"again": 1e3 * self.chooser.seconds_again(0, context - 1)}
        foretold["back"] = 1e3 * self.chooser.seconds_back(context - 1, pages, from_disk)
        taken = "back" if self.chooser.pays(0, context - 1, pages, from_disk) else "again"
        again, back = zip(*(self.times(context, tier) for _ in range(rounds)), strict=True)
        times = {"again": statistics.median(again), "back": statistics.median(back)}
        ratio = times[taken] / min(times.values())
        return {"context": context, "tier": tier, "ms": times, "foretold_ms": foretold, "taken": taken, "ratio": ratio}


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    ms, foretold = row["ms"], row["foretold_ms"]
    return (
        f"{row['context']:7d} {row['tier']:7} {ms['again']:9.1f} {foretold['again']:9.1f} {ms['back']:9.1f} "
        f"{foretold['back']:9.1f}  {row['taken']:6} {row['ratio']:5.2f}"
    )


def machine(backend: Any) -> str:
    """What it ran on, in a line."""
    from octavo.engine.bench_machine import machine_card

    card = machine_card(backend)
    rates = (card["native"] or {}).get("read_gb_s", {})
    reads = ", ".join(f"{rate:.0f} GB/s on {threads}" for threads, rate in rates.items())
    where = f"{card['cpu']}, {card['cores']['usable']} cores (reads {reads}), {card['system']}"
    return f"machine: {where}, {card['numerics']}, Python {card['python']}, {card['time']}"


HEAD = "context tier        again  foretold      back  foretold  taken  ratio     (milliseconds)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--contexts", default="16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--host-kv-memory", default="1GiB")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--disk-mb-per-s", type=float, default=0.0, help="slow the disk down to that")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    contexts = [int(text) for text in given.contexts.split(",")]
    settings = {"backend": given.backend, "host_kv_memory": given.host_kv_memory, "kv_dtype": given.kv_dtype}
    with tempfile.TemporaryDirectory() as folder:
        swaps = Swaps(given.model, contexts, folder, **settings)
        if given.disk_mb_per_s:
            swaps.slow_down(given.disk_mb_per_s)
        swaps.learn(contexts)
        print(HEAD)
        rows = []
        for context in contexts:
            for tier in ("memory", "disk"):
                rows.append(swaps.measure(context, tier, given.rounds))
                print(show(rows[-1]), flush=True)
        print(machine(swaps.llm.loaded.parts.backend))
        swaps.core.close()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
