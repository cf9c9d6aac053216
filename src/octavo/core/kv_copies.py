"""The page copies of the step being planned: sources are ticketed, and no page is source and target in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.batch import PageCopy
from octavo.core.errors import InvariantBroken
from octavo.core.pages import PageAllocator, Ticket
from octavo.core.undo import UndoLog

__all__ = ["CopyPlan"]


class _Planned(NamedTuple):
    source: int
    ticket: Ticket


class CopyPlan:
    """Copies planned for one step; all of them run before the step's first write."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._planned: dict[int, _Planned] = {}  # by target page
        self._taken: list[Ticket] = []

    def plan(self, source: int, target: int, undo: UndoLog) -> PageCopy:
        """Plan a copy into the fresh page `target`; the source is not reused while the copy stands."""
        named = [source]  # all that a rollback may need again
        if source in self._planned:  # itself a copy not made yet: copy from where that comes from
            source = self._planned[source].source
            named.append(source)
        ticket = self._allocator.open_ticket("copy", named)
        self._planned[target] = _Planned(source, ticket)
        undo.push(lambda: self._undo(target, ticket))
        return PageCopy(source, target)

    def hold(self, pages: Sequence[int], undo: UndoLog) -> None:
        """The step reads these pages, whoever owns them: they are not reused while it runs."""
        ticket = self._allocator.open_ticket("copy", pages)
        self._taken.append(ticket)
        undo.push(lambda: self._let_go(ticket))

    def _let_go(self, ticket: Ticket) -> None:
        if ticket in self._taken:
            self._taken.remove(ticket)
        self._allocator.retire(ticket)

    def call_off(self, target: int) -> None:
        """Nobody owns `target` any more: the copy into it, if one is planned, is not made."""
        if target in self._planned:
            self._allocator.retire(self._planned.pop(target).ticket)

    def take(self) -> tuple[PageCopy, ...]:
        """The planned copies, once; their tickets stay open until the step takes them over."""
        if not self._planned:
            return ()
        copies = tuple(PageCopy(planned.source, target) for target, planned in self._planned.items())
        self._taken += [planned.ticket for planned in self._planned.values()]
        self._planned = {}
        return copies

    def hand_over(self) -> list[Ticket]:
        """The tickets of the copies taken. Raises `InvariantBroken` if some were planned but not taken."""
        if self._planned:
            raise InvariantBroken(f"{len(self._planned)} page copies were planned but not taken")
        tickets, self._taken = self._taken, []
        return tickets

    def _undo(self, target: int, ticket: Ticket) -> None:
        if target in self._planned and self._planned[target].ticket is ticket:
            del self._planned[target]
        self._allocator.retire(ticket)
