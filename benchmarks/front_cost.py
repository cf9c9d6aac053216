"""What the front end costs a token, and what serving costs the engine.

    make front-cost                                       both, medians of five rounds
    python benchmarks/front_cost.py --only front --layout compact,full

front: the null model behind a real tokenizer, in steps so long that the streams get 2,000 tokens/s in all; CPU time of
every process but the engine and the supervisor over the tokens that were delivered, one event a token. Bar: 60 us.
served: a real model's tokens/s over 16 streams, against the same 16 requests offline (`LLM.generate`), in turns. Bar:
90%.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from layouts import cpu_seconds
from load_client import Asked, one_token_words, requests, run, tokenizer_of
from servers import Server

from octavo.engine.config import EngineConfig

STREAMS, RATE = 16, 2000.0
OUTPUT = 256  # tokens of an answer
DECODES = 0.85  # share of the steps that draw for all streams: prompts take some, too
MOST_US, LEAST_SHARE = 60.0, 0.9
BEHIND = ("engine", "server")  # seats that are no front end; `server` is the supervisor


def server(model: str, backend: str, layout: str, **environment: str) -> Server:
    """A server of ours."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--backend", backend, "--layout", layout, "--offline"]
    return Server(lambda port: [*command, "--port", str(port)], {**os.environ, **environment})


def front(model: str, layout: str, words: list[str], rounds: int, streams: int) -> dict[str, Any]:
    """CPU of the front end by token, in microseconds: by seat, and all of them."""
    step = {"OCTAVO_NULL_STEP_MS": str(1e3 * DECODES * streams / RATE)}
    found: list[dict[str, float]] = []
    count = max(streams, 32)
    with server(model, "null", layout, **step) as one:
        one.wait(model)
        for number in range(rounds + 1):
            load = [Asked(asked.prompt, asked.tokens, OUTPUT) for asked in requests(words, number, count)]
            before = cpu_seconds(one.process.pid)
            seen = run(one.url, model, load, streams)
            after = cpu_seconds(one.process.pid)
            tokens = sum(asked.output for asked in load)
            row = {seat: 1e6 * (after[seat] - before[seat]) / tokens for seat in after}
            row["front"] = sum(cost for seat, cost in row.items() if seat not in BEHIND)
            row |= {"tokens_per_s": seen["tokens_per_s"], "tokens_per_event": tokens / seen["pieces"]}
            if number:  # the first round warms up
                found.append(row)
    return {"layout": layout, "streams": streams, **{key: round(median(r[key] for r in found), 2) for key in found[0]}}


def batch(words: list[str], seed: int) -> list[Asked]:
    """Sixteen requests of one length."""
    return [Asked(asked.prompt[:300].rsplit(" ", 1)[0], 0, 64) for asked in requests(words, seed, STREAMS)]


@contextmanager
def offline(model: str) -> Iterator[Any]:
    """A process that answers a list of prompts with the tokens/s that it made of them."""
    command = [sys.executable, __file__, "--offline", "--model", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def speed(load: list[Asked]) -> float:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([[asked.prompt, asked.output] for asked in load]) + "\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        yield speed
        process.stdin.close()  # type: ignore[union-attr]


def answer_offline(model: str) -> None:
    """The other end of `offline`."""
    import time

    from octavo.core.params import SamplingParams
    from octavo.engine.llm import LLM

    llm = LLM(model, offline=True, say=lambda line: None)
    for line in sys.stdin:
        asked = json.loads(line)
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in asked]
        begun = time.perf_counter()
        llm.generate([prompt for prompt, _ in asked], params)
        print(sum(count for _, count in asked) / (time.perf_counter() - begun), flush=True)


def served(model: str, layout: str, tokenizer: Any, words: list[str], rounds: int) -> dict[str, Any]:
    """Tokens/s over HTTP and offline, in turns, and the median of their ratios."""
    pairs: list[tuple[float, float]] = []
    with offline(model) as speed, server(model, "auto", layout) as one:
        one.wait(model)
        for number in range(rounds + 1):
            load = batch(words, number)
            load = [Asked(asked.prompt, len(tokenizer.encode(asked.prompt)), asked.output) for asked in load]
            alone = speed(load)
            pair = run(one.url, model, load, STREAMS)["tokens_per_s"], alone
            print(f"served {pair[0]:.0f} tokens/s, offline {pair[1]:.0f}", file=sys.stderr)
            if number:
                pairs.append(pair)
    told = {"layout": layout, "served": median(a for a, _ in pairs), "offline": median(b for _, b in pairs)}
    return {**told, "share": round(median(a / b for a, b in pairs), 4), "shares": [round(a / b, 3) for a, b in pairs]}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--layout", default="compact,full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--only", choices=("front", "served"))
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.offline:
        answer_offline(given.model)
        return 0
    tokenizer = tokenizer_of(given.model)
    words, layouts = one_token_words(tokenizer), given.layout.split(",")
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.python_version()}"}
    held = True
    if given.only != "served":
        result["front"] = [front(given.model, name, words, given.rounds, given.streams) for name in layouts]
        held &= all(row["front"] < MOST_US for row in result["front"])
    if given.only != "front":
        result["served"] = served(given.model, "auto", tokenizer, words, given.rounds)
        held &= result["served"]["share"] >= LEAST_SHARE
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
