"""Rows with drafts in a batch: where the rows of their trees are, what they draw, and what moves afterwards.

`ScheduledRow.parent_rows` numbers them: the last known token is row 0, its drafts are rows 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.backends.ops import path_moves
from octavo.core.batch import RowResult, ScheduledRow
from octavo.core.draft_tree import depths_of
from octavo.core.speculation import drawn_path

__all__ = ["indices_of", "moves_of", "positions_of", "token_rows", "trees_of"]


def token_rows(row: ScheduledRow, end: int, places: Sequence[int]) -> list[int]:
    """The rows ``places`` of a row's tree among the batch's tokens, if its own are the last before ``end``."""
    first = end - 1 - row.num_drafts
    return [first + place for place in places]


def indices_of(row: ScheduledRow, places: Sequence[int]) -> list[int]:
    """The output indices of what is drawn from these rows of a row's tree."""
    depths = depths_of(row.flags.parent_rows) if row.flags.parent_rows else range(1 + row.num_drafts)
    return [row.output_index + depths[place] for place in places]


def positions_of(row: ScheduledRow) -> Sequence[int]:
    """Of each of a row's tokens."""
    if not row.flags.parent_rows:
        return range(row.start, row.start + len(row.token_ids))
    return [row.start + depth for depth in depths_of(row.flags.parent_rows)]


def trees_of(num_chains: int, rows: Sequence[ScheduledRow]) -> Sequence[Sequence[int]]:
    """``parent_rows`` of a batch of so many chains, then ``rows``; nothing where all are chains."""
    if not any(row.flags.parent_rows for row in rows):
        return ()
    return [()] * num_chains + [row.flags.parent_rows for row in rows]


def moves_of(
    row: ScheduledRow, outcome: RowResult, tables: Iterable[Sequence[int]], page_size: int
) -> list[tuple[int, int]]:
    """For `move_slots`: what brings the drafts that were drawn to the slots of their positions. ``tables``: of the
    sequence in each KV group.
    """
    path = drawn_path(row, outcome)
    return [move for pages in tables for move in path_moves(row.start, path, pages, page_size)]
