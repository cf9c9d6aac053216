"""How long hostile grammars hold up the streams of others: a real server, some streams, and who sends them.

    python benchmarks/grammar_stall.py [--model smollm2-135m-instruct] [--streams 4] [--seconds 5] [--pairs 4]

Streams decode all the time. In turns they are alone, and beside another process that sends hostile grammars, two at a
time and each another one than before, so that no verdict is remembered: 30,000 brackets, enumerations of 10^5 values,
exponential regular expressions, languages that are empty, multiples of large primes, ambiguous and large grammars that
are taken, and such of which one mask takes half a second. Gaps are those that readers see, from one token of a stream
to its next. Exits with 1 if the longest one beside them is 50 ms above the longest one alone, or something else than
200 or 400 is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from load_client import Asked, LoadFailed, ask
from servers import own_server

STALL_MS = 50.0
_OUTPUT = 300  # tokens of a stream
_SENDERS = 2
_REST_S = 3.0  # before anything is asked: the engine reads the vocabulary for grammars in its first second of rest


def hostile(number: int) -> list[dict[str, Any]]:
    """The list once, none of it equal to that of another number."""
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "required": ["n"]}
    many = {f"p{i}": {"type": "string", "pattern": f"^.*a.{{1,{50 + number % 50}}}$"} for i in range(700)}
    return [
        {"json_schema": "[" * 30_000 + str(number)},
        {"json_schema": '{"items":' * 5_000 + "{}" + "}" * 5_000 + " " * number},
        {"json_schema": {"enum": list(range(number, number + 100_000))}},
        {"json_schema": {"enum": list(range(number, number + 2_000))}},
        {"json_schema": {"title": str(number), "$defs": {"node": node}, "$ref": "#/$defs/node"}},
        {"json_schema": {"title": str(number), "type": "array", "items": {"$ref": "#"}, "minItems": 1}},
        {"json_schema": {"type": "integer", "multipleOf": 999_983 - 2 * number}},
        {"json_schema": {"type": "integer", "multipleOf": 19_997 - 2 * number}},
        {"json_schema": {"title": str(number), "properties": many}},
        {"json_schema": {"title": str(number), "additionalProperties": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"regex": f"(a+)+b{{{number}}}"},
        {"regex": f"(a{{1,1000}}){{1,{1000 + number}}}"},
        {"regex": f"(.*a.{{15}}){{3}}{number}"},
        {"regex": rf"(\p{{L}}|\p{{N}}){{1,900}}x\p{{Greek}}{{1,{900 + number}}}"},
        {"regex": "(" * 2_000 + f"{number}" + ")" * 2_000},
        {"grammar": f'start: "a"* (start start)* "{number}"'},
        {"grammar": f'start: x x x x "{number}"\nx: ("a" | "aa" | x)* "b"?'},
        {"grammar": "start: " + "(" * 30_000 + f'"{number}"' + ")" * 30_000},
        *costly_masks(number),
    ]


def costly_masks(number: int) -> list[dict[str, Any]]:
    """Grammars of which one mask costs much, most of them behind a first one that does not."""
    calls = [_call(f"tool{number}_{i}", "^(a|b)*a(a|b){17}$") for i in range(10)]
    counted = "|".join(f"[a-z ]*{letter}[a-z ]{{17}}" for letter in "abcdefghij")
    nullable = [f"/[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i // 26}}}/" for i in range(300)]
    deep = [f'r{i}: r{i + 1} | "a" r{i + 1} | r{i + 1} "b"' for i in range(100)]
    divided = [{"pattern": f"^([a-z]{{{prime}}})*$"} for prime in (2, 3, 5, 7, 11)]
    return [
        {"json_schema": {"anyOf": calls}},
        {"grammar": _ambiguous(150, number)},
        {"grammar": _ambiguous(600, number)},
        {"grammar": f'start: "x{number}" (' + " ".join(f"r{i}?" for i in range(300)) + ")*\n" + _rules(nullable)},
        {"grammar": f'start: "x{number}" r0\n' + "\n".join(deep) + '\nr100: "x" | start'},
        {"grammar": f'start: "x{number}" s "z"\ns: s s s | "a" | ""'},
        {"regex": f"x{number}({counted})"},
        {"json_schema": {"title": str(number), "type": "string", "allOf": divided}},
        {"json_schema": {"properties": {f"p{number}_{i}": {"type": "integer"} for i in range(1_500)}}},
        {"json_schema": {"anyOf": [{"type": "string", "maxLength": 100 * number + i} for i in range(300)]}},
    ]


def _call(name: str, pattern: str) -> dict[str, Any]:
    arguments = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    parts = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def _ambiguous(count: int, number: int) -> str:
    """Words that match in many ways, and sequences of them in more."""
    lines = [f'start: "x{number}" s "!"', "s: s s | " + " | ".join(f"r{i}" for i in range(count))]
    lines += [f"r{i}: W{i} s?" for i in range(count)]
    return "\n".join([*lines, *(f"W{i}: /[a-z]{{1,{i + 1}}}/" for i in range(count))])


def _rules(bodies: Sequence[str]) -> str:
    return "\n".join(f"r{i}: {body}" for i, body in enumerate(bodies))


def send(url: str, first: int) -> None:
    """Send hostile grammars until the input ends, then print the answers by status and what came of the slowest."""
    address = urlsplit(url)
    counts: Counter[str] = Counter()
    slowest = (0.0, "")
    lists = iter(range(first, first + 9_000))
    waiting: Iterator[dict[str, Any]] = iter(())
    lock, ended = threading.Lock(), threading.Event()

    def next_one() -> dict[str, Any]:
        nonlocal waiting
        with lock:
            found = next(waiting, None)
            if found is None:
                waiting = iter(hostile(next(lists)))
                found = next(waiting)
            return found

    def client() -> None:
        nonlocal slowest
        while not ended.is_set():
            fields = next_one()
            body = json.dumps({"prompt": "Say", "max_tokens": 12, "temperature": 0, **fields}).encode()
            begun = time.perf_counter()
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            counts[str(connection.getresponse().status)] += 1
            connection.close()
            slowest = max(slowest, (time.perf_counter() - begun, str(fields)[:60]))

    threads = [threading.Thread(target=client) for _ in range(_SENDERS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"answers": counts, "slowest_s": slowest[0], "slowest": slowest[1]}))


class Streams:
    """Some streams of a server; ``gaps`` holds those since it was last emptied, in milliseconds."""

    def __init__(self, url: str, model: str, count: int) -> None:
        self.url, self.model, self.count = url, model, count
        self.gaps: list[float] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(self._stream(number) for number in range(self.count)))

    async def _stream(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            answer = await ask(self.url, self.model, Asked(f"Story {number} {turn}:", 4, _OUTPUT), self._gap)
            if len(answer.pieces) < _OUTPUT // 2:
                raise LoadFailed("a stream came in too few pieces to tell gaps")

    def _gap(self, seconds: float) -> None:
        self.gaps.append(1e3 * seconds)


def told(gaps: Sequence[float]) -> dict[str, float]:
    """Of the gaps of one stretch."""
    ordered = sorted(gaps)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {"gaps": len(ordered), **{name: round(gap, 1) for name, gap in found.items()}, "max": round(ordered[-1], 1)}


async def measure(url: str, given: argparse.Namespace) -> dict[str, Any]:
    """Stretches in turns, alone and beside the senders."""
    streams = Streams(url, given.model, given.streams)
    running = asyncio.ensure_future(streams.run())
    alone, beside, sent = [], [], []
    await asyncio.sleep(2.0)
    for pair in range(given.pairs):
        streams.gaps = []
        await asyncio.sleep(given.seconds)
        alone.append(told(streams.gaps))
        command = [sys.executable, __file__, "--send", url, "--first", str(1 + 100 * pair)]
        sender = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        await asyncio.sleep(0.5)
        streams.gaps = []
        await asyncio.sleep(given.seconds)
        beside.append(told(streams.gaps))
        sent.append(json.loads((await sender.communicate(b""))[0]))
        if running.done():
            await running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {"alone": alone, "beside": beside, "sent": sent}


def main() -> int:
    """Parse, start a server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each stretch")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--send", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        send(given.send, given.first)
        return 0
    with own_server(given.model, "auto") as server:
        server.wait(given.model)
        time.sleep(_REST_S)
        runs = asyncio.run(measure(server.url, given))
    longest = {name: median(run["max"] for run in runs[name]) for name in ("alone", "beside")}
    most = {name: max(run["max"] for run in runs[name]) for name in ("alone", "beside")}
    answers = sum((Counter(sent["answers"]) for sent in runs["sent"]), Counter())
    result = {
        "model": given.model,
        "streams": given.streams,
        "seconds": given.seconds,
        "longest_gap_ms": most,
        "median_of_longest_ms": longest,
        "stall_ms": round(most["beside"] - most["alone"], 1),
        "answers": answers,
        "runs": runs,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result["stall_ms"] >= STALL_MS or bool(set(answers) - {"200", "400"}))


if __name__ == "__main__":
    sys.exit(main())
