"""The masks of live outputs: shared by who looks ahead (`Forcing`) and who draws (`Constraints`), so made once."""

from __future__ import annotations

from collections.abc import Collection

from octavo.core.draft import BranchKey
from octavo.core.grammar import Grammar
from octavo.decoding.grammar import GrammarCompiler, Matcher, OutputMasks

__all__ = ["Followed"]


class Followed:
    """By request and choice. One thread at a time uses the masks of an output."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._masks: dict[BranchKey, OutputMasks] = {}

    def masks(self, key: BranchKey, grammar: Grammar, end_ids: Collection[int]) -> OutputMasks:
        """Those of one output."""

        def start(apart: bool) -> Matcher:
            return self._grammars.apart(grammar) if apart else self._grammars.matcher(grammar)

        found = self._masks.get(key)
        if found is None:
            found = self._masks[key] = OutputMasks(start, end_ids)
        return found

    def forget(self, request_id: str) -> None:
        """A request has ended, or a new one has its name."""
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] != request_id}
