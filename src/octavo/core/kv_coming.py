"""Prefixes that are being computed right now, so that nobody computes them a second time."""

from __future__ import annotations

from octavo.core.kv_table import BranchKey
from octavo.core.prefix_node import common_length

__all__ = ["Coming", "ComingPrefixes"]

Coming = tuple[str, tuple[int, ...]]  # namespace, and the units whose K/V exist after the step


class ComingPrefixes:
    """What each branch will have computed after the planned step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._coming: dict[BranchKey, Coming] = {}

    def register(self, key: BranchKey, namespace: str, units: tuple[int, ...]) -> Coming | None:
        """Note what a branch computes; what was noted before, for `restore`."""
        before = self._coming.get(key)
        self._coming[key] = (namespace, units)
        return before

    def restore(self, key: BranchKey, before: Coming | None) -> None:
        """Take `register` back."""
        self._coming.pop(key, None)
        if before is not None:
            self._coming[key] = before

    def forget(self, key: BranchKey) -> None:
        """The branch computes nothing any more."""
        self._coming.pop(key, None)

    def published(self, key: BranchKey, num_pages: int) -> None:
        """The branch has published its first `num_pages` pages: forget what has come."""
        if key in self._coming and len(self._coming[key][1]) // self._page_size <= num_pages:
            del self._coming[key]

    def who_computes(self, namespace: str, units: tuple[int, ...], hit: int) -> BranchKey | None:
        """A branch that computes a prefix of `units` at least one whole page longer than the hit; None: nobody."""
        size = self._page_size
        page = slice(hit - hit % size, hit - hit % size + size)
        for key, (other_namespace, other) in self._coming.items():
            if other_namespace == namespace and other[page] == units[page]:
                shared = common_length(other, units)
                if min(shared - shared % size, len(units) - 1) > hit and shared - shared % size >= hit + size:
                    return key
        return None
