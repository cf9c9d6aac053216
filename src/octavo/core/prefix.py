"""The prefix cache: a radix tree from units (token ids, media hashes) to the pages that hold their keys and values.

Only pages whose bytes are a pure function of the unit prefix and the namespace may enter. Units are compared on every
hit; no hash is trusted. The idea of a radix tree over cached prefixes is SGLang's RadixAttention (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.kv_groups import KVGroup
from octavo.core.pages import TREE, PageAllocator
from octavo.core.prefix_evict import EvictionQueue
from octavo.core.prefix_node import (
    TOMBSTONE,
    Column,
    PrefixMatch,
    PrefixNode,
    PrefixStats,
    common_length,
    namespace_key,
)
from octavo.core.undo import UndoLog

__all__ = ["TOMBSTONE", "PrefixMatch", "PrefixNode", "PrefixStats", "RadixCache", "namespace_key"]


class RadixCache:
    """Prefixes of units to pages, one tree per namespace, in edges of whole pages plus partly filled tails.

    The tree owns its pages in `allocator` (owner TREE, once each). A page of a windowed group may be evicted on its own
    and leaves a tombstone: a match of length L is valid when global groups are whole and each windowed group has every
    page that covers [L - window, L).

    A node at the end of a user's prefix is locked by the user, who also owns the pages of that prefix. Eviction trims
    unlocked leaves from the tail, least recently used first, so a lock protects the whole path above it.
    """

    def __init__(
        self, page_size: int, num_groups: int = 1, *, allocator: PageAllocator, groups: Sequence[KVGroup] | None = None
    ) -> None:
        self.page_size = page_size
        self.groups = tuple(groups) if groups is not None else tuple(KVGroup((g,)) for g in range(num_groups))
        if len(self.groups) != num_groups:
            raise InvalidInput("groups", self.groups, f"give {num_groups} groups")
        self.allocator = allocator
        self.stats = PrefixStats()
        self.on_trim: Callable[[PrefixNode], None] | None = None  # a leaf is about to be evicted from its end
        self._roots: dict[str, PrefixNode] = {}
        self._num_nodes = 0
        self._queue = EvictionQueue(allocator, tuple(group.window > 0 for group in self.groups))
        allocator.on_evictable = self._queue.page_evictable

    # ---- matching

    def match(self, namespace: str, units: Sequence[int], *, whole_pages: bool = False) -> PrefixMatch:
        """The longest valid cached prefix of `units`; nothing is changed. `whole_pages`: only whole pages count."""
        units = list(units)
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(0, (), None)
        columns, owners, matched = self._walk(root, units)
        if whole_pages:
            matched -= matched % self.page_size
        length = self._longest_valid(columns, matched)
        whole = length // self.page_size
        node = owners[whole - 1] if whole else root
        return PrefixMatch(length, tuple(columns[: -(-length // self.page_size)]), node)

    def _walk(self, root: PrefixNode, units: list[int]) -> tuple[list[Column], list[PrefixNode], int]:
        """Follow `units` down: the columns met, the node of each, and how many units are equal."""
        size = self.page_size
        columns: list[Column] = []
        owners: list[PrefixNode] = []
        node, matched = root, 0
        while matched < len(units):
            key = tuple(units[matched : matched + size])
            child = node.children.get(key)
            if child is None:
                child, shared = node.nearest(key)
            else:
                shared = common_length(child.units, units[matched : matched + len(child.units)])
            if child is None:
                break
            columns += child.columns[: -(-shared // size)]
            owners += [child] * -(-shared // size)
            node, matched = child, matched + shared
            if shared < len(child.units):
                break
        return columns, owners, matched

    def _longest_valid(self, columns: list[Column], matched: int) -> int:
        """The largest valid length <= `matched`: the whole, or the end of a column."""
        best = 0
        run_start = [0] * len(self.groups)  # per group: first column of the unbroken run of pages up to here
        sink_end = [len(columns)] * len(self.groups)  # per group: first tombstone
        for index, column in enumerate(columns):
            length = min((index + 1) * self.page_size, matched)
            valid = True
            for g, page in enumerate(column):
                if page == TOMBSTONE:
                    run_start[g] = index + 1
                    sink_end[g] = min(sink_end[g], index)
                sinks, first = self.groups[g].needed_columns(length, self.page_size)
                valid = valid and run_start[g] <= first and sinks <= sink_end[g]
            best = length if valid else best
        return best

    def acquire(self, namespace: str, match: PrefixMatch, undo: UndoLog) -> PrefixNode:
        """Lock the node that ends at the match's last whole page, splitting an edge if need be.

        The caller unlocks it; `undo` takes back the split and the time stamp, not the lock.
        """
        whole = match.num_units // self.page_size
        node = match.node or self._root(namespace)
        if node.end > whole:
            lower, node = node, self._split(node, whole - node.start)
            undo.push(lambda: self._unsplit(lower))
        old, touched = node.stamp, node
        self._queue.touch(node)
        undo.push(lambda: self._queue.stamp(touched, old))
        self.lock(node)
        return node

    # ---- locks

    def lock(self, node: PrefixNode) -> None:
        """Keep `node`, and so its whole path, from being evicted."""
        node.locks += 1

    def unlock(self, node: PrefixNode, *, touch: bool = True) -> None:
        """Take one lock back; `touch` marks the node as just used. Raises `InvariantBroken` if it is not locked."""
        if node.locks < 1:
            raise InvariantBroken(f"prefix node {node.number} is not locked")
        node.locks -= 1
        if touch:
            self._queue.touch(node)
        self._queue.settle(node)
        self._drop_empty_root(node)

    # ---- publishing

    def insert(self, namespace: str, units: Sequence[int], columns: Sequence[Column]) -> list[Column]:
        """Publish a whole prefix from the root: whole pages, then perhaps a partly filled tail.

        `columns`: the page of each group (or TOMBSTONE) for each page-sized stretch; the caller owns the pages. Returns
        the tree's own column for each whole page.
        """
        whole = len(units) // self.page_size
        root = self._root(namespace)
        self.lock(root)
        node, own = self.extend(root, units[: whole * self.page_size], columns[:whole])
        if len(columns) > whole:
            self.add_tail(node, units[whole * self.page_size :], columns[whole])
        self.unlock(root)
        return own

    def extend(
        self, node: PrefixNode, units: Sequence[int], columns: Sequence[Column]
    ) -> tuple[PrefixNode, list[Column]]:
        """Publish whole pages below `node`, which the caller has locked; the node at their end, and the tree's columns.

        Where an equal page is cached already, the tree keeps its own (the columns returned differ from those given);
        only tombstones are filled. The lock stays where it is, but a leaf that only the caller holds may get longer.
        """
        if len(units) != len(columns) * self.page_size:
            raise InvalidInput("units", len(units), f"give {self.page_size} units for each of {len(columns)} columns")
        start, rest = node, list(units)
        own: list[Column] = []
        while rest:
            node, merged = self._extend_once(node, rest, columns[len(own) :], node is start)
            own += merged
            del rest[: len(merged) * self.page_size]
        self._queue.touch(node)
        return node, own

    def _extend_once(
        self, node: PrefixNode, rest: list[int], columns: Sequence[Column], held: bool
    ) -> tuple[PrefixNode, list[Column]]:
        """One node further down: an existing one as far as it is equal, or all the rest as new pages."""
        child = node.children.get(tuple(rest[: self.page_size]))
        if child is None:
            return self._grow(node, rest, columns, held), list(columns)
        shared = common_length(child.units, rest[: len(child.units)]) // self.page_size
        node = child if shared == len(child.columns) else self._split(child, shared)
        return node, self._fill(node, columns[:shared])

    def add_tail(self, node: PrefixNode, units: Sequence[int], column: Column) -> None:
        """Publish a partly filled page below `node`, unless what is cached covers it or a group has no page."""
        child, shared = node.nearest(tuple(units))
        if shared == len(units) or TOMBSTONE in column:
            return
        if child is not None and shared == len(child.units):
            self._remove(child)
        self._queue.touch(self._add_node(node, list(units), [column]))

    def _grow(self, node: PrefixNode, units: list[int], columns: Sequence[Column], held: bool) -> PrefixNode:
        """Add new pages below `node`: a leaf that nobody but the caller holds gets longer, any other gets a child."""
        tail, shared = node.nearest(tuple(units[: self.page_size]))
        if tail is not None and shared == len(tail.units):
            self._remove(tail)  # the whole page covers the partly filled one
        if node.parent is None or node.children or node.locks > held:
            return self._add_node(node, list(units), columns)
        node.units += units
        self._adopt(node, columns)
        return node

    def _add_node(self, parent: PrefixNode, units: list[int], columns: Sequence[Column]) -> PrefixNode:
        self._num_nodes += 1
        node = PrefixNode(self._num_nodes, parent.namespace, parent, parent.end, units, [])
        parent.add_child(node, self.page_size)
        self._adopt(node, columns)
        return node

    def _adopt(self, node: PrefixNode, columns: Sequence[Column]) -> None:
        """Append columns to the node; the tree becomes an owner of their pages."""
        for column in columns:
            node.columns.append(column)
            for group, page in enumerate(column):
                if page != TOMBSTONE:
                    self._own(node, group, page)

    def _own(self, node: PrefixNode, group: int, page: int) -> None:
        self.allocator.add_owner(page, TREE)
        self._queue.hold(page, node, group)
        self.stats.inserted_pages += 1

    def _fill(self, node: PrefixNode, columns: Sequence[Column]) -> list[Column]:
        """Fill the node's tombstones from equal columns; the node's columns."""
        for index, new in enumerate(columns):
            old = node.columns[index]
            node.columns[index] = tuple(n if o == TOMBSTONE else o for o, n in zip(old, new, strict=True))
            for group, page in enumerate(new):
                if old[group] == TOMBSTONE and page != TOMBSTONE:
                    self._own(node, group, page)
                elif page not in (old[group], TOMBSTONE):
                    self.stats.duplicate_pages += 1
        return list(node.columns)

    # ---- evicting

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages` pages if so many are evictable: the pages freed.

        Least recently used first: the tail columns of an unlocked leaf, or a windowed page that nobody uses. A page
        that somebody else owns or names on the way is let go of, but not counted.
        """
        before = self.allocator.num_free
        while self.allocator.num_free - before < num_pages and self._evict_next():
            pass
        return self.allocator.num_free - before

    def shrink(self, max_pages: int) -> None:
        """Evict until at most `max_pages` pages are kept by the tree alone, in flight or not, if that can be."""
        while self.allocator.counts().cached > max_pages and self._evict_next():
            pass

    def flush(self) -> int:
        """Evict everything that nobody uses; the pages freed."""
        return self.evict(self.allocator.num_pages)

    def used(self, page: int) -> None:
        """A windowed page has just been used: it is evicted later than those used before."""
        self._queue.stamp_page(page)

    def _evict_next(self) -> bool:
        candidate = self._queue.first()
        if isinstance(candidate, PrefixNode):
            self._trim(candidate)
        elif candidate is not None:
            self._entomb(candidate)
        return candidate is not None

    def _trim(self, leaf: PrefixNode) -> None:
        """Let go of the leaf's last column."""
        if self.on_trim is not None:
            self.on_trim(leaf)
        self.stats.evicted_pages += sum(page != TOMBSTONE for page in leaf.columns[-1])
        if len(leaf.columns) == 1:
            self._remove(leaf)
            return
        self._disown(leaf.columns.pop())
        del leaf.units[len(leaf.columns) * self.page_size :]

    def _entomb(self, page: int) -> None:
        """Let go of one page of a windowed group and leave a tombstone."""
        node, group = self._queue.holder(page)
        place = next(i for i, column in enumerate(node.columns) if column[group] == page)
        column = node.columns[place]
        node.columns[place] = (*column[:group], TOMBSTONE, *column[group + 1 :])
        self.stats.evicted_pages += 1
        self._release(page)

    def _remove(self, leaf: PrefixNode) -> None:
        """Take a leaf out of the tree. Its parent, if a leaf now, is older than any other: next in line."""
        parent = leaf.parent
        if parent is None:
            raise InvariantBroken("a root cannot be removed while it is used")
        parent.remove_child(leaf, self.page_size)
        leaf.alive = False
        for column in leaf.columns:
            self._disown(column)
        self._queue.settle(parent)
        self._drop_empty_root(parent)

    def _disown(self, column: Column) -> None:
        for page in column:
            if page != TOMBSTONE:
                self._release(page)

    def _release(self, page: int) -> None:
        self._queue.forget(page)
        self.allocator.drop_owner(page, TREE)

    # ---- shape

    def _root(self, namespace: str) -> PrefixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = PrefixNode(0, namespace, None, 0, [], [])
        return root

    def _drop_empty_root(self, node: PrefixNode) -> None:
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)

    def _split(self, lower: PrefixNode, at: int) -> PrefixNode:
        """Split an edge after `at` columns. The old node stays the lower one, so locks at its end stay right."""
        parent = lower.parent
        if parent is None or not 0 < at < len(lower.columns):
            raise InvariantBroken(f"prefix node {lower.number} cannot be split after {at} columns")
        cut = at * self.page_size
        self._num_nodes += 1
        upper = PrefixNode(self._num_nodes, lower.namespace, parent, lower.start, lower.units[:cut], lower.columns[:at])
        upper.stamp = lower.stamp
        parent.remove_child(lower, self.page_size)
        parent.add_child(upper, self.page_size)
        del lower.units[:cut], lower.columns[:at]
        lower.start += at
        upper.add_child(lower, self.page_size)
        self._queue.moved(upper)
        return upper

    def _unsplit(self, lower: PrefixNode) -> None:
        """Join a node with its parent again, if nothing has happened that needs them apart."""
        upper = lower.parent
        if not lower.alive or upper is None or upper.parent is None or upper.locks or len(upper.children) > 1:
            return
        parent = upper.parent
        parent.remove_child(upper, self.page_size)
        upper.alive = False
        lower.units[:0] = upper.units
        lower.columns[:0] = upper.columns
        lower.start = upper.start
        parent.add_child(lower, self.page_size)
        self._queue.moved(lower)

    # ---- looking

    def nodes(self) -> list[PrefixNode]:
        """Every node but the roots, parents before children, in order of namespace creation and units."""
        found: list[PrefixNode] = []
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            stack += [node.children[key] for key in reversed(node.keys)]
            if node.parent is not None:
                found.append(node)
        return found

    def roots(self) -> list[PrefixNode]:
        """The root of every namespace in use, oldest first."""
        return list(self._roots.values())

    def audit(self) -> None:
        """Check the tree's shape. Raises `InvariantBroken`."""
        for node in self.nodes():
            parent = node.parent
            key = tuple(node.units[: self.page_size])
            if parent is None or parent.children.get(key) is not node or parent.end != node.start:
                raise InvariantBroken(f"prefix node {node.number} hangs in the wrong place")
            if not node.columns or len(node.columns) != -(-len(node.units) // self.page_size):
                raise InvariantBroken(f"prefix node {node.number} has {len(node.columns)} columns for its units")
            if len(node.units) % self.page_size and (node.children or node.locks or len(node.columns) > 1):
                raise InvariantBroken(f"prefix node {node.number} is a tail, but it is used like whole pages")
        for node in [*self.roots(), *self.nodes()]:
            if node.keys != sorted(node.children):
                raise InvariantBroken(f"prefix node {node.number} has lost the order of its children")
            if any(later[: len(key)] == key for key, later in pairwise(node.keys)):
                raise InvariantBroken(f"prefix node {node.number} has a child that covers another")
