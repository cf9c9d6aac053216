"""Page tables of branches: attach a cached prefix, reserve, copy on write, publish, free behind windows, release."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.batch import PageCopy, PageTableDelta
from octavo.core.errors import InvalidInput, OutOfPages, UseAfterRelease
from octavo.core.kv_coming import ComingPrefixes
from octavo.core.kv_copies import CopyPlan
from octavo.core.kv_groups import KVGroup
from octavo.core.kv_table import BranchKey, BranchPages, PrefixHit
from octavo.core.pages import Owner, PageAllocator
from octavo.core.prefix import RadixCache
from octavo.core.prefix_node import TOMBSTONE, PrefixMatch, PrefixStats
from octavo.core.undo import UndoLog

__all__ = ["BranchTables"]

_NO_MATCH = PrefixMatch(0, (), None)


class BranchTables:
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
    ) -> None:
        _check_shape(page_size, groups)
        self.page_size = page_size
        self.groups = tuple(groups)
        self.allocator = PageAllocator(num_pages, on_free=on_free)
        self.prefix = RadixCache(page_size, len(self.groups), allocator=self.allocator, groups=self.groups)
        self.enable_prefix_cache = enable_prefix_cache
        self.prefix_cache_max_pages = prefix_cache_max_pages
        self._branches: dict[BranchKey, BranchPages] = {}
        self.unsettled: dict[BranchKey, None] = {}  # whose next write may concern a shared page, or the runner's tables
        self._coming = ComingPrefixes(page_size)
        self._copies = CopyPlan(self.allocator)

    # ---- planning: attach

    def begin(
        self,
        branch_key: BranchKey,
        namespace: str,
        units: Sequence[int],
        now: float,
        undo: UndoLog,
        *,
        use_prefix: bool = True,
        may_wait: bool = True,
    ) -> PrefixHit:
        """Give a branch page tables that start with the longest valid cached prefix of its known `units`.

        With `wait` in the answer nothing was attached: ask again in the next step, or with `may_wait=False` to go on
        with what there is. Raises `InvalidInput` without units or if the branch has begun already.
        """
        if branch_key in self._branches:
            raise InvalidInput("branch_key", branch_key, "release the branch before it begins again")
        if not units:
            raise InvalidInput("units", (), "give at least one unit")
        units = tuple(units)
        look_up = use_prefix and self.enable_prefix_cache
        match = self.prefix.match(namespace, units) if look_up else _NO_MATCH
        if look_up and may_wait and self._coming.is_coming(namespace, units, min(match.num_units, len(units) - 1)):
            return PrefixHit(wait=True)
        mark = undo.mark()
        try:
            hit = self._attach(branch_key, namespace, match, len(units), now, undo)
        except OutOfPages:  # no room to copy a partly matching page: whole pages cost nothing
            undo.rollback_to(mark)
            match = self.prefix.match(namespace, units, whole_pages=True)
            hit = self._attach(branch_key, namespace, match, len(units), now, undo)
        if look_up:
            self._count_query(len(units), hit.num_tokens, undo)
        return hit

    def fork(self, parent_key: BranchKey, child_key: BranchKey, undo: UndoLog | None = None) -> None:
        """Give a new branch the parent's pages, shared: whoever writes to a shared page first copies it."""
        parent = self._branch(parent_key)
        if child_key in self._branches:
            raise InvalidInput("child_key", child_key, "release the branch before it begins again")
        tables = [list(table) for table in parent.tables]
        child = BranchPages(child_key, parent.namespace, tables, parent.present, parent.cursor)
        child.behind = list(parent.behind)
        child.last_used = parent.last_used
        child.tell_all()
        for _, page in child.pages():
            self.allocator.add_owner(page, child.owner)
        if child.cursor is not None:
            self.prefix.lock(child.cursor)
        self._branches[child_key] = child
        self.unsettled[parent_key] = self.unsettled[child_key] = None
        if undo is not None:
            undo.push(lambda: self._undo_attach(child))

    def _attach(
        self, key: BranchKey, namespace: str, match: PrefixMatch, num_units: int, now: float, undo: UndoLog
    ) -> PrefixHit:
        no_write = match.num_units == num_units
        shared = len(match.columns) if no_write else match.num_units // self.page_size
        branch = BranchPages(key, namespace, [[] for _ in self.groups], match.num_units, last_used=now)
        if self.enable_prefix_cache:
            branch.cursor = self.prefix.acquire(namespace, match, undo)
        self._branches[key] = branch
        undo.push(lambda: self._undo_attach(branch))
        self._share(branch, match, shared)
        copies = [self._copy_column(branch, column, undo) for column in match.columns[shared:]]
        branch.tell_all()
        self.unsettled[key] = None  # it may go on inside a page that others hold
        return PrefixHit(min(match.num_units, num_units - 1), no_write, sum(copies, ()))

    def _share(self, branch: BranchPages, match: PrefixMatch, num_columns: int) -> None:
        """Start the tables with the match's whole columns, as far as each group's window needs them."""
        for g, group in enumerate(self.groups):
            sinks, first = group.needed_columns(match.num_units, self.page_size)
            needed = [c < sinks or c >= first for c in range(num_columns)]
            branch.tables[g] = [match.columns[c][g] if needed[c] else TOMBSTONE for c in range(num_columns)]
            branch.behind[g] = first
        for _, page in branch.pages():
            self.allocator.add_owner(page, branch.owner)

    def _copy_column(self, branch: BranchPages, column: Sequence[int], undo: UndoLog) -> tuple[PageCopy, ...]:
        """Continue inside a partly matching column: fresh pages that the step fills from the cached ones."""
        sources = self.allocator.open_ticket("copy", column)  # eviction, below, must not give them away
        try:
            targets = self._take(len(column), branch.owner)
            copies = tuple(self._copies.plan(source, page, undo) for source, page in zip(column, targets, strict=True))
        finally:
            self.allocator.retire(sources)
        for table, page in zip(branch.tables, targets, strict=True):
            table.append(page)
        return copies

    def _count_query(self, num_units: int, hit: int, undo: UndoLog) -> None:
        stats = self.prefix.stats
        stats.queries += 1
        stats.hits += hit > 0
        stats.query_units += num_units
        stats.hit_units += hit
        undo.push(lambda: _uncount(stats, num_units, hit))

    def _undo_attach(self, branch: BranchPages) -> None:
        if not branch.released:
            self._release(branch, touch=False)

    def open_bare(self, branch_key: BranchKey) -> BranchPages:
        """Empty page tables of a branch that neither uses nor feeds the prefix cache."""
        branch = self._branches[branch_key] = BranchPages(branch_key, "", [[] for _ in self.groups])
        return branch

    # ---- planning: reserve

    def reserve(self, branch_key: BranchKey, num_tokens: int, undo: UndoLog) -> tuple[PageTableDelta, ...]:
        """Make the branch's page tables cover `num_tokens`, with pages to be written owned by it alone.

        Returns what the runner's tables lack. Evicts cached pages as needed; raises `OutOfPages`, leaving all but
        evictions unchanged, when even that is not enough. A page to be written that somebody shares is replaced by a
        copy (`take_copies`).
        """
        branch = self._branch(branch_key)
        old, new = branch.num_columns, -(-num_tokens // self.page_size)
        shared = self._shared_to_write(branch, num_tokens)
        fresh = max(0, new - old)
        if num_tokens > branch.present:
            self.unsettled.pop(branch_key, None)
        if not (fresh or shared or branch.pending):
            return ()  # most decodes: the next token has its place
        pages = self._take(fresh * len(self.groups) + len(shared), branch.owner)
        told = branch.pending
        branch.pending = []
        undo.push(lambda: self._undo_reserve(branch, old, told))
        for group, column in shared:
            self._copy_on_write(branch, group, column, pages.pop(), undo)
        told_now = told + branch.pending
        branch.pending = []
        for g, table in enumerate(branch.tables if fresh else ()):
            table += pages[g * fresh : (g + 1) * fresh]
            told_now.append(PageTableDelta(g, old, tuple(table[old:])))
        return tuple(told_now)

    def _shared_to_write(self, branch: BranchPages, num_tokens: int) -> list[tuple[int, int]]:
        """(group, column) of the existing pages that the step writes and others own as well."""
        if num_tokens <= branch.present:
            return []
        last = min(branch.num_columns, -(-num_tokens // self.page_size))
        return [
            (g, column)
            for column in range(branch.present // self.page_size, last)
            for g, table in enumerate(branch.tables)
            if self.allocator.is_shared(table[column])
        ]

    def _copy_on_write(self, branch: BranchPages, group: int, column: int, page: int, undo: UndoLog) -> None:
        source = branch.tables[group][column]
        self._copies.plan(source, page, undo)
        branch.replace(group, column, page)
        self._drop(source, branch.owner)
        undo.push(lambda: self._undo_copy_on_write(branch, group, column, source))

    def _undo_copy_on_write(self, branch: BranchPages, group: int, column: int, source: int) -> None:
        if branch.released:
            return
        self.allocator.add_owner(source, branch.owner)  # its copy ticket has kept it
        self._drop(branch.tables[group][column], branch.owner)
        branch.replace(group, column, source)  # the failed step may have been told of the copy
        self.unsettled[branch.key] = None

    def _undo_reserve(self, branch: BranchPages, num_columns: int, told: list[PageTableDelta]) -> None:
        if branch.released:
            return
        for table in branch.tables:
            for page in table[num_columns:]:
                self._drop(page, branch.owner)
            del table[num_columns:]
        branch.pending = told + branch.pending
        self.unsettled[branch.key] = None

    def _take(self, num_pages: int, owner: Owner) -> list[int]:
        free = self.allocator.num_free
        if num_pages > free:
            evictable = self.allocator.num_evictable
            if num_pages > free + evictable:
                total = self.allocator.num_pages
                raise OutOfPages(f"{num_pages} pages wanted; {free} free and {evictable} evictable of {total}")
            self.prefix.evict(num_pages - free)
        return self.allocator.take(num_pages, owner)

    def _drop(self, page: int, owner: Owner) -> None:
        """Drop one reference; a planned copy into a page that nobody owns any more is called off."""
        if self.allocator.drop_owner(page, owner):
            self._copies.call_off(page)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """All page copies that the planned step makes before its writes, those of `begin` included. Take them once."""
        return self._copies.take()

    # ---- planning: waiting for a prefix

    def computing(
        self, branch_key: BranchKey, units: Sequence[int], undo: UndoLog, *, num_tokens: int | None = None
    ) -> None:
        """Tell others that this branch computes `units` (or the first `num_tokens` of them) when the step is done."""
        branch = self._branch(branch_key)
        end = len(units) if num_tokens is None else num_tokens
        if branch.cursor is None or end // self.page_size <= branch.cursor.end:
            return  # no whole page will be published
        before = self._coming.register(branch_key, branch.namespace, tuple(units[:end]))
        undo.push(lambda: None if branch.released else self._coming.restore(branch_key, before))

    # ---- after the step

    def commit(self, branch_key: BranchKey, units: Sequence[int], num_resident: int, now: float) -> None:
        """The step succeeded: tokens [0, num_resident) of `units` have their K/V in the branch's pages.

        Publishes whole pages (a page that is cached already is swapped for the cached one), then frees the pages
        behind windows. `reserve` tells the runner both. Raises `InvalidInput` if `num_resident` is not covered by the
        pages and units, or falls below what is published.
        """
        branch = self._branch(branch_key)
        published = branch.cursor.end * self.page_size if branch.cursor else 0
        self._check_resident(branch, units, num_resident, published)
        branch.present, branch.last_used = num_resident, now
        self._publish(branch, units, num_resident)
        self._free_behind(branch, num_resident)
        if branch.cursor is not None:
            self._coming.published(branch_key, branch.cursor.end)
        if branch.pending:
            self.unsettled[branch_key] = None
        self._bound_cache()

    def finish(self, branch_key: BranchKey, units: Sequence[int], num_resident: int, now: float) -> None:
        """The branch has ended: publish its pages, the partly filled last one included, and release it. Idempotent.

        A `num_resident` below what is published already publishes nothing more. Raises `InvalidInput` if it is not
        covered by the pages and units.
        """
        branch = self._branches.get(branch_key)
        if branch is None:
            return
        self._check_resident(branch, units, num_resident, 0)
        branch.last_used = now
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
        if branch is not None:
            self._release(branch)

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

    def _branch(self, branch_key: BranchKey) -> BranchPages:
        try:
            return self._branches[branch_key]
        except KeyError:
            raise UseAfterRelease(f"branch {branch_key!r} has no pages: it has not begun, or was released") from None


def _uncount(stats: PrefixStats, num_units: int, hit: int) -> None:
    stats.queries -= 1
    stats.hits -= hit > 0
    stats.query_units -= num_units
    stats.hit_units -= hit


def _check_shape(page_size: int, groups: Sequence[KVGroup]) -> None:
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise InvalidInput("page_size", page_size, "give a positive integer")
    if len({group.page_bytes(page_size) for group in groups}) != 1:
        raise InvalidInput("groups", tuple(groups), "give one or more groups of equal page bytes (make_kv_groups)")
