"""What the host tier can give a branch that begins: whole pages behind those that the pool has cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.host_tier import HostEntry, HostTier
from octavo.core.kv_groups import KVGroup
from octavo.core.prefix import RadixCache
from octavo.core.prefix_node import TOMBSTONE, PrefixMatch

__all__ = ["NO_RESTORE", "Restore", "Restores", "restorable"]

# first token, end, pages, pages of disk among them: whether reading them back is what to do
Restores = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class Restore:
    """Columns of the host tier, and the match of whole pages that they go on from. With them, `end` tokens have K/V."""

    match: PrefixMatch | None = None  # None: there is nothing to restore
    entries: tuple[HostEntry, ...] = ()
    end: int = 0

    def hosts(self, groups: Sequence[KVGroup], page_size: int) -> list[list[int]]:
        """The host page of each column, by group; TOMBSTONE where the group's window has passed."""
        found: list[list[int]] = []
        start = -(-self.end // page_size) - len(self.entries)
        for g, group in enumerate(groups):
            sinks, first = group.needed_columns(self.end, page_size)
            needed = [column < sinks or column >= first for column in range(start, start + len(self.entries))]
            found.append([e.held[g] if keep else TOMBSTONE for e, keep in zip(self.entries, needed, strict=True)])
        return found

    @property
    def num_disk(self) -> int:
        """Pages that are on disk alone."""
        return sum(len(entry.held) for entry in self.entries if not entry.pages)

    def from_memory(self, longest: int, page_size: int) -> Restore:
        """What comes before the first column that is on disk alone, if that is more than `longest` tokens."""
        count = next(index for index, entry in enumerate(self.entries) if not entry.pages)
        entries = self.entries[:count]
        first = -(-self.end // page_size) - len(self.entries)
        end = first * page_size + sum(len(entry.units) for entry in entries)
        return Restore(self.match, entries, end) if end > longest else NO_RESTORE


NO_RESTORE = Restore()


def restorable(
    tier: HostTier, prefix: RadixCache, namespace: str, units: tuple[int, ...], match: PrefixMatch
) -> Restore:
    """What the tier has of `units` behind the whole pages of `match`, if that is longer than the match.

    The last unit is left out: its token is computed, so that there are logits.
    """
    size = tier.page_size
    if not tier.num_held:
        return NO_RESTORE
    if match.num_units % size:
        match, longest = prefix.match(namespace, units, whole_pages=True), match.num_units
    else:
        longest = match.num_units
    first = match.num_units // size
    entries = tier.match(namespace, units, first)
    end = min(first * size + sum(len(entry.units) for entry in entries), len(units) - 1)
    if end <= longest:
        return NO_RESTORE
    return Restore(match, tuple(entries[: -(-end // size) - first]), end)
