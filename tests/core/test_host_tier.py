"""The host tier alone: what it keeps, what it pushes out, what it finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvariantBroken
from octavo.core.host_tier import HostTier
from octavo.core.prefix_node import PrefixNode

SIZE = 2


def leaf_of(units, namespace: str = "", number: int = 1) -> PrefixNode:
    """A leaf right below the root with all of `units`."""
    root = PrefixNode(0, namespace, None, 0, [], [])
    columns = [(index,) for index in range(-(-len(units) // SIZE))]
    return PrefixNode(number, namespace, root, 0, list(units), columns)


def keep_all(tier: HostTier, units, namespace: str = "") -> list[tuple[int, ...]]:
    """Evict a whole leaf, from its end; the host pages by column, from the end."""
    leaf, kept = leaf_of(units, namespace), []
    while leaf.columns:
        kept.append(tier.keep(leaf))
        leaf.columns.pop()
        del leaf.units[len(leaf.columns) * SIZE :]
        tier.audit()
    return kept


def found(tier: HostTier, units, first: int = 0, namespace: str = "") -> int:
    """How many units it has from column `first` on."""
    return sum(len(entry.units) for entry in tier.match(namespace, units, first))


def test_it_finds_what_it_kept_by_units_and_namespace():
    tier = HostTier(8, SIZE)
    assert keep_all(tier, [1, 2, 3, 4, 5]) == [(0,), (1,), (2,)]
    assert found(tier, [1, 2, 3, 4, 5, 6]) == 5
    assert found(tier, [1, 2, 3, 4, 6]) == 4
    assert found(tier, [1, 2, 9]) == 2 and found(tier, [9, 2]) == 0 and found(tier, [1, 2], namespace="x") == 0
    assert found(tier, [1, 2, 3, 4], first=1) == 2 and found(tier, [8, 2, 3, 4], first=1) == 0
    assert keep_all(tier, [1, 2, 3, 4]) == [(), ()]  # they are there


def test_what_is_missing_in_between_ends_a_match():
    tier, leaf = HostTier(8, SIZE), leaf_of([1, 2, 3, 4])
    tier.keep(leaf)  # only the second column
    assert found(tier, [1, 2, 3, 4]) == 0 and found(tier, [1, 2, 3, 4], first=1) == 2


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    tier = HostTier(3, SIZE)
    keep_all(tier, [1, 1, 2, 2])
    keep_all(tier, [5, 5])
    tier.use(tier.match("", [1, 1, 2, 2], 0))
    keep_all(tier, [6, 6])
    assert (found(tier, [1, 1, 2, 2]), found(tier, [5, 5]), found(tier, [6, 6])) == (4, 0, 2)
    keep_all(tier, [7, 7])
    assert (found(tier, [1, 1, 2, 2]), found(tier, [6, 6])) == (2, 2)


def test_a_longer_tail_takes_the_place_of_a_shorter_one():
    tier = HostTier(8, 4)
    for units in ([1], [1, 2, 3]):
        leaf = PrefixNode(1, "", PrefixNode(0, "", None, 0, [], []), 0, units, [(0,)])
        tier.keep(leaf)
    assert tier.num_held == 1 and found(tier, [1, 2, 3, 4]) == 3


def test_pinned_pages_stay_and_dropped_ones_come_free_with_the_last_pin():
    freed: list[int] = []
    tier = HostTier(1, SIZE, on_free=freed.append)
    keep_all(tier, [1, 1])
    tier.pin(0)
    tier.pin(0)
    assert keep_all(tier, [2, 2]) == [()]
    tier.drop([0])
    tier.drop([0])  # it is gone already
    tier.audit()
    tier.unpin(0)
    assert freed == [] and keep_all(tier, [2, 2]) == [()]
    tier.unpin(0)
    assert freed == [0] and keep_all(tier, [2, 2]) == [(0,)]
    with pytest.raises(InvariantBroken, match="not pinned"):
        tier.unpin(0)


def test_the_queue_stays_as_small_as_what_it_speaks_of():
    tier = HostTier(4, SIZE)
    for _ in range(500):
        keep_all(tier, [1, 1])
        tier.use(tier.match("", [1, 1], 0))
    assert len(tier._queue._heap) <= 70


@settings(max_examples=60)
@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 2), min_size=1, max_size=7))))
def test_it_never_finds_what_it_does_not_hold(pages, actions):
    tier = HostTier(pages, SIZE)
    written: dict[int, tuple[int, ...]] = {}  # host page -> all units up to the end of its column
    for keeps, units in actions:
        if keeps:
            columns = range(-(-len(units) // SIZE), 0, -1)
            for column, kept in zip(columns, keep_all(tier, units), strict=True):
                written.update((page, tuple(units[: column * SIZE])) for page in kept)
        entries, end = tier.match("", units, 0), 0
        for entry in entries:
            end += len(entry.units)
            assert written[entry.pages[0]] == tuple(units[:end])
        tier.use(entries)
        tier.audit()
    tier.flush()
    tier.audit()
    assert tier.num_held == 0


def broken_ways():
    def twice(tier, entry):
        tier._free.append(entry.pages[0])

    def unheld(tier, entry):
        tier._holder[entry.pages[0]] = tier._root("x")

    def misplaced(tier, entry):
        entry.units = (7, 7)

    def unqueued(tier, entry):
        tier._queue._heap.clear()

    def empty(tier, entry):
        tier._add(entry, (9, 9))

    def detached(tier, entry):
        tier._root("x").children[(1, 1)] = tier._holder[entry.pages[0]] = entry
        tier._free, tier._roots = [1, 2], {"x": tier._root("x")}

    def loose(tier, entry):
        tier._roots.clear()

    def pinned(tier, entry):
        tier.pin(tier._free[0])

    return [twice, unheld, misplaced, unqueued, empty, detached, loose, pinned]


@pytest.mark.parametrize("breaks", broken_ways(), ids=lambda breaks: breaks.__name__)
def test_the_audit_sees(breaks):
    tier = HostTier(3, SIZE)
    keep_all(tier, [1, 1])
    [entry] = tier.match("", [1, 1], 0)
    breaks(tier, entry)
    with pytest.raises(InvariantBroken):
        tier.audit()
