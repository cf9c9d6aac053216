"""Bulk requests (the lines of a batch): whatever the policy, they come after all others, and give way to them.

step       1    2    3    4    5    6    7    8    9
others     x    x    x    x    x    x    x    x    x       while somebody else is here, bulk requests are served
bulk       .    .    .    .    .    .    .    x    .       in every 8th step alone, and begin little of their prompts
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.request import Branch, RequestState

__all__ = ["EVERY", "bulk_chunk", "is_put_off"]

EVERY = 8  # steps
MOST_PREFILL = 16  # tokens of bulk prompts in a step with others
MOST_ALONE = 128  # in a step without, which the next one to come has to wait for


def is_put_off(num_bulk: int, num_requests: int, step: int) -> bool:
    """True for a step of which bulk requests get nothing."""
    return 0 < num_bulk < num_requests and step % EVERY != 0


def bulk_chunk(branch: Branch, running: Iterable[Branch], alone: bool) -> int:
    """Tokens of its prompt that a bulk request which runs may have in a step; beside others one begins at a time."""
    prefills = [other for other in running if other.request.bulk and other.state is not RequestState.DECODING]
    if not alone and branch.needs_init and any(other.request is not branch.request for other in prefills):
        return 0
    return max(1, (MOST_ALONE if alone else MOST_PREFILL) // max(1, len(prefills)))
