"""Jump-forward: tokens that a grammar forces are computed together with the token before them, as drafts.

{"name": "Bob", "age": 2        when `Bob` has ended, all of `, "age": ` must follow: it goes into one step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.draft import BranchKey
from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.request import Branch, Request
from octavo.core.speculation import may_draft
from octavo.decoding.grammar import GrammarCompiler, GrammarFault, Matcher

__all__ = ["Forcing"]

_MOST = 32  # forced tokens of one branch in one step


class Forcing:
    """For one scheduler: the forced tokens of all that follow a grammar; what they follow is kept until they end.

    They are drafts (`core/speculation.py`), so what is drawn is the same without them: a row whose mask leaves one
    token draws that token.
    """

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._matchers: dict[BranchKey, Matcher] = {}
        self._asked: dict[str, Grammar | None] = {}  # by request that follows a grammar: what is held for it
        self.num_asked = 0  # requests that followed a grammar, so far
        self.num_forced = 0  # tokens that were asked for with the one before them

    @property
    def is_needed(self) -> bool:
        """True while somebody who runs follows a grammar: then the next step waits for this one's tokens."""
        return bool(self._matchers)

    def open(self, request: Request) -> None:
        """A request has come."""
        grammar = request.params.grammar
        if grammar is not None:
            self._asked[request.request_id] = grammar if self._grammars.hold(grammar) else None
            self.num_asked += 1

    def forget(self, get: Callable[[str], Request | None]) -> None:
        """Let go of what is held for those who have ended. ``get``: a request, if it lives."""
        for name in [name for name in self._asked if get(name) is None]:
            grammar = self._asked.pop(name)
            if grammar is not None:
                self._grammars.release(grammar)

    def drafts(
        self, running: Callable[[], Sequence[Branch]], get: Callable[[str], Request | None]
    ) -> dict[BranchKey, Sequence[int]]:
        """The tokens that those who run must draw next, one after the other. ``get``: a request, if it lives."""
        if not self._asked:
            return {}
        self.forget(get)
        return self._drafts(running())

    def _drafts(self, running: Sequence[Branch]) -> dict[BranchKey, Sequence[int]]:
        bound = [branch for branch in running if branch.params.grammar is not None]
        self._matchers = {branch.key: self._matchers[branch.key] for branch in bound if branch.key in self._matchers}
        able = ((branch, self._forced(branch)) for branch in bound if may_draft(branch))
        found = {branch.key: forced for branch, forced in able if forced}
        self.num_forced += sum(map(len, found.values()))
        return found

    def _forced(self, branch: Branch) -> Sequence[int]:
        """Nothing, where the grammar cannot be followed: the step will tell."""
        grammar = branch.params.grammar
        if grammar is None:
            return ()
        try:
            matcher = self._matchers.get(branch.key)
            if matcher is None:
                matcher = self._matchers[branch.key] = self._grammars.matcher(grammar)
            matcher.accept(branch.token_ids[branch.num_prompt_tokens + matcher.length :])
            return [token for token in matcher.forced(_MOST) if token not in branch.end_ids]
        except (GrammarFault, InvalidInput):
            return ()
