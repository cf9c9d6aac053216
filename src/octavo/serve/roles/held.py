"""Requests whose grammar is being compiled, or has no room yet: the engine's process takes them in after that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from octavo.core.params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.serve.links.messages import ApiHello, Cancel, Submit, ToEngine

__all__ = ["HeldSubmits"]


@dataclass(frozen=True)
class _Held:
    frames: Sequence[bytes]
    params: SamplingParams
    compiling: Future[None]
    request_id: str
    since: float  # seconds


class HeldSubmits:
    """Messages by (sender, row), each with what compiles its grammar. Truthy while there are any.

    ``since``: when the one that `ready` gave last had come, by request.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._thread = ThreadPoolExecutor(1, "octavo-grammar")
        self._held: dict[tuple[int, int], _Held] = {}
        self._is_ready = False
        self.since: dict[str, float] = {}

    def get_ready(self) -> None:
        """Do what the first grammar would have to wait for, and others with it."""
        if not self._is_ready and self._core.grammars is not None:
            self._thread.submit(self._core.grammars.open)  # what is wrong with it is told to who sends a grammar
        self._is_ready = True

    def __bool__(self) -> bool:
        return bool(self._held)

    def takes(self, sender: int, message: ToEngine, frames: Sequence[bytes], now: float) -> bool:
        """Hold a request back whose grammar cannot be followed yet; drop one that is cancelled. True: that was all."""
        if isinstance(message, ApiHello):
            self.gone(sender)
        if isinstance(message, Cancel):
            return self._held.pop((sender, message.row), None) is not None
        if not isinstance(message, Submit) or self._core.is_ready_for(message.params):
            return False
        if (sender, message.row) not in self._held:
            compiling = self._thread.submit(self._compile, message.params)
            self._held[sender, message.row] = _Held(frames, message.params, compiling, message.request_id, now)
        return True

    def gone(self, sender: int) -> None:
        """Nobody waits for what this front end asked for."""
        self._held = {key: held for key, held in self._held.items() if key[0] != sender}

    def ready(self) -> Iterator[Sequence[bytes]]:
        """The messages whose grammars are compiled, and have room, or are refused; each once.

        Each is to be taken in before the next one is asked for: it may take the last room.
        """
        done = [(key, held) for key, held in self._held.items() if held.compiling.done()]
        for key, held in done:
            if held.compiling.exception() or self._core.is_ready_for(held.params):
                del self._held[key]
                self.since = {held.request_id: held.since}
                yield held.frames
            elif not self._core.knows(held.params):  # others came between
                self._held[key] = replace(held, compiling=self._thread.submit(self._compile, held.params))

    def _compile(self, params: SamplingParams) -> None:
        self._core.compile(params)  # a refusal is told when it is submitted
