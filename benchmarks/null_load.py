"""Short requests to a server of the null model, over raw HTTP/1.1, with every token of every answer checked.

Each wire is one kept connection with one request at a time. A request is whole or streamed, at temperature 0 or with a
seed, begins with one of a few prefixes, and may be left at a random moment: after half of its body, at once, at the
first bytes of the answer, or some milliseconds later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from octavo.backends.null_backend import null_tokens
from octavo.engine.fixture import load_fixture

__all__ = ["Asked", "Counts", "Load", "Questions", "Wire"]

FIXTURE = str(Path(__file__).resolve().parents[1] / "fixtures" / "tiny_model.json")
PREFIXES = 64
_LEAVINGS = ("half", "at once", "first bytes", "later")


class Broken(Exception):
    """The connection ended before the answer did."""


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True)
class Asked:
    """A request as bytes, what must come back, and when it is left ("": not at all)."""

    head: bytes
    body: bytes
    text: str
    tokens: int
    leave: str
    delay: float


class Questions:
    """Requests out of a seed."""

    def __init__(self, host: str, seed: int, cancels: float) -> None:
        fixture = load_fixture(FIXTURE)
        self._tokenizer, self._eos = fixture.tokenizer, tuple(fixture.config[k] for k in ("eos_token_id",))
        self._vocab = int(fixture.config["vocab_size"])
        self._special = set(fixture.tokenizer.special_tokens.values())
        self._dice, self._cancels, self._host = random.Random(seed), cancels, host
        letters = "abcdefghijklmnopqrstuvwxyz 0123456789"
        self._letters = letters
        self._prefixes = ["".join(self._dice.choices(letters, k=self._dice.randrange(8, 48))) for _ in range(PREFIXES)]

    def next(self) -> Asked:
        """One more."""
        dice = self._dice
        prompt = dice.choice(self._prefixes) + "".join(dice.choices(self._letters, k=dice.randrange(1, 8)))
        count, seed = dice.randrange(2, 9), dice.getrandbits(63) if dice.random() < 0.25 else None
        ids = self._tokenizer.encode(prompt)
        found = list(islice(null_tokens(ids, self._vocab, self._eos, seed), count))
        asked: dict[str, Any] = {"model": "tiny-llama", "prompt": prompt, "max_tokens": count}
        asked |= {"temperature": 0} if seed is None else {"seed": seed}
        if dice.random() < 0.5:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(asked)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        text = self._tokenizer.decode([token for token in found if token not in self._special])
        leave = dice.choice(_LEAVINGS) if dice.random() < self._cancels else ""
        return Asked(head.encode(), body, text, count, leave, dice.uniform(0.0, 0.02))


class Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._data = bytearray()
        self._waiting: asyncio.Future[bytes] | None = None
        self._end = -1  # of the answer; -1: not known yet, 0: chunks
        self.began = 0.0  # when the question was sent that is not answered yet
        self._leave_at_first = False

    @classmethod
    async def to(cls, host: str, port: int) -> Wire:
        """Connect. Raises OSError."""
        _, wire = await asyncio.get_running_loop().create_connection(cls, host, port)
        return wire

    @property
    def is_open(self) -> bool:
        """Whether something can be asked."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        """It stands."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(str(error)))

    def data_received(self, data: bytes) -> None:
        """A piece of an answer."""
        self._data += data
        if self._leave_at_first:
            self.leave()
            return
        if self._end < 0:
            head = self._data.find(b"\r\n\r\n")
            if head < 0:
                return
            at = self._data.find(b"content-length: ", 0, head)
            self._end = 0 if at < 0 else head + 4 + int(self._data[at + 16 : self._data.find(b"\r\n", at)])
        done = len(self._data) >= self._end if self._end else self._data.endswith(b"0\r\n\r\n")
        if done and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(bytes(self._data))

    def leave(self) -> None:
        """End it from this side."""
        self._transport.abort()

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self._transport.write(data)

    async def ask(self, data: bytes, leave: str = "", delay: float = 0.0) -> bytes:
        """The whole answer, its head too. Raises Broken, also where it was left."""
        self._data.clear()
        self._end, self._leave_at_first = -1, leave == "first bytes"
        self._waiting, self.began = self._loop.create_future(), time.monotonic()
        self._transport.write(data)
        if leave in ("half", "at once"):
            self.leave()
        elif leave == "later":
            self._loop.call_later(delay, self.leave)
        try:
            return await self._waiting
        finally:
            self.began = 0.0


@dataclass
class Counts:
    """What came of the requests."""

    answered: int = 0
    left: int = 0
    cut: int = 0  # by the death of a front end
    refused: int = 0  # with 503, while there was no engine
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from question to answer
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """That reached the server, refusals aside."""
        return self.answered + self.left + self.cut


class Load:
    """So many wires with a request each, until `enough`. ``excuses(what)``: may this happen now: "cut", "503"?"""

    def __init__(self, address: tuple[str, int], questions: Questions, excuses: Callable[[str], bool]) -> None:
        self.address, self.questions, self.excuses = address, questions, excuses
        self.counts = Counts()
        self.wires: list[Wire | None] = []

    async def run(self, wires: int, enough: Callable[[Counts], bool]) -> None:
        """All of it."""
        self.wires = [None] * wires
        await asyncio.gather(*(self._go_on(place, enough) for place in range(wires)))

    async def _go_on(self, place: int, enough: Callable[[Counts], bool]) -> None:
        while not enough(self.counts):
            wire = self.wires[place]
            if wire is None or not wire.is_open:
                try:
                    wire = self.wires[place] = await Wire.to(*self.address)
                except OSError as error:
                    self._wrong(f"no connection: {error}")
                    await asyncio.sleep(0.1)
                    continue
            await self._one(wire, self.questions.next())

    async def _one(self, wire: Wire, asked: Asked) -> None:
        body = asked.body[: len(asked.body) // 2] if asked.leave == "half" else asked.body
        begun = time.monotonic()
        try:
            answer = await wire.ask(asked.head + body, asked.leave, asked.delay)
        except Broken as error:
            if asked.leave:
                self.counts.left += 1
            elif self.excuses("cut"):
                self.counts.cut += 1
                await asyncio.sleep(0.02)
            else:
                self._wrong(f"cut: {error}")
            return
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - begun)
        status = int(answer[9:12])
        self.counts.statuses[status] += 1
        if status == 503 and self.excuses("503"):
            self.counts.refused += 1
            await asyncio.sleep(0.05)
        elif status != 200:
            self._wrong(f"{status}: {answer[-300:]!r}")
        else:
            self._check(answer, asked)
        if asked.leave == "later":  # it came too early to be left
            wire.leave()

    def _check(self, answer: bytes, asked: Asked) -> None:
        body = answer[answer.index(b"\r\n\r\n") + 4 :]
        pieces = [body] if body[:1] == b"{" else [p.split(b"\n")[0] for p in body.split(b"data: ")[1:]]
        if len(pieces) > 1 and pieces.pop() != b"[DONE]":
            self._wrong(f"no end: {body[-100:]!r}")
        try:
            parts = [_decode(piece) for piece in pieces]
        except msgspec.DecodeError:
            self._wrong(f"no answer: {body[-300:]!r}")
            return
        text = "".join(choice.text for part in parts for choice in part.choices)
        ends = [choice.finish_reason for part in parts for choice in part.choices if choice.finish_reason]
        usage = parts[-1].usage
        if text != asked.text or ends != ["length"] or usage is None or usage.completion_tokens != asked.tokens:
            self._wrong(f"{asked.body!r}: {text!r}, {ends}, {usage}; wanted {asked.text!r}, {asked.tokens}")
        self.counts.answered += 1
        self.counts.tokens += asked.tokens

    def _wrong(self, what: str) -> None:
        if len(self.counts.wrong) < 50:
            self.counts.wrong.append(what)
