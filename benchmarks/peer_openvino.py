"""Runs in a venv of its own, which has openvino-genai and nothing of ours: peer_openvino.py MODEL_DIR THREADS

Prints a JSON object: tokens a second of `stream`, `batch 16`, `batch 64`, `prefill 512`, `prefill 1024`; runs a second
of `prefix` (32 requests, 512 shared and 32 own tokens in, 32 out, cold).
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as og

_VOCAB = 40_000  # below that of every model compared


class Bench:
    """One pipeline; every load is cold, with prompts of its own."""

    def __init__(self, path: str, threads: int) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 64, 512
        scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
        self.pipe = og.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.rng, self.count = random.Random(time.time_ns()), 0

    def tokens(self, count: int) -> list[int]:
        """Random ids."""
        return [self.rng.randrange(1000, _VOCAB) for _ in range(count)]

    def load(self, prompts: list[list[int]], output: int) -> list[tuple[float, int]]:
        """Run all at once: (seconds since the start, tokens that came) step by step."""
        begin, live, times = time.perf_counter(), [], []
        for prompt in prompts:
            wanted = og.GenerationConfig()
            wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = output, True, False
            self.count += 1
            live.append(self.pipe.add_request(self.count, ov.Tensor(np.array([prompt], np.int64)), wanted))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            came = sum(len(part.generated_ids) for h in live if h.can_read() for part in h.read().values())
            times.append((time.perf_counter() - begin, came))
        return times


def main() -> None:
    """Warm up, measure each once, print."""
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    bench.load([bench.tokens(128)], 16)
    values: dict[str, Any] = {}
    single = [(at, came) for at, came in bench.load([bench.tokens(128)], 128) if came]
    values["stream"] = sum(came for _, came in single[1:]) / (single[-1][0] - single[0][0])
    for count in (16, 64):
        times = bench.load([bench.tokens(128) for _ in range(count)], 128)
        values[f"batch {count}"] = sum(came for _, came in times) / times[-1][0]
    for size in (512, 1024):
        values[f"prefill {size}"] = size / bench.load([bench.tokens(size)], 1)[-1][0]
    shared = bench.tokens(512)
    values["prefix"] = 1 / bench.load([[*shared, *bench.tokens(32)] for _ in range(32)], 32)[-1][0]
    print(json.dumps(values))


if __name__ == "__main__":
    main()
