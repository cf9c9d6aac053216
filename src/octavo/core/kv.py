"""The KV cache manager: page tables of all branches over one pool of pages, shared through the prefix cache.

    plan    begin -> (fork) -> reserve, computing -> take_copies -> start_step
    then    commit or finish, undo.clear(), end_step        after success
    or      undo.rollback(), then end_step                  after a failure

A rollback takes back everything but evictions and preemptions (`release_branch`): the failed step may already have
written over the pages that they gave away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from octavo.core.errors import InvalidInput
from octavo.core.host_tier import HostTier, SavedColumn
from octavo.core.kv_audit import audit_kv
from octavo.core.kv_compaction import CompactedTables
from octavo.core.kv_groups import KVGroup, make_kv_groups
from octavo.core.kv_store import KVHandle, KVStore, ListKVStore
from octavo.core.kv_swaps import SwapPlan
from octavo.core.kv_table import BranchKey, KVUsage, PrefixHit
from octavo.core.kv_tokens import TokenHandles
from octavo.core.pages import PageCounts, PageInfo, Ticket
from octavo.core.prefix_node import namespace_key

__all__ = [
    "BranchKey", "KVCacheManager", "KVGroup", "KVHandle", "KVStore", "KVUsage", "ListKVStore", "PrefixHit",
    "make_kv_groups", "namespace_key",
]  # fmt: skip


class KVCacheManager(CompactedTables):
    """Page tables, prefix reuse, copy-on-write and windows of all branches of one model.

    `groups` must have equal page bytes (`make_kv_groups`). `store` holds token K/V for `append` and `read`; it is told
    to `forget` every page that becomes free. `prefix_cache_max_pages` bounds the pages that only the prefix cache
    keeps; what it evicts goes into `host_pages` pages of a host tier (0: it is lost), and from there into `disk_pages`
    pages of disk, which hold `disk_columns` already. Costs are those of the pages touched; only `audit` looks at the
    whole pool.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        groups: Sequence[KVGroup] = (KVGroup((0,)),),
        *,
        store: KVStore | None = None,
        enable_prefix_cache: bool = True,
        prefix_cache_max_pages: int | None = None,
        host_pages: int = 0,
        disk_pages: int = 0,
        disk_columns: Sequence[SavedColumn] = (),
    ) -> None:
        if disk_pages and not host_pages:
            raise InvalidInput("disk_pages", disk_pages, "give host pages as well: what leaves them goes to disk")
        if host_pages and not enable_prefix_cache:
            raise InvalidInput(
                "host_pages", host_pages, "give 0, or turn the prefix cache on: it is what is kept there"
            )
        self.host = HostTier(host_pages, page_size, disk_pages=disk_pages) if host_pages else None
        if self.host is not None:
            self.host.adopt(disk_columns)
        self.store: KVStore = ListKVStore() if store is None else store
        super().__init__(
            num_pages,
            page_size,
            groups,
            on_free=self._forget,
            enable_prefix_cache=enable_prefix_cache,
            prefix_cache_max_pages=prefix_cache_max_pages,
            swaps=SwapPlan(self.host) if self.host is not None else None,
        )
        self.page_bytes = groups[0].page_bytes(page_size)
        self._steps: dict[int, list[Ticket]] = {}
        self._handles = TokenHandles(self)

    # ---- steps

    def start_step(self, step: int) -> None:
        """The plan is made and its copies are taken: from here to `end_step` no page that it may name is reused.

        Raises `InvalidInput` if the step is open, `InvariantBroken` if copies were planned but not taken.
        """
        if step in self._steps:
            raise InvalidInput("step", step, "end the step before it starts again")
        copies = self._copies.hand_over()
        if self.swaps is not None:
            self.swaps.start_step(step)
        self._steps[step] = [self.allocator.open_ticket("step"), *copies]

    def end_step(self, step: int) -> None:
        """The step runs no more, for better or worse (after `undo.rollback()`): its tickets retire. Idempotent."""
        for ticket in self._steps.pop(step, ()):
            self.allocator.retire(ticket)
        if self.swaps is not None:
            self.swaps.end_step(step)

    def _forget(self, page: int) -> None:
        """The page is free; if it is on its way to the host tier, its bytes are still wanted."""
        if self.swaps is None or not self.swaps.is_leaving(page):
            self.store.forget(page)

    # ---- looking

    def num_pages_needed(self, num_tokens: int, max_chunk: int | None = None) -> int:
        """Pages that a branch of `num_tokens` owns at most, without any sharing.

        `max_chunk`: no step computes more tokens of it at once, so windowed groups need only their window and a chunk.
        """
        return sum(group.most_columns(num_tokens, self.page_size, max_chunk) for group in self.groups)

    def capacity_tokens(self, max_chunk: int | None = None, num_branches: int = 1) -> int:
        """The most tokens of which so many branches alone fit into the pool; `max_chunk` as in `num_pages_needed`.

        Without a group that sees everything, and with `max_chunk`, that may be without limit: then `sys.maxsize`.
        """
        pages = self.allocator.num_pages // num_branches
        low, high = 0, (pages + 1) * self.page_size  # low fit; high do not, if any global group exists
        if self.num_pages_needed(sys.maxsize, max_chunk) <= pages:
            return sys.maxsize
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.num_pages_needed(middle, max_chunk) <= pages
            low, high = (middle, high) if fits else (low, middle)
        return low

    def match_length(self, namespace: str, units: Sequence[int]) -> int:
        """Leading `units` that the prefix cache holds now; 0 where it is off."""
        return self.prefix.match(namespace, units).num_units if self.enable_prefix_cache else 0

    def has_written(self, branch_key: BranchKey, num_tokens: int) -> bool:
        """True if that many tokens of the branch have their K/V in its pages."""
        return self._branch(branch_key).present >= num_tokens

    def free_pages(self) -> int:
        """Pages that `reserve` could get: free ones and those that eviction would free."""
        return self.allocator.num_obtainable

    def usage(self) -> KVUsage:
        """Page counts and prefix cache counters."""
        return KVUsage(self.allocator.counts(), len(self._branches), self.page_bytes, replace(self.prefix.stats))

    def describe(self, page: int) -> PageInfo:
        """Owners and tickets of one page."""
        return self.allocator.describe(page)

    def flush_prefix_cache(self) -> int:
        """Evict all cached pages that no branch uses, and those of the host tier; how many of the pool were freed."""
        freed = self.prefix.flush()
        if self.swaps is not None:
            self.swaps.flush()
        return freed

    def audit(self) -> PageCounts:
        """Recount all pages, owners, locks and tickets. Raises `InvariantBroken` on any difference."""
        if self.swaps is not None:
            self.swaps.audit()
        return audit_kv(self.allocator, self.prefix, list(self._branches.values()))

    # ---- one token at a time

    def allocate(self, request_id: str, token_count: int) -> KVHandle:
        """Reserve `token_count` token slots and return their handle, empty.

        Raises `InvalidInput` for a count below 1 or a request that has a handle, `OutOfPages` if the pool is too full.
        """
        return self._handles.allocate(request_id, token_count)

    def append(self, handle: KVHandle, key: Sequence[float], value: Sequence[float]) -> None:
        """Store the next token's key and value (layers x heads, flattened), taking a page when the last one is full.

        Raises `UseAfterRelease` after `release`, `OutOfPages` if no page is left.
        """
        self._handles.append(handle, key, value)

    def read(self, handle: KVHandle, position: int) -> tuple[Sequence[float], Sequence[float]]:
        """The key and value of the token at `position`.

        Raises `UseAfterRelease` after `release`, `InvalidInput` for a position that has not been appended.
        """
        return self._handles.read(handle, position)

    def release(self, handle: KVHandle) -> None:
        """Give the handle's pages back. Idempotent. Raises `InvalidInput` for a handle of another manager."""
        self._handles.release(handle)
