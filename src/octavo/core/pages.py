"""The page allocator: who owns each page, which work still names it, and which pages are free.

A page is, at any moment, exactly one of
  free        no owner, named by no open ticket: may be taken
  ticketed    no owner, but an open ticket (step, copy, swap, transfer) still names it
  cached      owned by the prefix tree alone
  referenced  owned by a branch or a lease (and perhaps the tree as well)
so free + cached + referenced + ticketed = total, after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from octavo.core.errors import InvalidInput, InvariantBroken, OutOfPages, UseAfterRelease

__all__ = ["TREE", "Owner", "OwnerKind", "PageAllocator", "PageCounts", "PageInfo", "PageState", "Ticket"]


class OwnerKind(str, Enum):
    """What sort of thing keeps a page."""

    BRANCH = "branch"
    TREE = "tree"
    LEASE = "lease"


class Owner(NamedTuple):
    """A typed reference owner: a branch key, the prefix tree, or a lease id."""

    kind: OwnerKind
    key: object


TREE = Owner(OwnerKind.TREE, "")


class PageState(str, Enum):
    """The four classes that the audit adds up."""

    FREE = "free"
    TICKETED = "ticketed"
    CACHED = "cached"
    REFERENCED = "referenced"


_FREE, _TICKETED, _CACHED, _REFERENCED = PageState  # an enum's attribute is looked up slowly


class PageCounts(NamedTuple):
    """Pages by class; `evictable` are the cached ones that no open ticket names."""

    free: int
    cached: int
    referenced: int
    ticketed: int
    evictable: int
    total: int


@dataclass(frozen=True)
class PageInfo:
    """All that is known about one page: its owners with their multiplicity, and the open tickets that name it."""

    page: int
    state: PageState
    owners: tuple[tuple[Owner, int], ...]
    tickets: tuple[str, ...]  # kinds, oldest ticket first


class Ticket:
    """Work in flight that names pages. A `wide` ticket names every page that is referenced while it is open."""

    __slots__ = ("kind", "number", "pages", "wide")

    def __init__(self, number: int, kind: str, pages: list[int], wide: bool) -> None:
        self.number = number
        self.kind = kind
        self.pages = pages
        self.wide = wide


@dataclass
class _Lease:
    pages: tuple[int, ...]
    expires_at: float


class PageAllocator:
    """Hands out page ids 0..num_pages-1, lowest free id first, and counts their owners and tickets.

    `on_free(page)` is called when a page becomes free, `on_evictable(page)` when it becomes cached and unnamed.
    Every call costs what the pages it names cost; only `audit` looks at the whole pool.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        on_free: Callable[[int], None] | None = None,
        on_evictable: Callable[[int], None] | None = None,
    ) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise InvalidInput("num_pages", num_pages, "give a positive integer")
        self.num_pages = num_pages
        self.on_free = on_free
        self.on_evictable = on_evictable
        self._free = list(range(num_pages))  # a heap: the order depends on the free set, not on history
        self._owners: list[dict[Owner, int] | None] = [None] * num_pages
        self._state = [_FREE] * num_pages
        self._count = dict.fromkeys(PageState, 0)
        self._count[_FREE] = num_pages
        self._evictable = 0
        self._is_evictable = bytearray(num_pages)
        self._tickets: dict[int, Ticket] = {}
        self._wide: dict[int, Ticket] = {}
        self._pins: dict[int, list[int]] = {}  # page -> numbers of the open tickets that name it
        self._leases: dict[str, _Lease] = {}
        self._next_ticket = 0
        self.num_taken = 0  # pages handed out since start
        self.num_freed = 0  # pages that became free again since start

    # ---- owners

    @property
    def num_free(self) -> int:
        """Pages that can be taken right now."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Cached pages that no open ticket names: they become free as soon as the tree lets go."""
        return self._evictable

    @property
    def num_obtainable(self) -> int:
        """Free pages, and those that become free as soon as the tree lets go."""
        return len(self._free) + self._evictable

    @property
    def num_referenced(self) -> int:
        """Pages that a branch or a lease owns."""
        return self._count[_REFERENCED]

    def take(self, num_pages: int, owner: Owner) -> list[int]:
        """Take the `num_pages` lowest free pages for `owner`. Raises `OutOfPages`, leaving nothing changed."""
        if num_pages > len(self._free):
            raise OutOfPages(f"{num_pages} pages wanted, {len(self._free)} free of {self.num_pages}")
        pages = [heappop(self._free) for _ in range(num_pages)]
        self.num_taken += num_pages
        for page in pages:
            self._owners[page] = {owner: 1}
            self._refresh(page)
        return pages

    def add_owner(self, page: int, owner: Owner) -> None:
        """Give a page one more owner (or the same one again). Raises `UseAfterRelease` for a free page.

        A ticketed page may be owned again: nobody has written to it since it lost its last owner.
        """
        if self._state[self._checked(page)] is _FREE:
            raise UseAfterRelease(f"page {page} is free: take it before adding an owner")
        owners = self._owners[page]
        if owners is None:
            owners = self._owners[page] = {}
        owners[owner] = owners.get(owner, 0) + 1
        self._refresh(page)

    def drop_owner(self, page: int, owner: Owner) -> bool:
        """Take one reference of `owner` back; True if that was the page's last owner.

        Not idempotent: raises `UseAfterRelease` if `owner` has no reference to the page.
        """
        owners = self._owners[self._checked(page)]
        if owners is None or owner not in owners:
            raise UseAfterRelease(f"page {page} is not owned by {owner.kind.value} {owner.key!r}")
        owners[owner] -= 1
        if owners[owner]:
            return False
        del owners[owner]
        if not owners:
            self._owners[page] = None
        if owner != TREE and all(other == TREE for other in owners):
            for number in self._wide:
                self._pin(page, number)
        self._refresh(page)
        return not owners

    def is_shared(self, page: int) -> bool:
        """True if more than one reference keeps the page: writing to it needs a copy first."""
        owners = self._owners[self._checked(page)]
        return owners is not None and (len(owners) > 1 or any(count > 1 for count in owners.values()))

    def is_held_by_others(self, page: int, owner: Owner) -> bool:
        """True if a branch or a lease other than `owner` holds the page."""
        return any(other not in (owner, TREE) for other in self._owners[self._checked(page)] or ())

    def is_evictable(self, page: int) -> bool:
        """True if the tree alone owns the page and no open ticket names it."""
        return bool(self._is_evictable[self._checked(page)])

    def owners(self, page: int) -> dict[Owner, int]:
        """A copy of the page's owners with their multiplicity, in the order in which they came."""
        return dict(self._owners[self._checked(page)] or {})

    # ---- tickets

    def open_ticket(self, kind: str, pages: Iterable[int] | None = None) -> Ticket:
        """Open a ticket that names `pages`, or (None) every page that a branch or a lease owns while it is open.

        The latter costs nothing per page: a page is named at the moment when its last such owner drops it.
        Raises `UseAfterRelease` if one of `pages` is free.
        """
        named = list(pages or ())
        for page in named:
            if self._state[self._checked(page)] is _FREE:
                raise UseAfterRelease(f"page {page} is free: a ticket cannot name it")
        ticket = Ticket(self._next_ticket, kind, [], pages is None)
        self._next_ticket += 1
        self._tickets[ticket.number] = ticket
        if ticket.wide:
            self._wide[ticket.number] = ticket
        for page in named:
            self._pin(page, ticket.number)
            self._refresh(page)
        return ticket

    def retire(self, ticket: Ticket) -> None:
        """The work is done: its pages may be reused once nothing else names or owns them. Idempotent."""
        if self._tickets.get(ticket.number) is not ticket:
            return
        del self._tickets[ticket.number]
        self._wide.pop(ticket.number, None)
        for page in ticket.pages:
            pins = self._pins[page]
            pins.remove(ticket.number)
            if not pins:
                del self._pins[page]
            self._refresh(page)

    # ---- leases

    def lease(self, pages: Sequence[int], lease_id: str, expires_at: float) -> None:
        """Keep `pages` for a transfer or a swap, beyond the life of their request, until `expires_at`.

        A second lease of the same id is an error (`InvalidInput`); a free page raises `UseAfterRelease`.
        """
        if lease_id in self._leases:
            raise InvalidInput("lease_id", lease_id, "end the lease of this id first, or give a new id")
        for page in pages:
            if self._state[self._checked(page)] is _FREE:
                raise UseAfterRelease(f"page {page} is free: it cannot be leased")
        self._leases[lease_id] = _Lease(tuple(pages), expires_at)
        for page in pages:
            self.add_owner(page, Owner(OwnerKind.LEASE, lease_id))

    def end_lease(self, lease_id: str) -> None:
        """Give the lease's pages back. Idempotent."""
        lease = self._leases.pop(lease_id, None)
        for page in lease.pages if lease else ():
            self.drop_owner(page, Owner(OwnerKind.LEASE, lease_id))

    def expire_leases(self, now: float) -> list[str]:
        """End every lease with `expires_at <= now`; their ids, in the order in which they were made."""
        expired = [lease_id for lease_id, lease in self._leases.items() if lease.expires_at <= now]
        for lease_id in expired:
            self.end_lease(lease_id)
        return expired

    def lease_owners(self) -> Iterable[tuple[int, Owner]]:
        """(page, owner) of every reference that a lease holds."""
        for lease_id, lease in self._leases.items():
            for page in lease.pages:
                yield page, Owner(OwnerKind.LEASE, lease_id)

    # ---- looking

    def counts(self) -> PageCounts:
        """Pages by class, without looking at the pool."""
        count = self._count
        return PageCounts(
            free=count[_FREE],
            cached=count[_CACHED],
            referenced=count[_REFERENCED],
            ticketed=count[_TICKETED],
            evictable=self._evictable,
            total=self.num_pages,
        )

    def describe(self, page: int) -> PageInfo:
        """Owners, tickets and class of one page. Raises `InvalidInput` if there is no such page."""
        kinds = tuple(self._tickets[number].kind for number in self._pins.get(self._checked(page), ()))
        return PageInfo(page, self._state[page], tuple(self.owners(page).items()), kinds)

    def audit(self, expected: Mapping[int, Mapping[Owner, int]] | None = None) -> PageCounts:
        """Recount the whole pool; raise `InvariantBroken` on any difference.

        `expected`: what page tables, the tree and the leases say the owners of each page are (pages without any may be
        left out). Given, every page's owners must equal it.
        """
        if sorted(self._free) != [page for page in range(self.num_pages) if self._state[page] is _FREE]:
            raise InvariantBroken("the free list differs from the pages in state free")
        self._audit_tickets()
        states = [self._classify(page) for page in range(self.num_pages)]
        for page, state in enumerate(states):
            if state is not self._state[page]:
                raise InvariantBroken(f"page {page} is {state.value}, recorded as {self._state[page].value}")
            if expected is not None and self.owners(page) != dict(expected.get(page, {})):
                raise InvariantBroken(f"page {page} has owners {self.owners(page)}, named by {expected.get(page, {})}")
        counts = self.counts()
        if any(states.count(state) != self._count[state] for state in PageState):
            raise InvariantBroken(f"page counters are wrong: {counts}")
        evictable = [state is _CACHED and page not in self._pins for page, state in enumerate(states)]
        if evictable != [bool(flag) for flag in self._is_evictable] or sum(evictable) != counts.evictable:
            raise InvariantBroken(f"the evictable pages are recorded wrongly: {counts}")
        return counts

    # ---- inside

    def _audit_tickets(self) -> None:
        named: dict[int, list[int]] = {}
        for ticket in self._tickets.values():
            for page in ticket.pages:
                named.setdefault(page, []).append(ticket.number)
        if {page: sorted(pins) for page, pins in self._pins.items()} != {p: sorted(n) for p, n in named.items()}:
            raise InvariantBroken("the pages named by tickets differ from the tickets recorded at the pages")

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise InvalidInput("page", page, f"give a page id in [0, {self.num_pages})")
        return page

    def _pin(self, page: int, number: int) -> None:
        self._pins.setdefault(page, []).append(number)
        self._tickets[number].pages.append(page)

    def _classify(self, page: int) -> PageState:
        owners = self._owners[page]
        if owners is None:
            return _TICKETED if page in self._pins else _FREE
        return _CACHED if len(owners) == 1 and TREE in owners else _REFERENCED

    def _refresh(self, page: int) -> None:
        """Bring the page's class, the counters and the free list up to date after its owners or tickets changed."""
        old, new = self._state[page], self._classify(page)
        self._state[page] = new
        self._count[old] -= 1
        self._count[new] += 1
        if new is _FREE and old is not _FREE:
            heappush(self._free, page)
            self.num_freed += 1
            if self.on_free is not None:
                self.on_free(page)
        evictable = new is _CACHED and page not in self._pins
        if evictable == bool(self._is_evictable[page]):
            return
        self._is_evictable[page] = evictable
        self._evictable += 1 if evictable else -1
        if evictable and self.on_evictable is not None:
            self.on_evictable(page)
