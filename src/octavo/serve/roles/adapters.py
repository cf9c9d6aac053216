"""Adapters that front ends want loaded or unloaded while the engine runs: read in a thread, served between steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.core.errors import InvalidInput, shorten
from octavo.engine.adapters import ReadAdapter
from octavo.engine.core import EngineCore
from octavo.serve.links.messages import AdapterDone, Adapters, FromEngine, LoadAdapter, UnloadAdapter

__all__ = ["AdapterLoader"]

_MAX_TEXT = 4000
_Reading = tuple[int, LoadAdapter, "Future[ReadAdapter]"]


class AdapterLoader:
    """All of it is for the thread that runs the steps; folders are read in another one, one after the other."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._thread = ThreadPoolExecutor(1, "octavo-adapter")
        self._reading: list[_Reading] = []
        self._answers: list[tuple[int, FromEngine]] = []
        self._changed = False

    @property
    def pending(self) -> bool:
        """True while a folder is being read."""
        return bool(self._reading)

    def ask(self, sender: int, message: LoadAdapter | UnloadAdapter) -> None:
        """Take an order in. What another engine has served is read at once: requests that follow may need it."""
        try:
            if isinstance(message, UnloadAdapter):
                self._core.unload_adapter(message.name)
                self._done(sender, message.number)
            elif message.digest:
                self._bring_back(message)
            else:
                table = self._core.served_adapters
                self._reading.append((sender, message, self._thread.submit(table.read, message.path)))
        except InvalidInput as error:
            self._failed(sender, message.number, error)

    def told(self) -> Adapters:
        """The adapters that are served now."""
        table = self._core.adapters
        served = () if table is None else table.served
        return Adapters(tuple((each.name, each.path, each.digest, each.rank) for each in served))

    def answers(self, peers: Sequence[int]) -> list[tuple[int, FromEngine]]:
        """What there is to tell: first the adapters, to all, where they have changed; then whoever asked."""
        while self._reading and self._reading[0][2].done():
            self._take(*self._reading.pop(0))
        told: list[tuple[int, FromEngine]] = [(epoch, self.told()) for epoch in peers if self._changed]
        told += self._answers
        self._answers, self._changed = [], False
        return told

    def _take(self, sender: int, message: LoadAdapter, reading: Future[ReadAdapter]) -> None:
        try:
            self._core.load_adapter(message.name, message.path, reading.result())
            self._done(sender, message.number)
        except InvalidInput as error:
            self._failed(sender, message.number, error)
        except (OSError, MemoryError, ValueError) as error:
            remedy = f"the folder cannot be read: {type(error).__name__}"
            self._failed(sender, message.number, InvalidInput("lora_path", message.path, remedy))

    def _bring_back(self, message: LoadAdapter) -> None:
        """Serve it again, unless it holds something else now: then those who need what it held are refused."""
        table = self._core.served_adapters
        known = {each.name: each.digest for each in table.served}
        if known.get(message.name) == message.digest:
            return
        read = table.read(message.path)
        if read.digest == message.digest:
            self._core.load_adapter(message.name, message.path, read)
            self._changed = True

    def _done(self, sender: int, number: int) -> None:
        self._changed = True
        self._answers.append((sender, AdapterDone(number)))

    def _failed(self, sender: int, number: int, error: InvalidInput) -> None:
        value = shorten(error.value)[:_MAX_TEXT]
        self._answers.append((sender, AdapterDone(number, error.field[:_MAX_TEXT], value, error.remedy[:_MAX_TEXT])))
