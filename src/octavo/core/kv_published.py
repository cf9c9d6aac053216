"""Page tables of branches after a step: publish whole pages, free those behind windows, release."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.batch import PageTableDelta
from octavo.core.errors import InvalidInput, UseAfterRelease
from octavo.core.kv_coming import ComingPrefixes
from octavo.core.kv_copies import CopyPlan
from octavo.core.kv_groups import KVGroup
from octavo.core.kv_swaps import SwapPlan
from octavo.core.kv_table import BranchKey, BranchPages
from octavo.core.pages import Owner, PageAllocator
from octavo.core.prefix import RadixCache
from octavo.core.prefix_node import TOMBSTONE

__all__ = ["PublishedTables"]


class PublishedTables:
    """Page tables of all live branches over one allocator and one prefix cache (see `KVCacheManager`)."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        groups: Sequence[KVGroup],
        *,
        on_free: Callable[[int], None],
        enable_prefix_cache: bool,
        prefix_cache_max_pages: int | None,
        swaps: SwapPlan | None = None,
    ) -> None:
        _check_shape(page_size, groups)
        self.page_size = page_size
        self.groups = tuple(groups)
        self.compacts = self.groups[0].kept > 0  # only some tokens stay
        self._has_windows = any(group.window for group in self.groups)
        self.allocator = PageAllocator(num_pages, on_free=on_free)
        self.prefix = RadixCache(page_size, len(self.groups), allocator=self.allocator, groups=self.groups)
        self.enable_prefix_cache = enable_prefix_cache
        self.prefix_cache_max_pages = prefix_cache_max_pages
        self._branches: dict[BranchKey, BranchPages] = {}
        self.unsettled: dict[BranchKey, None] = {}  # whose next write may concern a shared page, or the runner's tables
        self._coming = ComingPrefixes(page_size)
        self._copies = CopyPlan(self.allocator)
        self.swaps = swaps  # where there is a host tier
        if swaps is not None:
            self.prefix.on_trim = swaps.evicted
        self._deferred: dict[BranchKey, tuple[Sequence[int], int, float]] = {}  # commits that can wait

    # ---- after the step

    def commit(self, branch_key: BranchKey, units: Sequence[int], num_resident: int, now: float) -> None:
        """The step succeeded: tokens [0, num_resident) of `units` have their K/V in the branch's pages.

        Publishes whole pages (a page that is cached already is swapped for the cached one), then frees the pages
        behind windows. `reserve` tells the runner both. Raises `InvalidInput` if `num_resident` is not covered by the
        pages and units, or falls below what is published.
        """
        branch = self._branch(branch_key)
        self._deferred.pop(branch_key, None)
        published = branch.cursor.end * self.page_size if branch.cursor else 0
        self._check_resident(branch, units, num_resident, published)
        branch.present, branch.compaction = num_resident, None
        self._publish(branch, units, num_resident)
        self._free_behind(branch, num_resident)
        if branch.cursor is not None:
            self._coming.published(branch_key, branch.cursor.end)
        if branch.pending:
            self.unsettled[branch_key] = None
        self._bound_cache()

    def defer_commit(self, branch_key: BranchKey, units: Sequence[int], num_resident: int, now: float) -> None:
        """`commit`, but its pages need not be found by others before `commit_deferred`. For groups without a window.

        `units` is read only then; it may have grown.
        """
        self._branch(branch_key).present = num_resident
        self._deferred[branch_key] = (units, num_resident, now)

    def commit_deferred(self) -> None:
        """Make up for what was deferred: before the first plan that looks for prefixes, or lacks pages."""
        for branch_key, (units, num_resident, now) in list(self._deferred.items()):
            self.commit(branch_key, units, num_resident, now)

    def finish(self, branch_key: BranchKey, units: Sequence[int], num_resident: int, now: float) -> None:
        """The branch has ended: publish its pages, the partly filled last one included, and release it. Idempotent.

        A `num_resident` below what is published already publishes nothing more. Raises `InvalidInput` if it is not
        covered by the pages and units.
        """
        branch = self._branches.get(branch_key)
        if branch is None:
            return
        self._check_resident(branch, units, num_resident, 0)
        whole = num_resident // self.page_size
        if branch.cursor is not None and whole >= branch.cursor.end:
            self._publish(branch, units, num_resident)
            tail = units[whole * self.page_size : num_resident]
            if tail:
                self.prefix.add_tail(branch.cursor, tail, branch.column(whole))
        self._release(branch)
        self._bound_cache()

    def release_branch(self, branch_key: BranchKey) -> None:
        """Give up the branch's pages (preemption, cancellation); what it published stays cached. Idempotent."""
        branch = self._branches.get(branch_key)
        if branch_key in self._deferred:
            self.commit(branch_key, *self._deferred[branch_key])
        if branch is not None:
            self._release(branch)

    def give_back(self, branch_key: BranchKey, num_tokens: int) -> None:
        """The step is done, and less came of it than there are pages: drop those that hold none of so many tokens."""
        branch = self._branch(branch_key)
        columns = -(-num_tokens // self.page_size)
        for table in branch.tables:
            for page in table[columns:]:
                self._drop(page, branch.owner)
            del table[columns:]

    def _check_resident(self, branch: BranchPages, units: Sequence[int], num_resident: int, least: int) -> None:
        limit = min(len(units), branch.num_columns * self.page_size)
        if not least <= num_resident <= limit:
            raise InvalidInput("num_resident", num_resident, f"give a count in [{least}, {limit}]")

    def _publish(self, branch: BranchPages, units: Sequence[int], num_resident: int) -> None:
        cursor, whole = branch.cursor, num_resident // self.page_size
        if cursor is None or whole <= cursor.end:
            return
        first = cursor.end
        columns = [branch.column(index) for index in range(first, whole)]
        node, own = self.prefix.extend(cursor, units[first * self.page_size : whole * self.page_size], columns)
        if node is not cursor:
            self.prefix.lock(node)
            self.prefix.unlock(cursor, touch=False)
            branch.cursor = node
        for index, column in enumerate(own, first):
            for group, page in enumerate(column):
                mine = branch.tables[group][index]
                if page not in (mine, TOMBSTONE) and mine != TOMBSTONE:
                    self._swap(branch, group, index, page)

    def _swap(self, branch: BranchPages, group: int, column: int, page: int) -> None:
        """Use the tree's equal page instead of the branch's own."""
        self.allocator.add_owner(page, branch.owner)
        self._drop(branch.tables[group][column], branch.owner)
        branch.replace(group, column, page)

    def _free_behind(self, branch: BranchPages, num_resident: int) -> None:
        for g, group in enumerate(self.groups):
            sinks, first = group.needed_columns(num_resident, self.page_size)
            start = max(branch.behind[g], sinks)
            if start >= first:
                continue
            table = branch.tables[g]
            for page in table[start:first]:
                if page != TOMBSTONE:
                    self._drop(page, branch.owner)
            table[start:first] = [TOMBSTONE] * (first - start)
            branch.pending.append(PageTableDelta(g, start, tuple(table[start:first])))
            branch.behind[g] = first

    def _release(self, branch: BranchPages, *, touch: bool = True) -> None:
        branch.released = True
        del self._branches[branch.key]
        self._deferred.pop(branch.key, None)
        self.unsettled.pop(branch.key, None)
        self._coming.forget(branch.key)
        if branch.cursor is not None:
            self.prefix.unlock(branch.cursor, touch=touch)
        for _, page in branch.pages():
            if touch:
                self.prefix.used(page)
            self._drop(page, branch.owner)

    def _bound_cache(self) -> None:
        if self.prefix_cache_max_pages is not None:
            self.prefix.shrink(self.prefix_cache_max_pages)

    def _drop(self, page: int, owner: Owner) -> None:
        """Drop one reference; what was to be copied or read into a page that nobody owns any more is called off."""
        if self.allocator.drop_owner(page, owner):
            self._copies.call_off(page)
            if self.swaps is not None:
                self.swaps.call_off(page)

    # ---- looking

    def page_table(self, branch_key: BranchKey) -> tuple[tuple[int, ...], ...]:
        """The pages of a live branch: per group, by column; -1 where the window has passed."""
        return tuple(tuple(table) for table in self._branch(branch_key).tables)

    def has_branch(self, branch_key: BranchKey) -> bool:
        """True between `begin` (or `fork`) and `finish` or `release_branch`."""
        return branch_key in self._branches

    def num_branch_pages(self, branch_key: BranchKey) -> int:
        """Pages that the branch owns, shared ones included; 0 if it is not live."""
        branch = self._branches.get(branch_key)
        return sum(len(table) - table.count(TOMBSTONE) for table in branch.tables) if branch is not None else 0

    def num_lasting_pages(self, branch_key: BranchKey) -> int:
        """Pages that the branch keeps to its end, or that are free or cached once its window has passed them.

        A page behind a window is neither where another branch, or a lease, holds it as well.
        """
        branch = self._branches.get(branch_key)
        if branch is None or not self._has_windows:
            return self.num_branch_pages(branch_key)
        held_by_others, owner = self.allocator.is_held_by_others, branch.owner
        return sum(not (self.groups[g].window and held_by_others(page, owner)) for g, page in branch.pages())

    def _branch(self, branch_key: BranchKey) -> BranchPages:
        try:
            return self._branches[branch_key]
        except KeyError:
            raise UseAfterRelease(f"branch {branch_key!r} has no pages: it has not begun, or was released") from None


def _check_shape(page_size: int, groups: Sequence[KVGroup]) -> None:
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise InvalidInput("page_size", page_size, "give a positive integer")
    if len({group.page_bytes(page_size) for group in groups}) != 1:
        raise InvalidInput("groups", tuple(groups), "give one or more groups of equal page bytes (make_kv_groups)")
    if groups[0].kept and groups[0].forgets % page_size:
        raise InvalidInput("page_size", page_size, f"give one that divides {groups[0].forgets}, which go at once")
