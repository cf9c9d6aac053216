"""Row 20: grammars that are hostile or broken, ten thousand of them, and a process that tries them out and dies."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from faults.load import TINY, Load, counts
from faults.rows import row
from faults.rows_clients import _gaps, _p99
from faults.world import World, until
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.grammar.compiler import MAX_KEPT
from octavo.engine.llm import LLM

COMPLETIONS = "/v1/completions"
PROMPT = [1, 5, 6, 7]
STALL = 50.0  # ms
DISTINCT = 10_000
MOST_GROWTH = 24 << 20  # bytes, from where the cache is full for the first time
Fields = dict[str, Any]
_NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "required": ["n"]}
_OBJECT = {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}}
REFUSED: Sequence[Fields] = (
    {"json_schema": {"type": "quux"}},
    {"json_schema": {"type": "integer", "not": {"const": 1}}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$defs": {"node": {**_NODE, "additionalProperties": False}}, "$ref": "#/$defs/node"}},
    {"json_schema": {"$ref": "#/$defs/none"}},
    {"json_schema": '{"items":' * 5_000 + "{}" + "}" * 5_000},
    {"json_schema": "[" * 30_000},
    {"json_schema": {"enum": list(range(100_000))}},
    {"json_schema": {"enum": list(range(9_000))}},
    {"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}},
    {"json_schema": False},
    {"json_schema": '{"enum": ["\\ud800"]}'},
    {"json_schema": '{"minimum": NaN}'},
    {"json_schema": '{"type": "integer", "minimum": 1e999}'},
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"regex": "(" * 1_000 + "a" + ")" * 1_000},
    {"regex": "(?=a)b"},
    {"regex": "(?<!a)b"},
    {"regex": r"(a)\1"},
    {"regex": r"[^\s\S]"},
    {"regex": "a{1000000}"},
    {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    {"grammar": 'start: start "x"'},
    {"grammar": "no grammar at all"},
    {"structural_tag": {"format": {"type": "magic"}}},
)
EITHER: Sequence[Fields] = (  # refused for a limit, or right
    {"regex": "(a+)+b"},
    {"regex": "(a{1,1000}){1,1000}"},
    {"json_schema": {"type": "integer", "multipleOf": 999_983}},
    {"regex": ".*.*.*x"},
    {"regex": r"\p{L}{1,500}"},
    {"regex": r"(\p{L}|\p{N}){1,900}x\p{Greek}{1,900}"},
    {"regex": ".*a.{20}"},
    {"regex": "(.*a.{15}){3}"},
    {"regex": "(a|b|ab)*(a|ba)*(b|aa)*"},
    {"grammar": 'start: "a"* (start start)* "b"'},
    {"grammar": 'start: x x x x\nx: ("a" | "aa" | x)* "b"?'},
    {"json_schema": {**_OBJECT}},
    {"json_schema": {"type": "integer", "multipleOf": 99_991}},
    {"json_schema": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949)]}},
    {"json_schema": {"oneOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}},
    {"json_schema": {"allOf": [{"anyOf": [{"minimum": 4 * i + j} for j in range(4)]} for i in range(12)]}},
    {
        "json_schema": {
            "patternProperties": {f".*{letter}.*": {"type": "integer"} for letter in "abcdefghijklmnopqrst"},
            "additionalProperties": False,
        }
    },
    {"json_schema": {"properties": {f"p{i}": {"type": "string", "pattern": "^.*a.{1,50}$"} for i in range(700)}}},
)
TAKEN: Sequence[Fields] = (
    {"regex": "[a-e]{3,9}"},
    {"regex": "(ab|cd)+e"},
    {"grammar": 'start: "a" start "b" | "c"'},
    {"json_schema": {"type": "integer", "minimum": 17, "maximum": 90_000}},
    {"json_schema": {"type": "number", "minimum": 0}},
    {"json_schema": {"enum": list(range(2_000))}},
)
_KINDS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark", "structural_tag": "structural_tag"}


def _body(fields: Fields, tokens: int = 12) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, "return_token_ids": True, **fields}


class Alone:
    """Answers of an engine in this process, to one request at a time."""

    def __init__(self) -> None:
        self._llm = LLM(str(TINY), backend="null", kv_memory="1MiB", say=lambda line: None)

    def tokens(self, fields: Fields) -> Sequence[int]:
        """The tokens of the request that `_body` makes."""
        ((name, value),) = fields.items()
        source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        params = SamplingParams(max_tokens=12, temperature=0.0, grammar=Grammar(_KINDS[name], source))
        return self._llm.generate([PROMPT], params)[0].outputs[0].token_ids


def begin(world: World, **more: Any) -> Load:
    """The load, once the process that tries grammars out runs, and belongs to what is open."""
    if "grammars" not in world.processes():
        assert world.http.post(COMPLETIONS, json=_body({"regex": "a"})).status_code == 200
        world.baseline = world.files()
    load = world.begin(**more)
    time.sleep(2.0)
    return load


def stalls(load: Load, world: World, begun: float, ended: float) -> str:
    """How long others waited between two events, before and during; in milliseconds."""
    before, during = _gaps(load, begun - 2.0, begun), _gaps(load, begun, ended)
    assert _p99(during) < _p99(before) + STALL * world.slow, (_p99(before), _p99(during))
    told = [f"{_p99(gaps):.0f} (longest {1000 * gaps[-1]:.0f}) ms" for gaps in (before, during)]
    return f"p99 of the others' gaps {told[0]} before, {told[1]} during"


def _ask(world: World, fields: Fields) -> tuple[httpx.Response, float]:
    begun = time.monotonic()
    answer = world.http.post(COMPLETIONS, json=_body(fields))
    took = time.monotonic() - begun
    assert answer.status_code in (200, 400), (answer.status_code, str(fields)[:99], answer.text)
    if answer.status_code == 400:
        assert "message" in answer.json()["error"] and len(answer.text) < 600, answer.text[:999]
    return answer, took


@row(
    "20a",
    f"{len(REFUSED) + len(EITHER) + len(TAKEN)} grammars: broken, empty, ambiguous, too large, and plain ones",
    "400, or compiled within the limits and answered as it is alone; no other stream waits 50 ms for it",
    step_ms=5,
    header_timeout=10.0,
)
def hostile_grammars(world: World) -> str:
    world.may_fail = True  # a grammar that cannot be gone on with fails a step, and its own request
    alone, load = Alone(), begin(world)
    asked = [(fields, 400) for fields in REFUSED] + [(fields, 0) for fields in EITHER]
    asked += [(fields, 200) for fields in TAKEN]
    world.dice.shuffle(asked)
    begun, found, slowest = time.monotonic(), [], 0.0
    for fields, status in asked:
        answer, took = _ask(world, fields)
        assert status in (0, answer.status_code), (str(fields)[:99], answer.text)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == list(alone.tokens(fields)), fields
        slowest = max(slowest, took)
        found.append(answer.status_code)
    ended = time.monotonic()
    assert slowest < 12.0 * world.slow, f"{slowest:.2f} s"  # 2 s of CPU time, 10 s at most
    told = world.end()
    world.audit()
    answered = f"{found.count(400)} refused, {found.count(200)} answered, {slowest:.2f} s at most"
    return f"{answered}; {stalls(load, world, begun, ended)}; {counts(told)}"


def _memory(world: World) -> dict[str, int]:
    """Resident bytes of each process."""
    page = resource.getpagesize()
    pids = world.processes()
    return {seat: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for seat, pid in pids.items()}


async def _distinct(world: World, first: int, numbers: range) -> None:
    """An integer within bounds that nobody has asked for yet, sixteen at a time."""
    free = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        low, high = first + number, first + 2 * number
        async with free:
            body = _body({"json_schema": {"type": "integer", "minimum": low, "maximum": high}})
            answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop" and low <= int(choice["text"]) <= high, (low, high, choice)

    limits = httpx.Limits(max_connections=16, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=world.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in numbers))


@row("20b", f"{DISTINCT:,} schemas, each another one", f"each answer fits its own; {MAX_KEPT} are kept, memory is flat",
     step_ms=2, header_timeout=10.0)  # fmt: skip
def many_schemas(world: World) -> str:
    load = begin(world, clients=4)
    first, begun = world.dice.randrange(1, 1 << 20), time.monotonic()
    asyncio.run(_distinct(world, first, range(2_000)))
    full = _memory(world)
    asyncio.run(_distinct(world, first, range(2_000, DISTINCT)))
    ended, after = time.monotonic(), _memory(world)
    grown = {seat: after[seat] - full[seat] for seat in full}
    assert max(grown.values()) < MOST_GROWTH, grown
    told = world.end()
    world.audit()
    sizes = ", ".join(f"{seat} {grown[seat] / 2**20:+.1f}" for seat in sorted(grown))
    rate = DISTINCT / (ended - begun)
    return f"{rate:.0f}/s; MiB from 2,000 on: {sizes}; {stalls(load, world, begun, ended)}; {counts(told)}"


@row(
    "20c",
    "kill -9 and SIGSTOP of the process that tries grammars out, at work",
    "another one begins; a grammar that was fine is answered as it is alone",
    step_ms=5,
    header_timeout=10.0,
)
def checker_dies(world: World) -> str:
    alone, load = Alone(), begin(world)
    begun, taken = time.monotonic(), []
    for number in range(8):
        least = world.dice.randrange(2, 1 << 20)
        bulk = {"enum": [least + 3 * k for k in range(1_900)]}
        fields = {"json_schema": bulk}
        answers: list[tuple[httpx.Response, float]] = []
        client = threading.Thread(target=lambda fields=fields, into=answers: into.append(_ask(world, fields)))
        client.start()
        world.rest(0.0, 0.08)
        killed = signal.SIGSTOP if number == 7 else signal.SIGKILL
        until(lambda: "grammars" in world.processes(), 10 * world.slow, "one runs")
        world.kill("grammars", killed)
        client.join()
        answer, took = answers[0]
        taken.append(took)
        if killed == signal.SIGKILL:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == list(alone.tokens(fields))
        stopped = world.processes().get("grammars") if killed == signal.SIGSTOP else None
        if stopped and answer.status_code == 200:  # it was through already
            world.kill("grammars", signal.SIGCONT)
    answer, _ = _ask(world, TAKEN[0])
    assert answer.json()["choices"][0]["token_ids"] == list(alone.tokens(TAKEN[0]))
    ended = time.monotonic()
    told = world.end()
    world.audit()
    found = f"{max(taken[:-1]):.2f} s at most, {taken[-1]:.1f} s stopped"
    return f"{found}; {stalls(load, world, begun, ended)}; {counts(told)}"
