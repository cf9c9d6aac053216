"""Page tables of branches while a step is planned: attach a cached prefix, reserve, copy on write."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import PageCopy, PageTableDelta
from octavo.core.errors import InvalidInput, InvariantBroken, OutOfPages
from octavo.core.kv_published import PublishedTables
from octavo.core.kv_restore import NO_RESTORE, Restore, Restores, restorable
from octavo.core.kv_swaps import NO_SWAPS, Swaps
from octavo.core.kv_table import BranchKey, BranchPages, PrefixHit
from octavo.core.pages import Owner, Ticket
from octavo.core.prefix_node import TOMBSTONE, PrefixMatch
from octavo.core.undo import UndoLog

__all__ = ["BranchTables"]

_NO_MATCH = PrefixMatch(0, (), None)


class BranchTables(PublishedTables):
    """What a plan does to the page tables of branches; an undo log takes it back."""

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
        restores: Restores | None = None,
    ) -> PrefixHit:
        """Give a branch page tables that start with the longest valid cached prefix of its known `units`.

        What the host tier has of the tokens behind it is read into fresh pages, if `restores(start, end, pages)` says
        so (None: always), and if there are pages for it. With `wait` in the answer nothing was attached: ask again in
        the next step, or with `may_wait=False` to go on with what there is. Raises `InvalidInput` without units or if
        the branch has begun already.
        """
        if branch_key in self._branches:
            raise InvalidInput("branch_key", branch_key, "release the branch before it begins again")
        if not units:
            raise InvalidInput("units", (), "give at least one unit")
        units = tuple(units)
        look_up = use_prefix and self.enable_prefix_cache
        match = self.prefix.match(namespace, units) if look_up else _NO_MATCH
        restore = self._restorable(namespace, units, match, restores) if look_up else NO_RESTORE
        if look_up and may_wait:
            found = max(match.num_units, restore.end)
            awaited = self._coming.who_computes(namespace, units, min(found, len(units) - 1))
            if awaited is not None:
                return PrefixHit(wait=True, awaited=awaited)
        mark = undo.mark()
        try:
            hit = self._attach(branch_key, namespace, restore.match or match, len(units), undo, restore)
        except OutOfPages:  # no room for what comes back, or to copy a partly matching page: whole pages cost nothing
            undo.rollback_to(mark)
            match = self.prefix.match(namespace, units, whole_pages=True)
            hit = self._attach(branch_key, namespace, match, len(units), undo)
        if look_up:
            self._count_query(len(units), hit, undo)
        return hit

    def fork(self, parent_key: BranchKey, child_key: BranchKey, undo: UndoLog | None = None) -> None:
        """Give a new branch the parent's pages, shared: whoever writes to a shared page first copies it."""
        parent = self._branch(parent_key)
        if child_key in self._branches:
            raise InvalidInput("child_key", child_key, "release the branch before it begins again")
        child = self._branches[child_key] = self._share_all(parent, child_key)
        self.unsettled[parent_key] = self.unsettled[child_key] = None
        if undo is not None:
            undo.push(lambda: self._undo_attach(child))

    def reorder(self, keys: Sequence[BranchKey], parents: Sequence[int], undo: UndoLog) -> Ticket:
        """Branch i goes on with the pages that branch ``parents[i]`` has, shared; what it had itself is given up.

        All are told their whole tables again. No page is taken. What is given up is not reused before the caller
        retires the ticket, so that ``undo`` can give it back while nothing else has changed. A branch without pages may
        join; raises `UseAfterRelease`, leaving all unchanged, if one without pages is named as a parent.
        """
        sources = [self._branch(keys[parent]) for parent in parents]
        before = [self._branches.get(key) for key in keys]
        given_up = [old for old, source in zip(before, sources, strict=True) if old not in (None, source)]
        ticket = self.allocator.open_ticket("fork", [page for old in given_up if old for _, page in old.pages()])
        after = [
            source if old is source else self._share_all(source, key)
            for key, old, source in zip(keys, before, sources, strict=True)
        ]
        for gone in filter(None, given_up):
            self._release(gone)
        for key, branch in zip(keys, after, strict=True):
            branch.tell_all()
            self._branches[key] = branch
            self.unsettled[key] = None
        undo.push(lambda: self._undo_reorder(before, after))
        return ticket

    def _undo_reorder(self, before: Sequence[BranchPages | None], after: Sequence[BranchPages]) -> None:
        back = [old for old, new in zip(before, after, strict=True) if old is not None and old is not new]
        for old in back:
            self._own(old)
        for new in [new for old, new in zip(before, after, strict=True) if old is not new]:
            self._release(new, touch=False)
        for old in back:
            old.released = False
            old.tell_all()
            self._branches[old.key] = old
            self.unsettled[old.key] = None

    def _share_all(self, parent: BranchPages, key: BranchKey) -> BranchPages:
        tables = [list(table) for table in parent.tables]
        child = BranchPages(key, parent.namespace, tables, parent.present, parent.cursor)
        child.behind = list(parent.behind)
        child.tell_all()
        self._own(child)
        return child

    def _own(self, branch: BranchPages) -> None:
        for _, page in branch.pages():
            self.allocator.add_owner(page, branch.owner)
        if branch.cursor is not None:
            self.prefix.lock(branch.cursor)

    def _attach(
        self,
        key: BranchKey,
        namespace: str,
        match: PrefixMatch,
        num_units: int,
        undo: UndoLog,
        restore: Restore = NO_RESTORE,
    ) -> PrefixHit:
        no_write = match.num_units == num_units
        shared = len(match.columns) if no_write else match.num_units // self.page_size
        branch = BranchPages(key, namespace, [[] for _ in self.groups], max(match.num_units, restore.end))
        if self.enable_prefix_cache:
            branch.cursor = self.prefix.acquire(namespace, match, undo)
        self._branches[key] = branch
        undo.push(lambda: self._undo_attach(branch))
        self._share(branch, match, shared)
        num_restored = self._restore(branch, restore) if restore.entries else 0
        copies = [self._copy_column(branch, column, undo) for column in match.columns[shared:]]
        branch.tell_all()
        self.unsettled[key] = None  # it may go on inside a page that others hold
        if num_restored:
            restored = restore.end - match.num_units
            return PrefixHit(restore.end, restored=restored, restored_pages=num_restored, from_disk=restore.num_disk)
        return PrefixHit(min(match.num_units, num_units - 1), no_write, sum(copies, ()))

    def _restorable(
        self, namespace: str, units: tuple[int, ...], match: PrefixMatch, restores: Restores | None
    ) -> Restore:
        """What the host tier has behind the whole pages of a match, if that is more than the match, and pays."""
        if self.swaps is None:
            return NO_RESTORE
        found = restorable(self.swaps.tier, self.prefix, namespace, units, match)
        while found.match is not None and restores is not None:
            pages = len(found.entries) * len(self.groups)
            if restores(found.match.num_units, found.end, pages, found.num_disk):
                break
            found = found.from_memory(match.num_units, self.page_size) if found.num_disk else NO_RESTORE
        return found

    def _restore(self, branch: BranchPages, restore: Restore) -> int:
        """Append the columns to be read back, in fresh pages; how many. What a window has passed stays out."""
        if self.swaps is None:
            raise InvariantBroken("there is no host tier to restore from")
        tier, columns = self.swaps.tier, restore.hosts(self.groups, self.page_size)
        hosts = [host for column in columns for host in column if host != TOMBSTONE]
        tier.use(restore.entries)
        for host in hosts:  # eviction, below, may push others out of the tier
            tier.pin(host)
        try:
            pages = self._take(len(hosts), branch.owner)
        except OutOfPages:
            for host in hosts:
                tier.unpin(host)
            raise
        self.swaps.plan_ins(hosts, pages)
        fresh = iter(pages)
        for table, column in zip(branch.tables, columns, strict=True):
            table += [TOMBSTONE if host == TOMBSTONE else next(fresh) for host in column]
        return len(pages)

    def _share(self, branch: BranchPages, match: PrefixMatch, num_columns: int) -> None:
        """Start the tables with the match's whole columns, as far as each group's window needs them."""
        for g, group in enumerate(self.groups):
            sinks, first = group.needed_columns(branch.present, self.page_size)
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

    def _count_query(self, num_units: int, hit: PrefixHit, undo: UndoLog) -> None:
        self._count(num_units, hit, 1)
        undo.push(lambda: self._count(num_units, hit, -1))

    def _count(self, num_units: int, hit: PrefixHit, sign: int) -> None:
        stats = self.prefix.stats
        stats.queries += sign
        stats.hits += sign * (hit.num_tokens > 0)
        stats.query_units += sign * num_units
        stats.hit_units += sign * hit.num_tokens
        if self.swaps is not None:
            tier = self.swaps.tier.stats
            tier.query_units += sign * (num_units - (hit.num_tokens - hit.restored))
            tier.hit_units += sign * hit.restored

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

    def take_copies(self) -> tuple[PageCopy, ...]:
        """All page copies that the planned step makes before its writes, those of `begin` included. Take them once."""
        return self._copies.take()

    def take_swaps(self, undo: UndoLog) -> Swaps:
        """The moves of a decision that runs between pool, host memory and disk. Take them once."""
        return NO_SWAPS if self.swaps is None else self.swaps.take(undo)

    def lose_host_pages(self, pages: Sequence[int]) -> None:
        """Pages of the host tier do not hold what was written there: forget what they are for."""
        if self.swaps is not None:
            self.swaps.tier.drop(pages)

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
