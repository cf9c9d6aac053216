"""Whether planning the next step while one runs pays here: tokens a second with and without, in turns.

python benchmarks/overlap.py [--rounds 5] [--format w8g64]
"""

from __future__ import annotations

import argparse
from statistics import median

from pressure import quiet_engine

from octavo.engine.bench_offline import OfflineBench, Workload
from octavo.engine.config import EngineConfig

WORKLOADS = (Workload("1 stream", "decode", 1, 128, 128), Workload("64 streams", "batch", 64, 32, 64))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", default="w8g64")
    given = parser.parse_args()
    settings = {"backend": "native", "format": given.format, "kv_memory": "512MiB", "prefix_cache": False}
    benches = {
        overlap: OfflineBench(quiet_engine(EngineConfig(overlap=overlap, **settings)), WORKLOADS)
        for overlap in (False, True)
    }
    found: dict[str, dict[bool, list[float]]] = {work.name: {False: [], True: []} for work in WORKLOADS}
    for number in range(given.rounds + 1):
        for work in WORKLOADS:
            for overlap, bench in benches.items():
                speed, _ = bench.measure(work)
                if number:  # the first round warms up
                    found[work.name][overlap].append(speed)
    for name, speeds in found.items():
        without, with_it = median(speeds[False]), median(speeds[True])
        print(f"{name}: {without:.1f} tok/s, with overlap {with_it:.1f} ({with_it / without:.3f}x)")


if __name__ == "__main__":
    main()
