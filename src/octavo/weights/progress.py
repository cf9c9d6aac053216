"""How the store tells a person what it is doing: a bar on a terminal, a few lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

__all__ = ["ConsoleReporter", "QuietReporter", "Reporter", "Update"]

Update = Callable[[int], None]  # bytes done so far

_MB = 1_000_000
_LINE_EVERY_S = 5.0


class Reporter(Protocol):
    """What the store says. `progress` yields a function to be called with the bytes done so far."""

    def message(self, text: str) -> None:
        """One line."""
        ...

    def progress(self, label: str, total: int) -> Any:
        """A context manager around one transfer of `total` bytes; it yields an `Update`."""
        ...


class QuietReporter:
    """Says nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Update]:
        """Nothing."""
        yield lambda done: None


class ConsoleReporter:
    """To `stream` (standard error by default)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stderr

    def message(self, text: str) -> None:
        """One line."""
        print(text, file=self._out, flush=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Update]:
        """A bar where the stream is a terminal, a line every few seconds otherwise."""
        bar = _bar(self._out) if self._out.isatty() else None
        if bar is None:
            yield self._lines(label, total)
            return
        with bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)

    def _lines(self, label: str, total: int) -> Update:
        last = time.monotonic()
        self.message(f"{label}: {total / _MB:.0f} MB")

        def update(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_EVERY_S:
                last = time.monotonic()
                self.message(f"{label}: {done / _MB:.0f} of {total / _MB:.0f} MB")

        return update


def _bar(stream: TextIO) -> Any:
    """A rich progress bar, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=stream))
