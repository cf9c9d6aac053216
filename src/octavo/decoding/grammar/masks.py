"""The masks of one output: before the token that is drawn next, and behind drafts of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from octavo.core.draft_tree import path_of
from octavo.decoding.grammar.matcher import GrammarFault, Matcher, allows

__all__ = ["OutputMasks"]


class OutputMasks:
    """``start`` gives a matcher at the beginning of an output; ``tokens`` is the caller's list, of which the first
    ``num_prompt_tokens`` are not followed: `agree` says what became of the rest.

    A matcher that has failed always fails, and limits may count what it met behind drafts. So a fault counts only
    where a matcher that has seen the output alone has it, too.
    """

    def __init__(
        self, start: Callable[[], Matcher], tokens: Sequence[int], num_prompt_tokens: int, end_ids: Collection[int]
    ) -> None:
        self._start, self._tokens, self._first, self._end_ids = start, tokens, num_prompt_tokens, end_ids
        self._matcher: Matcher | None = None
        self._agreed = 0  # output tokens that the matcher has accepted and that still stand

    def agree(self, length: int) -> None:
        """Of the output, only the first ``length`` tokens still stand."""
        self._agreed = min(self._agreed, length)

    def behind(self, length: int, drafts: Sequence[int] = (), parents: Sequence[int] = (-1,)) -> dict[int, bytes]:
        """The masks behind ``length`` output tokens (row 0) and behind ``drafts`` (rows 1, 2, ..., of a `DraftTree`).
        There is none behind a draft that the grammar does not allow, that ends the output, or behind which it cannot
        be followed, nor behind those that follow it.

        Raises ``GrammarFault`` or ``InvalidInput`` if the grammar cannot be followed behind the output itself.
        """
        matcher, mask = self._at(length)
        found, at = {0: mask}, [0]  # masks; the rows along which the matcher stands
        try:
            for row, (draft, parent) in enumerate(zip(drafts, parents[1:], strict=True), 1):
                if parent not in found or draft in self._end_ids or not allows(found[parent], draft):
                    continue
                path = path_of(parents, row)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(at, path, strict=False)))
                matcher.rollback(len(at) - common)
                matcher.accept([drafts[i - 1] for i in path[common:]])
                found[row], at = matcher.mask(), path
            matcher.rollback(matcher.length - length)
        except GrammarFault:  # nobody has drawn that draft yet; a matcher that is spoilt now is replaced in `_at`
            pass
        return found

    def _at(self, length: int) -> tuple[Matcher, bytes]:
        if self._matcher is not None:
            try:
                return self._matcher, self._go(self._matcher, length)
            except GrammarFault:
                pass
        self._matcher, self._agreed = self._start(), 0
        return self._matcher, self._go(self._matcher, length)

    def _go(self, matcher: Matcher, length: int) -> bytes:
        matcher.rollback(matcher.length - min(self._agreed, length))
        matcher.accept(self._tokens[self._first + matcher.length : self._first + length])
        self._agreed = length
        return matcher.mask()
