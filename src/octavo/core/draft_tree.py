"""Drafts as a tree: what is proposed to follow a sequence, several continuations at once.

Rows of a tree are the sequence's last token (row 0) and draft i (row i + 1); `parents` of rows is -1 for row 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import InvalidInput

__all__ = ["DraftTree", "depths_of", "path_of", "row_behind", "rows_along"]


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

    @property
    def is_chain(self) -> bool:
        """True if each follows the one before it."""
        return all(index == parent + 1 for index, parent in enumerate(self.parents))

    def first(self, count: int) -> DraftTree:
        """Of its drafts, the first ones: a tree, as each follows an earlier one."""
        return self if count == len(self) else DraftTree(self.token_ids[:count], self.parents[:count])

    def depths(self) -> list[int]:
        """Of each draft: 1 for those after the sequence itself."""
        return depths_of(self.parent_rows())[1:]

    def path(self, index: int) -> list[int]:
        """The drafts from the sequence to draft `index`, which is the last of them; -1 (the sequence itself): none."""
        return path_of(self.parents, index) if index >= 0 else []


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each row: 0 for the first."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def path_of(parents: Sequence[int], row: int) -> list[int]:
    """A row after its ancestors, from one without a parent on."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def row_behind(drafts: Sequence[int], parents: Sequence[int], row: int, token: int) -> int:
    """The row of the draft ``token`` behind ``row``; -1 where that is none of the ``drafts``."""
    rows = range(row + 1, len(parents))
    return next((i for i in rows if parents[i] == row and drafts[i - 1] == token), -1)


def rows_along(drafts: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> list[int]:
    """The rows from row 0 on along the drafts that are ``said``, as far as they are."""
    rows = [0]
    for token in said:
        row = row_behind(drafts, parents, rows[-1], token)
        if row < 0:
            break
        rows.append(row)
    return rows
