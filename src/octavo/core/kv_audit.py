"""The audit of everything that holds pages: tables, prefix tree, leases, tickets, locks must tell the same story."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.errors import InvariantBroken
from octavo.core.kv_table import BranchPages
from octavo.core.pages import TREE, Owner, PageAllocator, PageCounts
from octavo.core.prefix import RadixCache
from octavo.core.prefix_node import TOMBSTONE, PrefixNode

__all__ = ["audit_kv"]


def audit_kv(allocator: PageAllocator, prefix: RadixCache, branches: Sequence[BranchPages]) -> PageCounts:
    """Recount owners page by page and locks node by node; raises `InvariantBroken` on any difference."""
    expected: dict[int, dict[Owner, int]] = {}
    for page, owner in _references(allocator, prefix, branches):
        owners = expected.setdefault(page, {})
        owners[owner] = owners.get(owner, 0) + 1
    prefix.audit()
    _audit_locks(prefix, branches)
    for branch in branches:
        _audit_branch(branch)
    return allocator.audit(expected)


def _references(
    allocator: PageAllocator, prefix: RadixCache, branches: Sequence[BranchPages]
) -> list[tuple[int, Owner]]:
    references = list(allocator.lease_owners())
    for branch in branches:
        references += [(page, branch.owner) for _, page in branch.pages()]
    for node in prefix.nodes():
        references += [(page, TREE) for column in node.columns for page in column if page != TOMBSTONE]
    return references


def _audit_locks(prefix: RadixCache, branches: Sequence[BranchPages]) -> None:
    locks: dict[PrefixNode, int] = {}
    for branch in branches:
        if branch.cursor is not None:
            locks[branch.cursor] = locks.get(branch.cursor, 0) + 1
    for node in [*prefix.roots(), *prefix.nodes()]:
        if node.locks != locks.pop(node, 0):
            raise InvariantBroken(f"prefix node {node.number} has {node.locks} locks, not as many branches")
    if locks:
        raise InvariantBroken("a branch holds a prefix node that is not in the tree")


def _audit_branch(branch: BranchPages) -> None:
    """All tables are equally long, and every published page that the branch keeps is the tree's."""
    if len({len(table) for table in branch.tables}) != 1:
        raise InvariantBroken(f"the page tables of {branch.key} differ in length")
    if branch.present > 0 and branch.num_columns == 0:
        raise InvariantBroken(f"{branch.key} has tokens but no pages")
    nodes = branch.cursor.path() if branch.cursor is not None else []
    for index, column in enumerate(column for node in nodes for column in node.columns):
        for own, cached in zip(branch.column(index), column, strict=True):
            if own not in (cached, TOMBSTONE):
                raise InvariantBroken(f"{branch.key} keeps page {own} where the prefix cache has {cached}")
