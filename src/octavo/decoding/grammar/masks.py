"""The masks of one output: before the token that is drawn next, and behind drafts of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from octavo.core.draft_tree import path_of
from octavo.core.errors import InvalidInput
from octavo.decoding.grammar.matcher import GrammarFault, Matcher, allows, only_one

__all__ = ["OutputMasks"]

_CHAIN = (-1,)


class OutputMasks:
    """``start`` gives a matcher at the beginning of an output; ``start(True)`` one that shares nothing with others.

    Each method is told the caller's ``tokens``, of which those from ``first`` on are the output: `agree` says where
    they are others than before. What was found behind the newest token is kept, so each mask is made once, whoever
    asks. Not thread-safe.

    A matcher that has failed always fails; limits may count what it met behind drafts, and what others who follow the
    same grammar met. So a fault counts only where a matcher that has seen the output alone has it, too.
    """

    def __init__(self, start: Callable[[bool], Matcher], end_ids: Collection[int]) -> None:
        self._start, self._end_ids = start, end_ids
        self._matcher: Matcher | None = None
        self._agreed = 0  # output tokens that the matcher has accepted and that still stand
        self._path: tuple[int, ...] = ()  # drafts that it has accepted as well
        self._length = -1  # of the output behind which what follows was found
        self._found: dict[tuple[int, ...], bytes] = {}  # by drafts
        self._fault: GrammarFault | InvalidInput | None = None

    def agree(self, length: int) -> None:
        """Of the output, only the first ``length`` tokens still stand."""
        self._agreed = min(self._agreed, length)
        if length < self._length:
            self._length = -1

    def knows(self, length: int) -> bool:
        """Whether the mask behind ``length`` output tokens was made, or cannot be."""
        return self._length == length

    def forced(self, tokens: Sequence[int], first: int, length: int, most: int) -> list[int]:
        """The ids, at most ``most``, that must follow: one after the other the only one that the mask leaves.

        Raises as ``behind``.
        """
        drafts: list[int] = []
        mask: bytes | None = self.behind(tokens, first, length)[0]
        while mask is not None and len(drafts) < most and (token := only_one(mask)) is not None:
            drafts.append(token)
            if token in self._end_ids or len(drafts) == most:
                break
            mask = self.behind(tokens, first, length, drafts, range(-1, len(drafts))).get(len(drafts))
        return drafts

    def behind(
        self,
        tokens: Sequence[int],
        first: int,
        length: int,
        drafts: Sequence[int] = (),
        parents: Sequence[int] = _CHAIN,
    ) -> dict[int, bytes]:
        """The masks behind ``length`` output tokens (row 0) and behind ``drafts`` (rows 1, 2, ..., of a `DraftTree`).
        There is none behind a draft that the grammar does not allow, that ends the output, or behind which it cannot
        be followed, nor behind those that follow it.

        Raises ``GrammarFault`` or ``InvalidInput`` if the grammar cannot be followed behind the output itself.
        """
        if self._length != length:
            self._look(tokens, first, length)
        if self._fault is not None:
            raise self._fault
        found = {0: self._found[()]}
        try:
            for row, (draft, parent) in enumerate(zip(drafts, parents[1:], strict=True), 1):
                if parent in found and draft not in self._end_ids and allows(found[parent], draft):
                    found[row] = self._at_path(length, tuple(drafts[i - 1] for i in path_of(parents, row)[1:]))
        except GrammarFault:  # nobody has drawn that draft yet; a matcher that is spoilt now is replaced in `_at`
            pass
        return found

    def _look(self, tokens: Sequence[int], first: int, length: int) -> None:
        self._found, self._fault = {}, None
        try:
            self._found[()] = self._at(tokens, first, length)
        except (GrammarFault, InvalidInput) as error:
            self._fault = error
        self._length = length

    def _at(self, tokens: Sequence[int], first: int, length: int) -> bytes:
        if self._matcher is not None:
            try:
                return self._go(self._matcher, tokens, first, length)
            except GrammarFault:
                pass
        for apart in (False, True) if self._matcher is None else (True,):
            self._matcher, self._agreed, self._path = self._start(apart), 0, ()
            try:
                return self._go(self._matcher, tokens, first, length)
            except GrammarFault:
                if apart:
                    raise
        raise AssertionError

    def _go(self, matcher: Matcher, tokens: Sequence[int], first: int, length: int) -> bytes:
        known, base = min(self._agreed, length), matcher.length - len(self._path)
        if base <= known:  # it may stand behind drafts that have been drawn since
            known = base + _common(self._path, tokens[first + base : first + length])
        matcher.rollback(matcher.length - known)
        self._path = ()
        matcher.accept(tokens[first + matcher.length : first + length])
        self._agreed = length
        return matcher.mask()

    def _at_path(self, length: int, path: tuple[int, ...]) -> bytes:
        """The mask behind drafts that are allowed."""
        mask = self._found.get(path)
        if mask is None:
            matcher = self._matcher
            assert matcher is not None
            common = _common(self._path, path)
            matcher.rollback(matcher.length - length - common)
            self._path = path[:common]
            matcher.accept(path[common:])
            self._path = path
            mask = self._found[path] = matcher.mask()
        return mask


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first values are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
