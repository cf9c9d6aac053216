"""Who may be inside at once. What is too much is refused early, with a time to come back (`octavo.core.admission`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.core.admission import Ask, Door, Guest, Limits, Refusal, held_bytes
from octavo.core.forecast import Pace
from octavo.core.params import SamplingParams
from octavo.serve.errors import refused
from octavo.serve.port import EnginePort
from octavo.serve.prompts import Prompt

__all__ = ["Admission", "Visit", "ask_of", "tenant_of"]


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
    return Ask(tenant, params.n * min(window, len(lengths)), params.n * sum(lengths), held, within_s)


class Visit:
    """A request inside: what is told of its first token."""

    def __init__(self, admission: Admission, guest: Guest) -> None:
        self._admission, self._guest = admission, guest

    @property
    def forecast(self) -> float:
        """Seconds to the first token, as foretold on arrival; 0 if that was not known."""
        return 0.0 if self._guest.forecast is None else self._guest.forecast.seconds

    def first_token(self) -> None:
        """The first token leaves. Idempotent."""
        self._admission.first_token(self._guest, self.forecast)


class Admission:
    """Lets requests in or refuses them. Used from the event loop only.

    ``saw`` gets each forecast with the time that it really was.
    """

    def __init__(self, limits: Limits, engine: EnginePort, saw: Callable[[float, float], None]) -> None:
        self.door = Door(limits)
        self._engine, self._saw = engine, saw

    def check(self, ask: Ask) -> None:
        """Refuse, before any work is done, what would not get in. Raises ``ApiError`` 429."""
        refusal = self.refusal(ask)
        if refusal is not None:
            raise refused(refusal)

    def refusal(self, ask: Ask) -> Refusal | None:
        """Why a request would be refused now."""
        return self.door.refusal(ask, self._pace())

    @contextmanager
    def enter(self, ask: Ask) -> Iterator[Visit]:
        """Be inside while the block runs. Raises ``ApiError`` 429."""
        guest = self.door.enter(ask, self._pace(), time.monotonic())
        if isinstance(guest, Refusal):
            raise refused(guest)
        try:
            yield Visit(self, guest)
        finally:
            self.door.leave(guest, self._pace().steps)

    @contextmanager
    def aside(self, ask: Ask) -> Iterator[Visit]:
        """The same for a bulk request, which is in nobody's way: only memory is counted. Raises ``ApiError`` 429."""
        guest = self.door.enter(Ask(ask.tenant, 0, held_bytes=ask.held_bytes), self._pace(), time.monotonic())
        if isinstance(guest, Refusal):
            raise refused(guest)
        try:
            yield Visit(self, Guest(ask, 0.0, first_token=0.0))
        finally:
            self.door.leave(guest, self._pace().steps)

    def first_token(self, guest: Guest, told: float) -> None:
        """A guest's first token leaves; ``told`` is when it was to."""
        waited = self.door.first_token(guest, self._pace().steps, time.monotonic())
        if waited is not None and told:
            self._saw(told, waited)

    def _pace(self) -> Pace:
        stats = self._engine.stats()
        return Pace(
            int(stats.get("max_running", 0)),
            stats.get("prefill_tokens_per_s", 0.0),
            int(stats.get("steps", 0)),
            stats.get("mean_step_seconds", 0.0),
        )
