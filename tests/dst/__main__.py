"""Play a range of seeds on all cores; one closing line, and one line for each failure.

python -m dst --from 1 --seeds 500 --events 300 [--jobs 2] [--shrink] [--edges]
python -m dst --scenario '{"seed": ...}' [--shrink]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from dst.coverage import EDGES
from dst.draw import draw
from dst.run import Outcome, kept_runs, play, play_seed
from dst.scenario import Scenario
from dst.shrink import shrink

FEW = 1000  # an edge taken less often than that is named


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="dst", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stride", type=int, default=1, help="play every so many seeds")
    parser.add_argument("--lines", action="store_true", help="one JSON line for each seed, for the parent process")
    parser.add_argument("--kept", action="store_true", help="with --lines: the kept runs first, as seeds -1, -2, ...")
    parser.add_argument("--shrink", action="store_true", help="print the smallest script that still fails")
    parser.add_argument("--edges", action="store_true", help="print how often each edge was taken")
    parser.add_argument("--scenario", help="play this one")
    options = parser.parse_args(argv)
    if options.scenario:
        return _play_one(Scenario.from_json(options.scenario), options.shrink)
    seeds = range(options.first, options.first + options.seeds, options.stride)
    if options.lines:
        for number, scenario in enumerate(kept_runs() if options.kept else (), 1):
            print(_line(-number, play(scenario)), flush=True)
        for seed in seeds:
            print(_line(seed, play_seed(seed, options.events)), flush=True)
        return 0
    return _play_range(options, seeds)


def _play_one(scenario: Scenario, shrinks: bool) -> int:
    outcome = play(scenario)
    print(outcome.message or f"passed: {outcome.events} events, {outcome.steps} steps")
    if outcome.code and shrinks:
        print(shrink(scenario, outcome.code).to_json())
    return int(outcome.code is not None)


def _play_range(options: argparse.Namespace, seeds: range) -> int:
    begun = time.perf_counter()
    edges: Counter[tuple[str, str]] = Counter()
    counts: Counter[str] = Counter()
    failed = []
    for told in _outcomes(options, seeds):
        counts.update({name: told[name] for name in ("events", "steps", "kills")})
        edges.update({(state, target): count for state, target, count in told["edges"]})
        if told["code"]:
            failed.append(told)
            print(f"seed {told['seed']}: {told['code']}: {told['message']}", flush=True)
    if options.edges:
        for edge in EDGES:
            print(f"{edge[0]:>10} -> {edge[1]:<10} {edges[edge]:>9}")
    _close(options, failed, counts, edges, time.perf_counter() - begun)
    if failed and options.shrink:
        print(shrink(draw(failed[0]["seed"], options.events), failed[0]["code"]).to_json())
    return int(bool(failed))


def _close(
    options: argparse.Namespace,
    failed: list[dict],
    counts: Counter[str],
    edges: Counter[tuple[str, str]],
    seconds: float,
) -> None:
    taken = [edge for edge in EDGES if edges[edge]]
    few = [f"{state}->{target} {edges[state, target]}" for state, target in EDGES if edges[state, target] < FEW]
    print(
        f"dst: seeds {options.first}..{options.first + options.seeds - 1}: {len(failed)} failed, "
        f"{counts['events']} events, {counts['steps']} steps, {counts['kills']} kills in {seconds:.1f} s; "
        f"{len(taken)} of {len(EDGES)} edges, below {FEW}: {', '.join(few) or 'none'}"
    )


def _line(seed: int, outcome: Outcome) -> str:
    edges = [[*edge, count] for edge, count in outcome.edges.items()]
    values = {"seed": seed, "code": outcome.code, "message": outcome.message[:300], "edges": edges}
    return json.dumps({**values, "events": outcome.events, "steps": outcome.steps, "kills": outcome.kills})


def _outcomes(options: argparse.Namespace, seeds: range) -> Iterator[dict]:
    """What the worker processes say of their seeds, every n-th each."""
    command = [sys.executable, "-m", "dst", "--lines", "--events", str(options.events), "--stride", str(options.jobs)]
    workers = []
    for number in range(min(options.jobs, len(seeds))):
        place = ["--from", str(seeds[0] + number), "--seeds", str(len(seeds) - number)]
        workers.append(subprocess.Popen([*command, *place], stdout=subprocess.PIPE, text=True))
    for worker in workers:  # the pipes of those behind fill up only after hundreds of seeds; then they wait
        for line in worker.stdout or ():
            yield json.loads(line)
        if worker.wait():
            raise SystemExit("a worker process of the simulation failed")


if __name__ == "__main__":
    sys.exit(main())
