"""The exact verifier: the tokens of a run with drafts are those of the run without, at any temperature.

Row i of a verification computes the known tokens and the drafts before draft i, and draws output token
``output_index + i`` as a plain step would: from the logits of that very prefix, under penalties, bans and mask of that
very history, with the noise of that very index (Philox is addressed by the index, not by the order of draws). So as
long as all drafts before i are the tokens drawn in their places, row i draws what a plain run draws there. The first
draw that differs from its draft is still right; what comes after it is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["accepted"]


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of ``drawn`` count: one more than the drafts that were drawn, but no more than there are.

    ``drawn[i]`` came from the row behind ``drafts[:i]``; it may end early, where a row could not be drawn from.
    """
    count = 0
    for draft, token in zip(drafts, drawn, strict=False):
        count += 1
        if token != draft:
            return count
    return min(count + 1, len(drawn))
