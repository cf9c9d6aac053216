"""Schemathesis over our own OpenAPI document, against a real server with a tiny model: `make schemathesis`.

Every case must be answered in time, with a status, a content type, headers and a body that the document tells of; what
breaks the schema must be refused; no 5xx but 503. `/v1/live` is left out: its stream has no end.
`--write` keeps what was counted in benchmarks/results/schemathesis.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serve"))

from live_server import live_server  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "schemathesis.json"
KEY = "fuzzing"
SERVER = [str(ROOT / "fixtures" / "tiny_model.json"), "--max-seq-len", "64", "--request-timeout", "10"]
SECONDS = 30  # for one answer
LEFT_OUT = "/v1/live"
# rules between parameters (top_logprobs needs logprobs, a prompt and its output fit the context) are in no schema
NO_CHECK = "positive_data_acceptance"


def main() -> int:
    """Run until there were enough cases; the number of runs that found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=320, help="for each operation in one run")
    parser.add_argument("--workers", type=int, default=1, help="threads; Python 3.11 has faults with several")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=".", help="a pattern of paths")
    parser.add_argument("--program", type=Path, default=Path(sys.executable).with_name("schemathesis"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    found: list[str] = []
    begun, slowest, failed, seed = time.monotonic(), 0.0, 0, options.seed
    with TemporaryDirectory() as name:
        folder = Path(name)
        with live_server(*SERVER, "--key-file", key_file(folder), "--batch-dir", str(folder / "files")) as server:
            while sum(counts.values()) < options.cases and not failed:
                phases = "coverage,fuzzing" if seed == options.seed else "fuzzing"
                told, ended = run(options, server.url, folder, phases, seed)
                counts.update(told["counts"])
                found += told["found"]
                slowest, failed = max(slowest, told["slowest"]), failed + bool(ended)
                print(f"seed {seed}: {sum(counts.values())} cases, {time.monotonic() - begun:.0f} s", flush=True)
                seed += 1
            still_serves(server.url)
    result = summary(counts, slowest, time.monotonic() - begun, options.program, seed - options.seed)
    result["found"] = found
    print(json.dumps(result, indent=1))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return failed


def key_file(folder: Path) -> str:
    """A file with the one key."""
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}))
    return str(file)


def run(options: Any, url: str, folder: Path, phases: str, seed: int) -> tuple[dict[str, Any], int]:
    """One run over the operations: what was counted, and how it ended."""
    file = folder / "counts.json"
    command = [options.program, "--config-file", HERE / "schemathesis.toml", "run", f"{url}/openapi.json"]
    command += ["--include-path-regex", options.only, "--exclude-path", LEFT_OUT, "--phases", phases]
    command += ["--max-examples", str(options.examples), "--seed", str(seed), "--request-timeout", str(SECONDS)]
    command += [
        "--workers",
        str(options.workers),
        "--header",
        f"Authorization: Bearer {KEY}",
        "--exclude-checks",
        NO_CHECK,
    ]
    command += ["--continue-on-failure", "--no-shrink", "--report", "ndjson", "--report-ndjson-path", "told.ndjson"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "counted", "PYTHONPATH": str(HERE), "COUNTS": str(file)}
    done = subprocess.run(command, env=environment, cwd=folder)
    return {**json.loads(file.read_text()), "found": findings(folder / "told.ndjson")}, done.returncode


def findings(report: Path) -> list[str]:
    """Each check that failed, once for each operation."""
    found = set()
    for line in report.read_text().splitlines():
        for checks in json.loads(line).get("ScenarioFinished", {}).get("recorder", {}).get("checks", {}).values():
            bad = [check for check in checks if check["status"] == "failure"]
            found |= {f"{check['name']}: {check['failure_info']['failure']['operation']}" for check in bad}
    return sorted(found)


def still_serves(url: str) -> None:
    """The server is ready, and nothing is left inside."""
    end = time.monotonic() + 30
    while (state := httpx.get(f"{url}/health/ready")).status_code != 200:
        if time.monotonic() > end:
            raise AssertionError(state.text)
        time.sleep(0.5)


def summary(counts: Counter[str], slowest: float, seconds: float, program: Path, runs: int) -> dict[str, Any]:
    """What is kept of a run."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    by_status: Counter[str] = Counter()
    for name, count in counts.items():
        by_status[name.rsplit(" ", 1)[1]] += count
    operations = {name.rsplit(" ", 1)[0] for name in counts}
    return {
        "command": "make schemathesis ARGS=--write",
        "schemathesis": version,
        "cases": sum(counts.values()),
        "operations": len(operations),
        "runs": runs,
        "seconds": round(seconds),
        "slowest_answer_s": round(slowest, 2),
        "by_status": dict(sorted(by_status.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
