"""Trees of drafts with the right path among lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.batch import RowResult, ScheduledRow
from octavo.core.draft_tree import DraftTree
from octavo.core.speculation import drawn_path

Path = tuple[int, ...]


def lying_tree(
    right: Sequence[int],
    most: int,
    lies: int,
    roll: Callable[[int], int],
    allowed: Callable[[Path], Sequence[int]],
) -> DraftTree:
    """At most ``most`` drafts, with a beginning of ``right`` among them, in any order of siblings. ``roll(n)``: 0 to
    n - 1. Of eight drafts that could go on rightly, ``lies`` do not: they are what is ``allowed`` behind a path.
    """
    truth, paths = tuple(right), [()]
    for _ in range(most):
        path: Path = paths[roll(len(paths))]
        if roll(2):
            path = max((path for path in paths if path == truth[: len(path)]), key=len)
        may = allowed(path)
        if not may:
            continue
        rest = truth[len(path) :] if path == truth[: len(path)] else ()
        is_right = rest and rest[0] in may and (*path, rest[0]) not in paths and roll(8) >= lies
        token = rest[0] if is_right else may[roll(len(may))]
        if (*path, token) not in paths:
            paths.append((*path, token))
    places = sorted((len(path), roll(1 << 16), at) for at, path in enumerate(paths))  # lies before and behind the truth
    paths = [paths[at] for _, _, at in places]
    return DraftTree(tuple(path[-1] for path in paths[1:]), tuple(paths.index(path[:-1]) - 1 for path in paths[1:]))


def is_moved(row: ScheduledRow, outcome: RowResult) -> bool:
    """True where drafts that were drawn were not the first ones, so that what they wrote had to move."""
    return any(place != depth for depth, place in enumerate(drawn_path(row, outcome)))
