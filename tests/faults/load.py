"""Steady load: clients that stream one request after the other, and know every token that must come back.

The server runs the null model, so whatever is lost, doubled or somebody else's is a wrong token (`null_tokens`).
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.backends.null_backend import null_tokens

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json"
VOCAB, EOS = 56, (2,)  # of fixtures/tiny_model.json, and of smollm2 but for the vocabulary
SPELLED = json.loads(TINY.read_text())["tokenizer"]["vocab"]
SPELLED[:4] = [""] * 4  # special ones
LETTERS = range(4, 30)  # token ids that are letters
Case = tuple[dict[str, Any], Sequence[int]]  # a request, and the tokens that must come back
Address = tuple[str, int, int]  # host, port, and how many tokens its model knows
FLAGS = {"ignore_eos": True, "stream": True, "return_token_ids": True}


@dataclass
class Told:
    """What became of one request."""

    sent: float
    how: str = "broken"  # right, wrong, refused, error, broken
    detail: str = ""
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of its events


def body_of(dice: random.Random, **more: Any) -> dict[str, Any]:
    """A request with a prompt of token ids, some of whose beginnings are shared."""
    shared = [LETTERS[dice.randrange(3)]] * 20
    own = [dice.choice(LETTERS) for _ in range(dice.randrange(1, 24))]
    prompt = [1, *shared, *own] if dice.random() < 0.5 else [1, *own]
    drawn = {"temperature": 0.0} if dice.random() < 0.5 else {"temperature": 1.0, "seed": dice.randrange(1 << 30)}
    return {"prompt": prompt, "max_tokens": dice.randrange(20, 70), **drawn, **FLAGS, **more}


def foretold(body: dict[str, Any], vocab: int = VOCAB) -> list[int]:
    """The tokens of a request."""
    seed = None if body.get("temperature") == 0.0 else body["seed"]
    return list(islice(null_tokens(body["prompt"], vocab, EOS, seed), body["max_tokens"]))


def head_of(path: str, body: bytes, host: str = "localhost", method: str = "POST") -> bytes:
    """A request's head."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close", "", ""]).encode()


def case_of(address: Address, dice: random.Random, cases: Sequence[Case], **more: Any) -> Case:
    """One of the cases, if there are any; else a request that the null model answers."""
    if cases:
        return dice.choice(cases)
    body = body_of(dice, **more)
    return body, foretold(body, address[2])


async def ask(address: Address, body: dict[str, Any], limit: float = 400.0, right: Sequence[int] | None = None) -> Told:
    """One stream, held against what is right: by default, what the null model answers."""
    right = foretold(body, address[2]) if right is None else right
    told = Told(time.monotonic())
    try:
        await asyncio.wait_for(_ask(address, body, told, list(right)), limit)
    except asyncio.TimeoutError:
        told.how, told.detail = "wrong", f"no end after {limit:g} s"
    except OSError as error:
        told.detail = str(error)
    told.ended = time.monotonic()
    return told


async def _ask(address: Address, body: dict[str, Any], told: Told, right: list[int]) -> None:
    reader, writer = await asyncio.open_connection(*address[:2])
    try:
        data = json.dumps(body).encode()
        writer.write(head_of("/v1/completions", data) + data)
        status = (await reader.readline()).split()
        if not status:
            return
        if status[1] != b"200":
            told.how, told.detail = "refused", f"{status[1].decode()} {(await reader.read()).decode()[-200:]}"
            return
        await _read(reader, right, told, address[2])
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, right: list[int], told: Told, vocab: int) -> None:
    tokens: list[int] = []
    text, reason = "", None
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                told.how, told.detail = "error", event["error"]["message"]
                return
            told.arrivals.append(time.monotonic())
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
                text += choice["text"]
                reason = choice["finish_reason"] or reason
        elif line.startswith(b"data: [DONE]"):
            spelled = "".join(SPELLED[token] for token in right) if vocab == VOCAB else text
            told.how = "right" if (tokens, text, reason) == (right, spelled, "length") else "wrong"
            told.detail = "" if told.how == "right" else f"{reason}: {tokens} {text!r} instead of {right}"
            return


class Load:
    """Clients in a thread of their own, until they are told to stop; what became of each request is kept."""

    def __init__(
        self, address: Address, clients: int, seed: int, pause: float = 0.02, cases: Sequence[Case] = ()
    ) -> None:
        self.address, self.clients, self.pause, self.cases = address, clients, pause, cases
        self.told: list[Told] = []
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.clients)))

    async def _client(self) -> None:
        while not self._over.is_set():
            body, right = case_of(self.address, self._dice, self.cases)
            told = await ask(self.address, body, right=right)
            self.told.append(told)
            await asyncio.sleep(self.pause * self._dice.random() + 0.1 * (told.how != "right"))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> list[Told]:
        """Wait for the streams that are open, and say what became of all."""
        self._over.set()
        self._thread.join(500)
        assert not self._thread.is_alive(), "a client never ended"
        return self.told

    def right_since(self, when: float) -> bool:
        """Whether a request that was sent after this was answered."""
        return any(told.how == "right" and told.sent > when for told in self.told)


def counts(told: Sequence[Told]) -> str:
    """How many of each."""
    return ", ".join(f"{number} {how}" for how, number in sorted(Counter(each.how for each in told).items()))


def check(told: Sequence[Told], *allowed: str) -> None:
    """All are right, or one of what is allowed."""
    bad = [each for each in told if each.how not in ("right", *allowed)]
    assert not bad, f"{len(bad)} of {len(told)}: {bad[0].how} {bad[0].detail}"
    assert any(each.how == "right" for each in told), "no request was answered"
