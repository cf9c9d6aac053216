"""The page allocator: owners, tickets, leases, and the audit that adds them up."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.errors import InvalidInput, InvariantBroken, OutOfPages, UseAfterRelease
from octavo.core.pages import TREE, Owner, OwnerKind, PageAllocator, PageState

A, B = Owner(OwnerKind.BRANCH, ("a", 0)), Owner(OwnerKind.BRANCH, ("b", 0))
PAGES = st.integers(0, 7)
OWNERS = st.sampled_from([A, B, TREE])


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against plain counters: owners per page, and the pages that each open ticket names."""

    @initialize()
    def start(self):
        self.freed, self.evictable = [], []
        self.pages = PageAllocator(8, on_free=self.freed.append, on_evictable=self.evictable.append)
        self.owners = [Counter() for _ in range(8)]
        self.tickets = {}  # ticket -> named pages
        self.leases = {}  # id -> (pages, expiry)

    def is_free(self, page):
        return not self.owners[page] and not any(page in named for named in self.tickets.values())

    def is_referenced(self, page):
        return any(owner != TREE for owner in self.owners[page])

    @rule(count=st.integers(0, 5), owner=OWNERS)
    def take(self, count, owner):
        free = [page for page in range(8) if self.is_free(page)]
        if count > len(free):
            with pytest.raises(OutOfPages):
                self.pages.take(count, owner)
            return
        assert self.pages.take(count, owner) == free[:count]
        for page in free[:count]:
            self.owners[page][owner] += 1

    @rule(page=PAGES, owner=OWNERS)
    def add_owner(self, page, owner):
        if self.is_free(page):
            with pytest.raises(UseAfterRelease):
                self.pages.add_owner(page, owner)
        else:
            self.pages.add_owner(page, owner)
            self.owners[page][owner] += 1

    def model_drop(self, page, owner):
        self.owners[page] -= Counter([owner])
        if owner != TREE and not self.is_referenced(page):
            for ticket, named in self.tickets.items():
                if ticket.wide:
                    named.append(page)

    @rule(page=PAGES, owner=OWNERS)
    def drop_owner(self, page, owner):
        if not self.owners[page][owner]:
            with pytest.raises(UseAfterRelease):
                self.pages.drop_owner(page, owner)
        else:
            self.model_drop(page, owner)
            assert self.pages.drop_owner(page, owner) == (not self.owners[page])

    @rule(named=st.none() | st.lists(PAGES, max_size=3))
    def open_ticket(self, named):
        if any(self.is_free(page) for page in named or ()):
            with pytest.raises(UseAfterRelease):
                self.pages.open_ticket("copy", named)
        elif len(self.tickets) < 3:
            self.tickets[self.pages.open_ticket("step" if named is None else "copy", named)] = list(named or ())

    @rule(which=st.integers(0, 2))
    def retire(self, which):
        if which < len(self.tickets):
            ticket = list(self.tickets)[which]
            self.pages.retire(ticket)
            self.pages.retire(ticket)  # idempotent
            del self.tickets[ticket]

    @rule(lease_id=st.sampled_from("xy"), pages=st.lists(PAGES, max_size=2), expires_at=st.integers(1, 9))
    def lease(self, lease_id, pages, expires_at):
        if lease_id in self.leases:
            with pytest.raises(InvalidInput, match="lease_id"):
                self.pages.lease(pages, lease_id, expires_at)
        elif any(self.is_free(page) for page in pages):
            with pytest.raises(UseAfterRelease):
                self.pages.lease(pages, lease_id, expires_at)
        else:
            self.pages.lease(pages, lease_id, expires_at)
            self.leases[lease_id] = (pages, expires_at)
            for page in pages:
                self.owners[page][Owner(OwnerKind.LEASE, lease_id)] += 1

    @rule(now=st.integers(0, 9))
    def expire_leases(self, now):
        expired = [lease_id for lease_id, (_, expires_at) in self.leases.items() if expires_at <= now]
        assert self.pages.expire_leases(now) == expired
        for lease_id in expired:
            self.pages.end_lease(lease_id)  # idempotent
            for page in self.leases.pop(lease_id)[0]:
                self.model_drop(page, Owner(OwnerKind.LEASE, lease_id))

    @invariant()
    def same_as_model(self):
        counts = self.pages.audit({page: dict(owners) for page, owners in enumerate(self.owners)})
        assert counts.free + counts.cached + counts.referenced + counts.ticketed == 8
        assert counts.free == self.pages.num_free == sum(map(self.is_free, range(8)))
        assert counts.referenced == sum(map(self.is_referenced, range(8)))
        for page, owners in enumerate(self.owners):
            info = self.pages.describe(page)
            assert dict(info.owners) == dict(owners)
            named = [ticket.kind for ticket, pages in self.tickets.items() for p in pages if p == page]
            assert Counter(info.tickets) == Counter(named)
            assert self.pages.is_shared(page) == (owners.total() > 1)
            cached = bool(owners) and not self.is_referenced(page)
            assert (info.state is PageState.CACHED) == cached
            assert self.pages.is_evictable(page) == (cached and not named)
        assert Counter(self.pages.lease_owners()) == Counter(
            (page, Owner(OwnerKind.LEASE, lease_id)) for lease_id, (pages, _) in self.leases.items() for page in pages
        )

    def teardown(self):
        if not hasattr(self, "pages"):
            return
        for ticket in self.tickets:
            self.pages.retire(ticket)
        self.pages.expire_leases(10)
        for page in range(8):
            for owner, count in self.pages.owners(page).items():
                for _ in range(count):
                    self.pages.drop_owner(page, owner)
        assert self.pages.audit({}).free == 8


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_pages_are_taken_lowest_first_whatever_the_history():
    pages = PageAllocator(4)
    pages.take(4, A)
    for page in (2, 0, 3):
        pages.drop_owner(page, A)
    assert pages.take(2, B) == [0, 2]


def test_a_page_named_by_a_ticket_is_not_reused_until_it_retires():
    pages = PageAllocator(1)
    pages.take(1, A)
    first, second = pages.open_ticket("copy", [0]), pages.open_ticket("step")
    assert pages.drop_owner(0, A)
    assert pages.describe(0).tickets == ("copy", "step") and pages.counts().ticketed == 1
    pages.retire(first)
    with pytest.raises(OutOfPages):
        pages.take(1, B)
    pages.retire(second)
    assert pages.take(1, B) == [0]


def test_a_wide_ticket_leaves_pages_alone_that_nobody_references():
    pages = PageAllocator(2)
    pages.take(2, A)
    for page in (0, 1):
        pages.add_owner(page, TREE)
    pages.drop_owner(0, A)
    pages.open_ticket("step")
    pages.drop_owner(1, A)
    assert pages.is_evictable(0) and not pages.is_evictable(1)
    pages.drop_owner(0, TREE)
    pages.drop_owner(1, TREE)
    assert pages.describe(0).state is PageState.FREE and pages.describe(1).state is PageState.TICKETED


@pytest.mark.parametrize("num_pages", [0, -1, True, 1.5])
def test_a_pool_needs_pages(num_pages):
    with pytest.raises(InvalidInput, match="num_pages"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("page", [-1, 2])
def test_there_is_no_page_outside_the_pool(page):
    pages = PageAllocator(2)
    for call in (pages.describe, pages.is_shared, lambda page: pages.add_owner(page, A)):
        with pytest.raises(InvalidInput, match=r"page = .*\[0, 2\)"):
            call(page)


def _broken(change):
    pages = PageAllocator(3)
    pages.take(2, A)
    pages.add_owner(0, TREE)
    pages.drop_owner(0, A)
    pages.open_ticket("copy", [1])
    pages.audit({0: {TREE: 1}, 1: {A: 1}})
    change(pages)
    with pytest.raises(InvariantBroken) as broken:
        pages.audit({0: {TREE: 1}, 1: {A: 1}})
    return str(broken.value)


def test_the_audit_notices_every_kind_of_damage():
    assert "free list" in _broken(lambda pages: pages._free.append(1))
    assert "tickets" in _broken(lambda pages: pages._pins.clear())
    assert "recorded as" in _broken(lambda pages: pages._owners[0].update({A: 1}))
    assert "owners" in _broken(lambda pages: pages.add_owner(1, A))
    assert "counters" in _broken(lambda pages: pages._count.update({PageState.CACHED: 2}))
    assert "evictable" in _broken(lambda pages: setattr(pages, "_evictable", 0))
