"""The masks of one output: before the token that is drawn next, and behind drafts of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

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

    def behind(self, length: int, drafts: Sequence[int]) -> list[bytes]:
        """The mask behind ``length`` output tokens, then those behind each of ``drafts``: up to one that the grammar
        does not allow, that ends the output, or behind which it cannot be followed.

        Raises ``GrammarFault`` or ``InvalidInput`` if the grammar cannot be followed behind the output itself.
        """
        matcher, mask = self._at(length)
        found = [mask]
        try:
            for draft in drafts:
                if draft in self._end_ids or not allows(found[-1], draft):
                    break
                matcher.accept([draft])
                found.append(matcher.mask())
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
