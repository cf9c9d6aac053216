"""What must hold after every event: a cheap check of what has just been touched, and now and then a full recount.

The names are those of the reliability plan:
I1 page classes add up; I2 owners = tables + tree + leases, locks = cursors; I3 a free page is named by nobody; I4 what
is published has been written; I5 no write to a shared page; I6 nothing is referenced at idle; I7 a hit's pages hold its
tokens; I8 one end for each choice, last; I9 nothing after a cancel; I10 indices, usage and logprobs agree; I11 limits;
I12 deadlines; I13 maps are empty at idle; I14 the null model's tokens; I15 reuse within a namespace only; I17 nobody is
passed over or stalls for ever; I18 progress; I19 preemptions are bounded; I23 gauges and counters; I25 the same tokens
however they were scheduled. Besides: VTC tenants do not drift apart; GANG a gang runs, waits and draws as one; DRAFT
drafts are recorded, keep to the bound on gaps, and leave no page behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from null_model import extend_hashes

from octavo.core.pages import TREE, Owner
from octavo.core.prefix_node import TOMBSTONE, PrefixNode
from octavo.core.request import RUNNING

if TYPE_CHECKING:
    from dst.engine import EngineProcess


class Broken(AssertionError):
    """An invariant does not hold; ``code`` is its name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def audit_touched(engine: EngineProcess, keys: Iterable[tuple[str, int]]) -> None:
    """The counters, and the branches of the step that was just made."""
    kv, roster = engine.kv, engine.scheduler._roster
    counts = kv.allocator.counts()
    if counts.free + counts.cached + counts.referenced + counts.ticketed != kv.allocator.num_pages or min(counts) < 0:
        raise Broken("I1", f"{counts} do not add up to {kv.allocator.num_pages}")
    if kv.allocator.num_free != counts.free or kv.allocator.num_taken - kv.allocator.num_freed != (
        counts.total - counts.free
    ):
        raise Broken("I1", f"{kv.allocator.num_free} pages in the free list, {counts.free} counted")
    live = sum(len(request.live_branches) for request in roster.requests.values())
    if len(roster.waiting) + len(roster.running) != live:
        raise Broken("I23", f"{len(roster.waiting)} wait and {len(roster.running)} run, of {live}")
    for request in roster.requests.values():
        if request.gang and len({member.slot is None for member in request.live_branches}) != 1:
            raise Broken("GANG", f"some of the gang {request.request_id} run, and some wait")
    for key in keys:
        branch = kv._branches.get(key)
        for _, page in branch.pages() if branch is not None else ():
            if branch.owner not in (kv.allocator._owners[page] or ()):
                raise Broken("I2", f"{key} names page {page}, which it does not own")


def audit_all(engine: EngineProcess) -> None:
    """Everything, recounted here, and then the product's own audit."""
    _audit_pages(engine)
    _audit_locks(engine)
    _audit_published(engine)
    _audit_branches(engine)
    engine.scheduler.audit()


def audit_idle(engine: EngineProcess) -> None:
    """Nothing is left of requests that have ended."""
    kv = engine.kv
    counts = kv.allocator.counts()
    if counts.ticketed or counts.referenced - engine.num_leased_pages:
        raise Broken("I6", f"at idle, {counts}")
    if any(node.locks for node in [*kv.prefix.roots(), *kv.prefix.nodes()]):
        raise Broken("I6", "at idle, a prefix node is locked")
    for name, held in engine.maps().items():
        if held:
            raise Broken("I13", f"at idle, {name} holds {list(held)[:3]}")


def audit_flushed(engine: EngineProcess) -> None:
    """At idle, an emptied cache leaves every page free."""
    engine.kv.flush_prefix_cache()
    counts = engine.kv.allocator.counts()
    if counts.free != counts.total:
        raise Broken("I6", f"at idle and without a cache, {counts}")


def _audit_pages(engine: EngineProcess) -> None:
    kv = engine.kv
    named: dict[int, dict[Owner, int]] = {}
    references = list(kv.allocator.lease_owners())
    for branch in kv._branches.values():
        references += [(page, branch.owner) for _, page in branch.pages()]
    for node in kv.prefix.nodes():
        references += [(page, TREE) for column in node.columns for page in column if page != TOMBSTONE]
    for page, owner in references:
        owners = named.setdefault(page, {})
        owners[owner] = owners.get(owner, 0) + 1
    for page in kv.allocator._free:
        if page in named:
            raise Broken("I3", f"page {page} is free, and {named[page]} name it")
    for page in range(kv.allocator.num_pages):
        if kv.allocator.owners(page) != named.get(page, {}):
            raise Broken("I2", f"page {page} has owners {kv.allocator.owners(page)}, named by {named.get(page, {})}")


def _audit_locks(engine: EngineProcess) -> None:
    prefix, locks = engine.kv.prefix, {}
    for branch in engine.kv._branches.values():
        if branch.cursor is not None:
            locks[branch.cursor.number, branch.namespace] = locks.get((branch.cursor.number, branch.namespace), 0) + 1
    for node in [*prefix.roots(), *prefix.nodes()]:
        if node.locks != locks.pop((node.number, node.namespace), 0):
            raise Broken("I2", f"prefix node {node.number} has {node.locks} locks, not as many branches")
    if locks:
        raise Broken("I2", f"branches hold nodes that are not in the tree: {locks}")


def _audit_published(engine: EngineProcess) -> None:
    """Every page of the tree holds what its units say."""
    hashes: dict[PrefixNode, list[int]] = {}
    for root in engine.kv.prefix.roots():
        hashes[root] = []
    for node in engine.kv.prefix.nodes():  # parents before children
        salt = engine.salt(node.namespace)
        mine = hashes[node] = list(hashes[node.parent])
        start = len(mine)
        extend_hashes(mine, [*([0] * start), *node.units], salt)
        for index, column in enumerate(node.columns):
            first = start + index * engine.kv.page_size
            wanted = mine[first : first + engine.kv.page_size]
            for page in column:
                if page != TOMBSTONE and engine.model.pages.get(page, [])[: len(wanted)] != wanted:
                    raise Broken("I4", f"prefix node {node.number} publishes page {page}, which holds something else")


def _audit_branches(engine: EngineProcess) -> None:
    roster = engine.scheduler._roster
    for branch in roster.running:
        if branch.state not in RUNNING or branch.slot is None:
            raise Broken("I23", f"{branch} runs without a slot")
    slots = [branch.slot for branch in roster.running]
    if len(set(slots)) != len(slots):
        raise Broken("I2", f"a slot has two owners: {slots}")
