"""Requests whose grammar is being compiled: the engine's process takes them in when that is done."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.serve.links.messages import ApiHello, Cancel, Submit, ToEngine

__all__ = ["HeldSubmits"]


@dataclass(frozen=True)
class _Held:
    frames: Sequence[bytes]
    compiling: Future[None]
    request_id: str
    since: float  # seconds


class HeldSubmits:
    """Messages by (sender, row), each with what compiles its grammar. Truthy while there are any.

    ``since``: when those that `ready` gave last had come, by request.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._thread = ThreadPoolExecutor(1, "octavo-grammar")
        self._held: dict[tuple[int, int], _Held] = {}
        self.since: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def takes(self, sender: int, message: ToEngine, frames: Sequence[bytes], now: float) -> bool:
        """Hold a request back whose grammar is not known yet; drop one that is cancelled. True: that was all."""
        if isinstance(message, ApiHello):
            self.gone(sender)
        if isinstance(message, Cancel):
            return self._held.pop((sender, message.row), None) is not None
        if not isinstance(message, Submit) or not self._is_new(message.params):
            return False
        if (sender, message.row) not in self._held:
            compiling = self._thread.submit(self._compile, message.params)
            self._held[sender, message.row] = _Held(frames, compiling, message.request_id, now)
        return True

    def gone(self, sender: int) -> None:
        """Nobody waits for what this front end asked for."""
        self._held = {key: held for key, held in self._held.items() if key[0] != sender}

    def ready(self) -> list[Sequence[bytes]]:
        """The messages whose grammars are compiled, or refused; each once."""
        if not self._held:
            return []
        done = [self._held.pop(key) for key in [key for key, held in self._held.items() if held.compiling.done()]]
        self.since = {held.request_id: held.since for held in done}
        return [held.frames for held in done]

    def _is_new(self, params: SamplingParams) -> bool:
        grammars = self._core.grammars
        return params.grammar is not None and grammars is not None and not grammars.knows(params.grammar)

    def _compile(self, params: SamplingParams) -> None:
        with suppress(InvalidInput):  # told when it is submitted
            self._core.compile(params)
