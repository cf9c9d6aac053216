"""Calls from a thread into event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine.mailbox import Mailbox
from octavo.engine.output import OutputDelta

__all__ = ["put_all", "run_all", "set_done", "set_error", "tell"]


def run_all(calls: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    """Make calls until there is None."""
    while (call := calls.get()) is not None:
        call()


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *values: object) -> bool:
    """Call ``callback`` in ``loop``; False if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *values)
    except RuntimeError:
        return False
    return True


def put_all(post: Sequence[tuple[Mailbox, OutputDelta]]) -> None:
    """In the event loop: give each mailbox its delta."""
    for mailbox, delta in post:
        mailbox.put(delta)


def set_done(future: asyncio.Future[Any], value: Any = None) -> None:
    """In the event loop: resolve what somebody may have stopped waiting for."""
    if not future.done():
        future.set_result(value)


def set_error(future: asyncio.Future[None], error: Exception) -> None:
    """In the event loop: the same with an error."""
    if not future.done():
        future.set_exception(error)
