"""The exact verifier: the tokens of a run with drafts are those of the run without, at any temperature.

Row i of a verification computes the known tokens and the drafts before draft i, and draws output token
``output_index + i`` as a plain step would: from the logits of that very prefix, under penalties, bans and mask of that
very history, with the noise of that very index (Philox is addressed by the index, not by the order of draws). So as
long as all drafts before i are the tokens drawn in their places, row i draws what a plain run draws there. The first
draw that differs from its draft is still right; what comes after it is not looked at. In a tree the rows before row i
are those on its path, its index is its depth; of the drafts behind a row, at most one is the token drawn there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.core.draft_tree import row_behind

__all__ = ["accepted"]


def accepted(drafts: Sequence[int], parents: Sequence[int], drawn: Mapping[int, int]) -> list[int]:
    """The rows whose draws count, each behind the one before: along the drafts that were drawn, and one more.

    Rows are those of `DraftTree`; ``drawn`` has no token of a row that could not be drawn from.
    """
    rows: list[int] = []
    row = 0
    while row in drawn:
        rows.append(row)
        row = row_behind(drafts, parents, row, drawn[row])
    return rows
