"""Grammars are tried out at the door, in a process of their own, before anything is queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.checker import GrammarChecker
from octavo.serve.grammars import refusal
from octavo.serve.port import TextModel

__all__ = ["GrammarDoor"]


class GrammarDoor:
    """One grammar at a time, in a thread that waits for the process; both begin with the first grammar."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._checker: GrammarChecker | None = None
        self._thread = ThreadPoolExecutor(1, "octavo-grammar")

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ``ApiError`` 400 that blames ``param`` for a grammar that cannot be used."""
        if self._checker is None:
            self._checker = GrammarChecker(sorted(self._model.tokenizer.traits.special))
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._checker.check, grammar)
        except InvalidInput as error:
            raise refusal(param, error) from error

    def close(self) -> None:
        """Nothing more will be asked."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.kill()
