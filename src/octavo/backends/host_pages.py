"""Pages in host memory: the bytes behind the core's host tier, each page with the checksum of what was written."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from octavo.core.errors import CorruptPages, InvalidInput

__all__ = ["HostPages", "SwapPool", "swap_in", "swap_out"]


class SwapPool(Protocol):
    """What a page pool must offer to be swapped."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of one page as `save_page` writes it."""

    def save_page(self, page: int, out: memoryview) -> None:
        """All bytes of a page, exactly as `load_page` takes them."""

    def load_page(self, page: int, data: memoryview) -> None:
        """Make the page hold what was saved."""


class HostPages:
    """`num_pages` pages of `page_bytes` bytes. The system gives the memory as pages are written for the first time."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        for field, value in (("num_pages", num_pages), ("page_bytes", page_bytes)):
            if value < 1:
                raise InvalidInput(field, value, "give a positive integer")
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self.memory = memoryview(bytearray(num_pages * page_bytes))
        self._checksums: list[int | None] = [None] * num_pages  # None: never written

    def view(self, page: int) -> memoryview:
        """The bytes of a page. Raises `InvalidInput` for a page that there is not."""
        if not 0 <= page < self.num_pages:
            raise InvalidInput("host page", page, f"give a page in [0, {self.num_pages})")
        return self.memory[page * self.page_bytes : (page + 1) * self.page_bytes]

    def seal(self, page: int) -> None:
        """The page has been written: keep its checksum (CRC-32)."""
        self._checksums[page] = zlib.crc32(self.view(page))

    def is_sound(self, page: int) -> bool:
        """True if the page was written and holds just that."""
        return self._checksums[page] == zlib.crc32(self.view(page))


def swap_out(pool: SwapPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
    """Pages of the pool into host pages, with their checksums."""
    for source, target in pairs:
        pool.save_page(source, host.view(target))
        host.seal(target)


def swap_in(pool: SwapPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
    """Host pages into pages of the pool. Raises `CorruptPages`, and changes nothing, if any is not what was written."""
    bad = [source for source, _ in pairs if not host.is_sound(source)]
    if bad:
        raise CorruptPages(bad, f"host pages {bad[:8]} do not hold what was written there: their memory went bad")
    for source, target in pairs:
        pool.load_page(target, host.view(source))
