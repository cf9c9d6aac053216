"""Explanations beside the step loop: in a thread, one after the other, so that no step waits for one."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.core.timeline import Timeline
from octavo.engine.explained import explained
from octavo.serve.links.messages import MAX_EXPLANATION, Explain, Explained

__all__ = ["Explainer"]


class Explainer:
    """Answers `Explain`; all but the work itself happens in the engine's thread."""

    def __init__(self, timeline: Timeline) -> None:
        self.pending = 0  # questions without an answer
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, "octavo-explain")
        self._done: queue.SimpleQueue[tuple[int, Explained]] = queue.SimpleQueue()

    def ask(self, peer: int, question: Explain) -> None:
        """A question of a front end."""
        self.pending += 1
        self._thread.submit(self._answer, peer, question)

    def answers(self) -> list[tuple[int, Explained]]:
        """What has been found out, and for whom."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
            self.pending -= 1
        return found

    def _answer(self, peer: int, question: Explain) -> None:
        content = b"[]"
        try:
            told = msgspec.json.encode(explained(self._timeline, question.request_id, question.tenant))
            content = told if len(told) <= MAX_EXPLANATION else content
        finally:
            self._done.put((peer, Explained(question.number, content)))
