"""Which slots follow a grammar, and their masks for a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.core.batch import ScheduledRow
from octavo.core.draft import BranchKey
from octavo.core.errors import InvalidInput, OctavoError, RowError
from octavo.decoding.grammar import GrammarFault
from octavo.engine.followed import Followed
from octavo.engine.output import CANNOT_FOLLOW
from octavo.engine.slots import Slot

__all__ = ["Constraints"]


class Constraints:
    """The slots of those outputs that follow a grammar; ``followed``: None where there are none."""

    def __init__(self, followed: Followed | None) -> None:
        self._followed = followed
        self._slots: dict[int, Slot] = {}

    def enter(self, number: int, slot: Slot, key: BranchKey) -> None:
        """A sequence takes a slot."""
        self._slots.pop(number, None)
        grammar = slot.params.grammar
        if grammar is not None:
            self._slots[number] = slot
            if self._followed is not None:
                slot.masks = self._followed.masks(key, grammar, slot.end_ids)

    def leave(self, number: int) -> None:
        """A slot is free."""
        self._slots.pop(number, None)

    def prepare(self, numbers: Sequence[int], indices: Sequence[int], others: Sequence[ScheduledRow]) -> None:
        """Make the masks of a step's draws: in slots ``numbers`` of output tokens ``indices``, then of ``others``.

        Raises ``RowError`` for the rows whose grammar cannot be followed.
        """
        faults: dict[int, OctavoError] = {}
        for row, number, index, tree in self._draws(numbers, indices, others) if self._slots else ():
            try:
                self._slots[number].constrain(index, tree)
            except (GrammarFault, InvalidInput) as error:
                faults[row] = error
        if faults:
            raise RowError(list(faults), f"{CANNOT_FOLLOW}: {next(iter(faults.values()))}")

    def _draws(
        self, numbers: Sequence[int], indices: Sequence[int], others: Sequence[ScheduledRow]
    ) -> Iterator[tuple[int, int, int, ScheduledRow | None]]:
        """(row, slot, output index, who may have drafts) of those that follow a grammar."""
        for row, number in enumerate(numbers):
            if number in self._slots:
                yield row, number, indices[row], None
        for row, other in enumerate(others, len(numbers)):
            if other.flags.sample and other.slot in self._slots:
                yield row, other.slot, other.output_index, other
