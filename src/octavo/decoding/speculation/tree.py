"""Drafts as a tree: what is proposed to follow a sequence, several continuations at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.core.errors import InvalidInput

__all__ = ["DraftTree"]


@dataclass(frozen=True)
class DraftTree:
    """Draft i is `token_ids[i]` after draft `parents[i]`, an earlier one, or after the sequence itself: -1.

    Raises InvalidInput for a parent that is no earlier draft, and for equal siblings: they would be one draft.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise InvalidInput("parents", len(self.parents), f"one for each of {len(self.token_ids)} drafts")
        for index, parent in enumerate(self.parents):
            if not -1 <= parent < index:
                raise InvalidInput("parents", parent, f"draft {index} follows an earlier draft, or -1")
        if len({*zip(self.parents, self.token_ids, strict=True)}) < len(self.token_ids):
            raise InvalidInput("token_ids", self.token_ids, "no two drafts with the same parent are equal")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """Each after the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def children(self, index: int) -> list[int]:
        """The drafts after draft `index` (-1: after the sequence), ascending."""
        return [i for i, parent in enumerate(self.parents) if parent == index]

    def parent_rows(self) -> tuple[int, ...]:
        """Of a step's rows, the sequence's last token and then the drafts, the row before each; -1 for the first."""
        return (-1, *(parent + 1 for parent in self.parents))

    def depths(self) -> list[int]:
        """Of each draft: 1 for those after the sequence itself."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, index: int) -> list[int]:
        """The drafts from the sequence to draft `index`, which is the last of them."""
        return [*self._up(index)][::-1]

    def _up(self, index: int) -> Iterator[int]:
        while index >= 0:
            yield index
            index = self.parents[index]
