"""What loading takes, in a process of its own: the time until an engine is ready, and its peak resident memory.

    python benchmarks/footprint.py MODEL [--format w8g64] [--kv-memory 256MiB]

Prints JSON. Files are in the page cache (the model is loaded once before). All pages of keys and values are written, so
that memory that is counted is memory that is used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bars import Value

__all__ = ["footprint_values"]

LOADS = 3


def footprint_values(model: str, say: Callable[[str], None]) -> dict[str, Value]:
    """Load time and memory of the small model and of the 1B shape."""
    from shapes import shape_folder

    values: dict[str, Value] = {}
    for name, path in (("smollm2-135m", model), ("llama-1b-shape", str(shape_folder("llama-1b-shape", say)))):
        say(f"{name}: loading in a process of its own")
        found = [_measure(path) for _ in range(LOADS + 1)][1:]
        first = found[0]
        seconds = median(record["load_s"] for record in found)
        share = median(record["peak_bytes"] / record["plan_bytes"] for record in found)
        whole = f"{median(record['process_s'] for record in found):.2f} s from the start of the process"
        values[f"{name} load"] = Value(seconds, f"median of {LOADS}; {whole}")
        sizes = f"{first['peak_bytes'] / 1e6:.0f} MB against {first['plan_bytes'] / 1e6:.0f} MB"
        values[f"{name} memory"] = Value(share, f"{sizes} (weights {first['weight_bytes'] / 1e6:.0f} MB)")
    return values


def _measure(model: str) -> dict[str, Any]:
    begin = time.time()
    command = [sys.executable, str(Path(__file__).resolve()), model, "--begin", str(begin)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Load, fill the pages, print."""
    from own import config

    from octavo.core.params import SamplingParams
    from octavo.core.request import Request
    from octavo.engine.loader import load_engine

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--format", default="w8g64")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--begin", type=float, default=time.time(), help="when the process was started")
    given = parser.parse_args()
    begin = time.perf_counter()
    loaded = load_engine(config(given.model, given.format, kv_memory=given.kv_memory), say=lambda line: None)
    ready = time.perf_counter() - begin
    since_start = time.time() - given.begin
    length = min(loaded.max_seq_len - 8, 2048)
    for at in range(loaded.plan.capacity_tokens // length + 1):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        prompt = [(at * 7919 + place * 31) % loaded.parts.config.vocab_size for place in range(length)]
        loaded.core.submit(
            Request(
                str(at), prompt, params, arrival=0.0, model=loaded.parts.name, namespace=loaded.parts.namespace("")
            ),
            0.0,
        )
    while loaded.core.has_work:
        loaded.core.step(time.perf_counter())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    told = {"load_s": ready, "process_s": since_start, "peak_bytes": peak, "plan_bytes": loaded.plan.total}
    print(json.dumps({**told, "weight_bytes": loaded.parts.weight_bytes}))


if __name__ == "__main__":
    main()
