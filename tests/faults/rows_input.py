"""Rows 17, 18, 19, 23: bytes, tokens, texts and model files that are not what they should be."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from faults.load import counts, foretold
from faults.rows import row
from faults.rows_clients import _gaps, _p99
from faults.world import ROOT, Bare, World

sys.path += [str(ROOT / "tests" / "serve"), str(ROOT / "tests" / "weights")]

from test_hostile_files import HUGE, SMALL_GGUF, SMALL_SAFETENSORS, mutated, read_everything
from test_malformed import GOOD, TABLE

from octavo.core.errors import InvalidInput
from octavo.weights.gguf import GgufFile
from octavo.weights.safetensors import SafetensorsFile

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
RAW = [
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
    HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\nG",
    HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    HEAD + b"content-length: +2\r\n\r\n{}",
    HEAD + b"content-length: 2 2\r\n\r\n{}",
    HEAD + b"content-length: -2\r\n\r\n{}",
    HEAD + b"content-length : 2\r\n\r\n{}",
    HEAD + b"host: other\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b" folded: x\r\ncontent-length: 2\r\n\r\n{}",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    HEAD + b"".join(b"x-%d: y\r\n" % index for index in range(100)) + b"\r\n",
]


@row(
    "17",
    "malformed bytes: 33 bodies on two routes, one cut at every byte, 17 broken requests",
    "4xx in our shape, no echo",
)
def malformed(world: World) -> str:
    world.begin(4)
    taken = []
    bodies = [(path, body) for path in (COMPLETIONS, CHAT) for body in TABLE]
    bodies += [(COMPLETIONS, GOOD[:end]) for end in range(len(GOOD))]
    world.dice.shuffle(bodies)
    with httpx.Client(base_url=world.url, timeout=30) as client:
        for path, body in bodies:
            begun = time.monotonic()
            answer = client.post(path, content=body, headers=JSON)
            taken.append(time.monotonic() - begun)
            assert 400 <= answer.status_code < 500 and "message" in answer.json()["error"], (
                answer.status_code,
                body[:99],
            )
            assert "SECRETWORD" not in answer.text and not re.search(r"File|\.py|object at", answer.text), answer.text
        for headers in ({"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}):
            assert client.post(COMPLETIONS, content=GOOD, headers=headers).status_code == 415
    for raw in RAW:
        status = _raw(world, raw)
        assert 400 <= status < 500 or status == 0, (status, raw[:200])
    told = world.end()
    world.audit()
    taken.sort()
    assert taken[len(taken) // 2] < 0.1 * world.slow
    half, most = 1000 * taken[len(taken) // 2], 1000 * taken[-1]
    return f"{len(taken) + len(RAW)} requests, half within {half:.1f} ms, all within {most:.0f} ms; {counts(told)}"


def _raw(world: World, raw: bytes) -> int:
    """The status of an answer; 0: closed without one."""
    with socket.create_connection(world.address[:2], timeout=30) as client:
        try:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
            said = client.recv(1 << 16)
        except OSError:
            return 0
    found = re.match(rb"HTTP/1.1 (\d+)", said)
    assert found or not said, said
    assert said.count(b"HTTP/1.1 ") <= 1, "two answers to one request"
    return int(found[1]) if found else 0


BAD_IDS: Sequence[Any] = (
    [-1], [56], [2**31], [2**63], [2**64], [1.0], [1.5], [True], [[1, "a"]], [[1], [[2]]], [None], ["a", 1], {"a": 1},
    [[]], [1, -1], [[1], [56]], [1e400], [], None, 5,
)  # fmt: skip


@row("18", "token ids that are none; contexts of C-1, C, C+1 tokens", "400, or the right answer")
def tokens(world: World) -> str:
    world.begin(4)
    for prompt in BAD_IDS:
        text = json.dumps({"prompt": prompt, "max_tokens": 2}).replace("Infinity", "1e400")
        answer = world.http.post(COMPLETIONS, content=text, headers=JSON)
        assert answer.status_code == 400 and "message" in answer.json()["error"], (prompt, answer.status_code)
    context, found = 128, []
    for length in (context - 1, context, context + 1):
        prompt = [1, *(world.dice.randrange(4, 30) for _ in range(length - 1))]
        for extra in range(3):
            body = {"prompt": prompt, "max_tokens": extra, "temperature": 0.0}
            answer = world.http.post(COMPLETIONS, json={**body, "return_token_ids": True, "ignore_eos": True})
            fits = extra >= 1 and len(prompt) + extra <= context
            assert answer.status_code == (200 if fits else 400) or extra == 0, (length, extra, answer.text)
            if fits:
                assert answer.json()["choices"][0]["token_ids"] == foretold(body), (length, extra)
            found.append(answer.status_code)
    told = world.end()
    world.audit()
    return f"{len(BAD_IDS)} bad prompts; {found}; {counts(told)}"


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
LONG = {
    "a": "a", "spaces": " ", "newlines": "\n", "families": FAMILY, "digits": "0123456789", "special": "<|im_start|>",
    "words": "the quick brown fox ", "mixed": "aA1!\u00e9\u4e2d ",
}  # fmt: skip


@row(
    "19", "prompts of 10^6 and of 64,000 characters, of eight kinds", "answered or 400 within 2 s", "--offline",
    model="smollm2-135m-instruct", vocab=49152, max_seq_len=8192,
)  # fmt: skip
def long_prompts(world: World) -> str:
    load = world.begin(6)
    time.sleep(1.0)
    begun = time.monotonic()
    worst, slope = 0.0, 0.0
    for name, text in LONG.items():
        taken = {}
        for size in (6_400, 64_000, 1_000_000):
            prompt = (text * (size // len(text) + 1))[:size]
            sent = time.monotonic()
            answer = world.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
            worst = max(worst, time.monotonic() - sent)
            assert answer.status_code in (200, 400), (name, size, answer.status_code)
            sent = time.monotonic()
            world.http.post("/tokenize", json={"prompt": prompt})
            taken[size] = time.monotonic() - sent
        slope = max(slope, taken[64_000] / max(taken[6_400], 0.01))
    assert worst < 2.0 * world.slow, f"{worst:.2f} s"
    took = time.monotonic() - begun
    told = world.end()
    world.audit()
    gaps = f"{_p99(_gaps(load, begun - 1.0, begun)):.0f} and {_p99(_gaps(load, begun, begun + took)):.0f} ms"
    said = f"{worst:.2f} s at most, ten times the text in {slope:.1f} times the time, at most"
    return f"{said}; p99 of gaps before and during: {gaps}; {counts(told)}"


@row("23", "2,000 mutations of a GGUF and of a safetensors file", "read or refused by name within 1 s", bare=True)
def hostile_files(bare: Bare) -> str:
    refused, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.bin"
        for index in range(2_000):
            reader, content = ((GgufFile, SMALL_GGUF), (SafetensorsFile, SMALL_SAFETENSORS))[index % 2]
            path.write_bytes(mutated(content, _edits(bare.dice), bare.dice.uniform(0, 2)))
            begun = time.monotonic()
            try:
                read_everything(reader, path)
            except InvalidInput:
                refused += 1
            slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 1.0
    return f"{refused} refused; {1000 * slowest:.1f} ms at most"


def _edits(dice: random.Random) -> list[tuple[float, bytes]]:
    patches = [struct.pack("<Q", dice.choice(HUGE)), dice.randbytes(dice.randrange(1, 10))]
    return [(dice.random(), dice.choice(patches)) for _ in range(dice.randrange(1, 4))]
