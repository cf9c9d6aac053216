"""Who may be inside at once. What is too much is refused early, with a time to come back (`octavo.core.admission`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from octavo.core.admission import Ask, Limits, held_bytes
from octavo.core.forecast import Pace
from octavo.core.params import SamplingParams
from octavo.serve.generate import Job
from octavo.serve.keys import Key
from octavo.serve.port import EnginePort
from octavo.serve.prompts import Prompt
from octavo.serve.register import Arrive, Asked, Enter, FirstToken, Leave, Register

__all__ = ["Gate", "OwnGate", "Stay", "ask_of", "pace_of", "tenant_of"]


def tenant_of(authorization: str) -> str:
    """A name for whoever sends this header: the same for each API key, and never the key."""
    if not authorization:
        return ""
    return "key-" + hashlib.blake2b(authorization.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def ask_of(
    tenant: str, prompts: Sequence[Prompt], params: SamplingParams, engine: EnginePort, within_s: float, window: int
) -> Ask:
    """What a request takes: choices, long prompts and logprobs at their price. ``within_s`` as in `Ask`; ``window``:
    prompts that the engine is given at once."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    held = sum(held_bytes(length, params, max(0, engine.max_seq_len - length)) for length in lengths)
    width = params.num_branches
    return Ask(tenant, width * min(window, len(lengths)), width * sum(lengths), held, within_s)


def pace_of(engine: EnginePort) -> Pace:
    """How fast the engine goes."""
    stats = engine.stats()
    return Pace(
        int(stats.get("max_running", 0)),
        stats.get("prefill_tokens_per_s", 0.0),
        int(stats.get("steps", 0)),
        stats.get("mean_step_seconds", 0.0),
    )


class Gate(Protocol):
    """The way to the register."""

    async def ask(self, asked: Asked) -> Any:
        """The register's answer. Raises ``ApiError``."""

    def tell(self, told: Asked) -> None:
        """The same, without waiting for an answer. What is told comes in the order in which it was told and asked."""

    def orphaned(self, owner: str, request_id: str) -> None:
        """A request was cancelled when the front end that served it died."""


class OwnGate:
    """A register of this front end alone."""

    def __init__(self, limits: Limits) -> None:
        self.register = Register(limits)

    async def ask(self, asked: Asked) -> Any:
        """The register's answer. Raises ``ApiError``."""
        return self.register.answer(0, asked, time.monotonic())

    def tell(self, told: Asked) -> None:
        """The same, when nobody waits for an answer."""
        self.register.answer(0, told, time.monotonic())

    def orphaned(self, owner: str, request_id: str) -> None:
        """A request was cancelled when the front end that served it died."""
        self.register.ledger.orphaned(owner, request_id)


class Stay:
    """A request that has come, until it leaves. ``saw`` gets the forecast of its first token with the time it took.

    One in bulk is in nobody's way: only its memory and its tokens are counted.
    """

    def __init__(
        self, gate: Gate, number: int, engine: EnginePort, saw: Callable[[float, float], None], is_bulk: bool = False
    ) -> None:
        self._gate, self._number, self._engine, self._saw, self._is_bulk = gate, number, engine, saw, is_bulk
        self.name = ("", "")  # owner and id
        self.job: Job | None = None  # once the engine has been asked for something
        self.forecast = 0.0  # seconds to the first token, as foretold on arrival; 0 if that was not known
        self._since: float | None = None  # it waits for its first token

    async def arrive(self, owner: str, request_id: str, key: Key | None, ask: Ask | None) -> None:
        """Refuse, before any work is done, what would not get in. Raises ``ApiError``."""
        self.name = owner, request_id
        shown = None if key is None else msgspec.structs.replace(key, sha256="")
        ask, counts = (None, False) if self._is_bulk else (ask, True)
        await self._gate.ask(Arrive(self._number, owner, request_id, shown, ask, pace_of(self._engine), counts))

    async def enter(self, prompt_tokens: int, ask: Ask) -> None:
        """Be let in. Raises ``ApiError`` 429."""
        since = time.monotonic()
        if self._is_bulk:
            ask = Ask(ask.tenant, 0, held_bytes=ask.held_bytes)
        forecast = await self._gate.ask(Enter(self._number, prompt_tokens, ask, pace_of(self._engine)))
        if not self._is_bulk:
            self.forecast, self._since = forecast, since

    def first_token(self) -> None:
        """The first token leaves. Idempotent."""
        if self._since is not None:
            self._gate.tell(FirstToken(self._number, pace_of(self._engine).steps))
            if self.forecast:
                self._saw(self.forecast, time.monotonic() - self._since)
            self._since = None

    def leave(self) -> None:
        """It is over, or was refused."""
        job, steps = self.job, pace_of(self._engine).steps
        used = Leave(self._number, steps) if job is None else _end_of(self._number, steps, job)
        self._gate.tell(used)


def _end_of(number: int, steps: int, job: Job) -> Leave:
    return Leave(number, steps, job.usage().total_tokens, job.outcome)
