"""When pages come back and when they are computed again: milliseconds by context length, and what the chooser takes.

    python benchmarks/swap.py MODEL [--contexts 64,512,2048] [--host-kv-memory 1GiB] [--rounds 3] [--json FILE]

Each context is a prompt of random tokens that was served before. `again`: nothing of it is left. `back`: the page pool
has lost it and the host tier has it. Both are the whole time to the first token. `auto` is what the chooser decides
from the measured rate of copying and the step model, and how much longer that takes than the better of the two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Swaps"]


class Swaps:
    """One engine with a host tier that holds the longest context."""

    def __init__(self, model: str, contexts: Sequence[int], **settings: Any) -> None:
        from octavo.engine.llm import LLM

        longest = max(contexts) + 64
        self.llm = LLM(model, max_seq_len=longest, max_running_requests=1, preemption="auto", **settings)
        self.scheduler = self.llm.loaded.core.scheduler
        self.kv = self.scheduler.kv
        self.rng = random.Random(5)

    def learn(self, contexts: Sequence[int]) -> None:
        """Serve prompts of all lengths, so that the step model knows what a token costs."""
        for context in [*contexts, *contexts]:
            self.serve(self.prompt(context))
            self.kv.flush_prefix_cache()

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self.rng.randrange(self.llm.loaded.parts.config.vocab_size) for _ in range(length)]

    def serve(self, prompt: Sequence[int]) -> float:
        """Milliseconds to the first token."""
        from octavo.core.params import SamplingParams

        begin = time.perf_counter()
        self.llm.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        return 1e3 * (time.perf_counter() - begin)

    def measure(self, context: int, rounds: int) -> dict[str, Any]:
        """The median times of one context length."""
        again, back = [], []
        for _ in range(rounds):
            prompt = self.prompt(context)
            again.append(self.serve(prompt))
            self.kv.prefix.evict(self.kv.allocator.num_pages)
            self.serve([1])  # with it the evicted pages move out
            choice, self._planner.swap_choice = self._planner.swap_choice, None  # read back whatever it costs
            back.append(self.serve(prompt))
            self._planner.swap_choice = choice
            self.kv.flush_prefix_cache()
        pages = -(-context // self.kv.page_size) * len(self.kv.groups)
        chooser = self._planner.swap_choice
        times = {"again": statistics.median(again), "back": statistics.median(back)}
        chosen = "back" if chooser.pays(0, context, pages) else "again"
        expected = {"again": 1e3 * chooser.seconds_again(0, context), "back": 1e3 * chooser.seconds_back(pages)}
        loss = times[chosen] / min(times.values()) - 1.0
        return {"context": context, "ms": times, "expected_ms": expected, "chosen": chosen, "loss": loss}

    @property
    def _planner(self) -> Any:
        return self.scheduler._planner


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    ms, expected = row["ms"], row["expected_ms"]
    return (
        f"{row['context']:7d} {ms['again']:10.1f} {ms['back']:10.1f} {expected['again']:10.1f} {expected['back']:10.1f}"
        f"   {row['chosen']:6} {100 * row['loss']:5.1f} %"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--contexts", default="64,128,256,512,1024,2048,4096")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--host-kv-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    contexts = [int(text) for text in given.contexts.split(",")]
    swaps = Swaps(given.model, contexts, backend=given.backend, host_kv_memory=given.host_kv_memory)
    swaps.learn(contexts)
    print(f"{swaps.scheduler.config.host_mb_per_s} MB/s; pages of {swaps.kv.page_bytes} bytes")
    print("context   again ms    back ms   (foretold)   (foretold)   auto     loss")
    rows = []
    for context in contexts:
        rows.append(swaps.measure(context, given.rounds))
        print(show(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
