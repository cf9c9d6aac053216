"""The parts of the prefix tree: nodes, matches, counters, and the key of a namespace."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["TOMBSTONE", "PrefixMatch", "PrefixNode", "PrefixStats", "common_length", "namespace_key"]

TOMBSTONE = -1  # a page that a windowed group no longer has
Column = tuple[int, ...]  # the pages of one page-sized stretch of units, one per group


def namespace_key(parts: Mapping[str, object], *, key: bytes = b"octavo.prefix") -> str:
    """The namespace of everything that decides a page's bytes besides its units, as a keyed BLAKE2b hash.

    `parts`: names and values (model and weight digest, adapter, tokenizer, rope, KV dtype, numerics id, tenant salt).
    Their order does not matter; names and values are length-prefixed, so that no two mappings run together. Give a
    secret `key` (at most 64 bytes) where namespaces must not be guessed.
    """
    digest = blake2b(key=key, digest_size=16)
    for name in sorted(parts):
        for text in (name, repr(parts[name])):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading units are equal. Both must be lists, or both tuples."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(index for index in range(size) if a[index] != b[index])


class PrefixNode:
    """A stretch of units and their pages. Its path from the root spells the whole prefix.

    Units come in whole pages, but for a *tail*: a leaf of one partly filled page. Children are keyed by the units of
    their first page; no key is a prefix of another.
    """

    __slots__ = (
        "alive",
        "children",
        "columns",
        "keys",
        "locks",
        "namespace",
        "number",
        "parent",
        "stamp",
        "start",
        "units",
    )

    def __init__(
        self,
        number: int,
        namespace: str,
        parent: PrefixNode | None,
        start: int,
        units: list[int],
        columns: list[Column],
    ) -> None:
        self.number = number  # order of creation
        self.namespace = namespace
        self.parent = parent
        self.start = start  # columns above this node
        self.units = units
        self.columns = columns
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.keys: list[tuple[int, ...]] = []  # the children's keys, sorted
        self.locks = 0
        self.stamp = 0  # logical time of last use
        self.alive = True

    @property
    def end(self) -> int:
        """Columns of the path down to and including this node."""
        return self.start + len(self.columns)

    def path(self) -> list[PrefixNode]:
        """The nodes from the root to this one."""
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def add_child(self, child: PrefixNode, page_size: int) -> None:
        """Hang `child` below this node."""
        key = tuple(child.units[:page_size])
        insort(self.keys, key)
        self.children[key] = child
        child.parent = self

    def remove_child(self, child: PrefixNode, page_size: int) -> None:
        """Take `child` off this node."""
        key = tuple(child.units[:page_size])
        del self.children[key]
        del self.keys[bisect_left(self.keys, key)]

    def nearest(self, units: tuple[int, ...]) -> tuple[PrefixNode | None, int]:
        """The child whose first page shares most leading units with `units`, and how many; (None, 0) if none does.

        Among sorted keys the longest common prefix is with a neighbour of the place where `units` would stand.
        """
        place = bisect_left(self.keys, units)
        best, length = None, 0
        for key in self.keys[max(0, place - 1) : place + 1]:
            shared = common_length(key, units)
            if shared > length:
                best, length = self.children[key], shared
        return best, length


@dataclass(frozen=True)
class PrefixMatch:
    """The longest valid cached prefix of some units.

    `columns` are its pages: one column for each page-sized stretch, one page (or TOMBSTONE, outside of a window) per
    group. The last column is only partly used when `num_units` is no multiple of the page size.
    `node` holds column `num_units // page_size - 1`, the last whole one (the root, or None without a root).
    """

    num_units: int
    columns: tuple[Column, ...]
    node: PrefixNode | None


@dataclass
class PrefixStats:
    """Counters since start; a rolled back step takes its part back."""

    queries: int = 0
    hits: int = 0
    query_units: int = 0
    hit_units: int = 0
    inserted_pages: int = 0
    duplicate_pages: int = 0  # published twice: the second copy was given back
    evicted_pages: int = 0

    @property
    def misses(self) -> int:
        """Queries that found nothing."""
        return self.queries - self.hits
