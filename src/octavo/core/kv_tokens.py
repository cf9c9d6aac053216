"""Keys and values one token at a time, over the same page tables and allocator as the scheduler's branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.errors import InvalidInput, OutOfPages, UseAfterRelease
from octavo.core.kv_store import KVHandle
from octavo.core.kv_table import BranchKey, BranchPages
from octavo.core.undo import UndoLog

if TYPE_CHECKING:
    from octavo.core.kv import KVCacheManager

__all__ = ["TokenHandles"]


class TokenHandles:
    """The handles of `KVCacheManager.allocate`. With several KV groups the data lies in the first group's pages."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._live: dict[int, tuple[KVHandle, BranchPages]] = {}  # by serial
        self._by_request: dict[str, int] = {}
        self._next_serial = 1

    def allocate(self, request_id: str, token_count: int) -> KVHandle:
        """See `KVCacheManager.allocate`."""
        if isinstance(token_count, bool) or not isinstance(token_count, int) or token_count < 1:
            raise InvalidInput("token_count", token_count, "give a positive integer")
        if request_id in self._by_request:
            raise InvalidInput("request_id", request_id, "release the request's handle first, or give a new id")
        handle = KVHandle(request_id, self._next_serial, token_count)
        branch = self._kv.open_bare(_key(handle))
        try:
            self._kv.reserve(branch.key, token_count, UndoLog())
        except OutOfPages:
            self._kv.release_branch(branch.key)
            raise
        self._live[handle.serial] = (handle, branch)
        self._by_request[request_id] = handle.serial
        self._next_serial += 1
        return handle

    def append(self, handle: KVHandle, key: Sequence[float], value: Sequence[float]) -> None:
        """See `KVCacheManager.append`."""
        branch = self._pages(handle)
        position, size = branch.present, self._kv.page_size
        self._kv.reserve(branch.key, position + 1, UndoLog())
        self._kv.store.write(branch.tables[0][position // size], position % size, key, value)
        branch.present += 1

    def read(self, handle: KVHandle, position: int) -> tuple[Sequence[float], Sequence[float]]:
        """See `KVCacheManager.read`."""
        branch, size = self._pages(handle), self._kv.page_size
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < branch.present:
            raise InvalidInput("position", position, f"give a position in [0, {branch.present})")
        return self._kv.store.read(branch.tables[0][position // size], position % size)

    def release(self, handle: KVHandle) -> None:
        """See `KVCacheManager.release`."""
        live = self._live.get(handle.serial)
        if live is None and handle.serial < self._next_serial:
            return
        if live is None or live[0] is not handle:
            raise InvalidInput("handle", handle, "give a handle that this manager's allocate returned")
        del self._live[handle.serial], self._by_request[handle.request_id]
        self._kv.release_branch(live[1].key)

    def _pages(self, handle: KVHandle) -> BranchPages:
        live = self._live.get(handle.serial)
        if live is None or live[0] is not handle:
            raise UseAfterRelease(f"the K/V of request {handle.request_id!r} was released: allocate again")
        return live[1]


def _key(handle: KVHandle) -> BranchKey:
    """A branch key that no scheduler uses: its choices are never negative."""
    return (handle.request_id, -handle.serial)
