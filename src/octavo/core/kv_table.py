"""The plain records of the KV cache manager: a branch's page tables, a prefix hit, and usage figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.core.batch import Compaction, PageCopy, PageTableDelta
from octavo.core.pages import Owner, OwnerKind, PageCounts
from octavo.core.prefix_node import TOMBSTONE, PrefixNode, PrefixStats

__all__ = ["BranchKey", "BranchPages", "KVUsage", "PrefixHit"]

BranchKey = tuple[str, int]  # (request id, choice)


@dataclass(frozen=True)
class PrefixHit:
    """What `KVCacheManager.begin` attached.

    `num_tokens` have their K/V (at most all but the last). `no_write`: the last token has it as well; its row is
    computed for its logits only and writes nothing. `copies` are page copies of this hit (they are among
    `take_copies`). `restored` of the tokens come back from the host tier, in `restored_pages` pages, `from_disk` of
    them from disk. `wait`: nothing was attached, because another branch, `awaited`, computes a longer prefix right now.
    """

    num_tokens: int = 0
    no_write: bool = False
    copies: tuple[PageCopy, ...] = ()
    restored: int = 0
    restored_pages: int = 0
    from_disk: int = 0
    wait: bool = False
    awaited: BranchKey | None = None


@dataclass(frozen=True)
class KVUsage:
    """The pool at a glance."""

    pages: PageCounts
    num_branches: int
    page_bytes: int
    prefix: PrefixStats  # a copy


@dataclass(eq=False)
class BranchPages:
    """A branch's page tables, one per group, and how far they are written and published.

    tables[g]   pages of group g by column; TOMBSTONE where the window has passed
    present     tokens [0, present) have their K/V in the pages
    cursor      the prefix tree's node at the end of the published whole pages, locked; None: publishes nothing
    """

    key: BranchKey
    namespace: str
    tables: list[list[int]]
    present: int = 0
    cursor: PrefixNode | None = None
    pending: list[PageTableDelta] = field(default_factory=list)  # changes that the runner has not been told
    behind: list[int] = field(default_factory=list)  # per group: the window has passed the columns before this
    released: bool = False
    compaction: Compaction | None = None  # of the step that is planned, or in flight

    def __post_init__(self) -> None:
        self.owner = Owner(OwnerKind.BRANCH, self.key)
        self.behind = self.behind or [0] * len(self.tables)

    @property
    def num_columns(self) -> int:
        """Columns that every table has."""
        return len(self.tables[0])

    def column(self, index: int) -> tuple[int, ...]:
        """The page of each group in one column."""
        return tuple(table[index] for table in self.tables)

    def pages(self) -> Iterator[tuple[int, int]]:
        """(group, page) of every page that the tables name."""
        for group, table in enumerate(self.tables):
            for page in table:
                if page != TOMBSTONE:
                    yield group, page

    def tell_all(self) -> None:
        """The runner must be told the whole tables."""
        self.pending = [PageTableDelta(g, 0, tuple(table)) for g, table in enumerate(self.tables) if table]

    def replace(self, group: int, column: int, page: int) -> None:
        """Put another page into the table."""
        self.tables[group][column] = page
        self.pending.append(PageTableDelta(group, column, (page,)))
