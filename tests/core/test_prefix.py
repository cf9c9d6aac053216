"""The radix tree against a dictionary of prefixes: matches, tombstones, windows, splitting, eviction order."""

from itertools import chain

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.kv_groups import KVGroup
from octavo.core.pages import TREE, Owner, OwnerKind, PageAllocator
from octavo.core.prefix import TOMBSTONE, RadixCache, namespace_key
from octavo.core.prefix_node import common_length
from octavo.core.undo import UndoLog

USER = Owner(OwnerKind.BRANCH, ("user", 0))
UNITS = st.lists(st.integers(0, 1), max_size=10).map(tuple)
NAMESPACES = st.sampled_from(["x", "y"])


def spelled(node):
    """The units of the path down to a node."""
    return tuple(chain.from_iterable(n.units for n in node.path()))


def shape(tree):
    """Everything that the tree holds, as plain values: a root or node per line."""
    nodes = [*tree.roots(), *tree.nodes()]
    return [(n.namespace, spelled(n), n.start, list(n.columns), n.locks, n.stamp) for n in nodes]


class TreeMachine(RuleBasedStateMachine):
    """`cached` maps (namespace, units of a prefix that ends at a page's end or with a tail) to its last column.

    The model's eviction order: every use of a prefix stamps all of its pages; the leaf with the oldest stamp goes.
    """

    @initialize(page_size=st.sampled_from([1, 2, 4]), windows=st.sampled_from([(0,), (0, 3), (2,), (0, 1, 5)]))
    def start(self, page_size, windows):
        self.size = page_size
        groups = [KVGroup((g,), window=window) for g, window in enumerate(windows)]
        self.windows = windows
        self.pages = PageAllocator(400)
        self.tree = RadixCache(page_size, len(groups), allocator=self.pages, groups=groups)
        self.cached, self.stamps, self.now = {}, {}, 0
        self.locked = []  # (node, namespace, units)

    # ---- the model

    def prefixes(self, units):
        return [units[:end] for end in range(self.size, len(units) + 1, self.size)]

    def touch(self, namespace, units):
        self.now += 1
        for prefix in self.prefixes(units):
            self.stamps[namespace, prefix] = self.now

    def continues(self, namespace, units, whole):
        """The columns of which a page starts with the units beyond `whole`."""
        ends = range(len(units), whole + self.size + 1)
        found = [(prefix, column) for (other, prefix), column in self.cached.items() if other == namespace]
        return [column for prefix, column in found if len(prefix) in ends and prefix[: len(units)] == units]

    def is_valid(self, namespace, units, column_of):
        """True if the pages of every group cover what a branch with these units may read."""
        for group, window in enumerate(self.windows):
            low = max(0, len(units) - window) if window else 0
            for column in range(low // self.size, -(-len(units) // self.size)):
                if column_of[column][group] == TOMBSTONE:
                    return False
        return True

    def best_match(self, namespace, units, whole_pages=False):
        """The longest prefix of `units` that some choice of cached pages makes valid."""
        for length in range(len(units), 0, -1):
            whole = length - length % self.size
            columns = [self.cached.get((namespace, prefix)) for prefix in self.prefixes(units[:whole])]
            if None in columns or (whole_pages and length > whole):
                continue
            lasts = [[]]
            if length > whole:
                lasts = [[column] for column in self.continues(namespace, units[:length], whole)]
            if any(self.is_valid(namespace, units[:length], columns + last) for last in lasts):
                return length
        return 0

    # ---- rules

    @rule(namespace=NAMESPACES, units=UNITS, holes=st.integers(0, 2**12), publish_tail=st.booleans())
    def insert(self, namespace, units, holes, publish_tail):
        whole = len(units) - len(units) % self.size
        if not publish_tail:
            units = units[:whole]
        assume(self.pages.num_free > 40)
        columns = []
        for index in range(-(-len(units) // self.size)):
            hole = [w > 0 and bool(holes >> (index + g) & 1) for g, w in enumerate(self.windows)]
            columns.append(tuple(TOMBSTONE if h else self.pages.take(1, USER)[0] for h in hole))
        own = self.tree.insert(namespace, units, columns)
        assert len(own) == whole // self.size
        for prefix, column, tree_column in zip(self.prefixes(units), columns, own, strict=False):
            old = self.cached.get((namespace, prefix), (TOMBSTONE,) * len(column))
            filled = tuple(new if kept == TOMBSTONE else kept for kept, new in zip(old, column, strict=True))
            assert tree_column == filled
            self.cached[namespace, prefix] = filled
            for end in range(len(prefix) - self.size + 1, len(prefix)):
                self.cached.pop((namespace, prefix[:end]), None)  # tails that the page covers
        if whole:
            self.touch(namespace, units[:whole])
        if units[whole:] and TOMBSTONE not in columns[-1]:
            self.insert_tail(namespace, units, whole, columns[-1])
        for column in columns:
            for page in column:
                if page != TOMBSTONE:
                    self.pages.drop_owner(page, USER)

    def insert_tail(self, namespace, units, whole, column):
        if self.continues(namespace, units, whole):
            return
        for end in range(whole + 1, len(units)):
            self.cached.pop((namespace, units[:end]), None)
        self.cached[namespace, units] = column
        self.now += 1
        self.stamps[namespace, units] = self.now

    @rule(namespace=NAMESPACES, units=UNITS, whole_pages=st.booleans())
    def match(self, namespace, units, whole_pages):
        before = shape(self.tree)
        match = self.tree.match(namespace, units, whole_pages=whole_pages)
        assert shape(self.tree) == before
        least = self.best_match(namespace, units, whole_pages=True)
        most = self.best_match(namespace, units, whole_pages)
        # With holes in the windows the one partly matching page that is looked at need not be the best.
        assert match.num_units == most or (any(self.windows) and least <= match.num_units < most)
        assert self.is_valid(namespace, units[: match.num_units], match.columns)
        assert len(match.columns) == -(-match.num_units // self.size)
        for prefix, column in zip(self.prefixes(units[: match.num_units]), match.columns, strict=False):
            assert self.cached[namespace, prefix] == column
        if match.num_units % self.size:
            used = units[: match.num_units]
            assert match.columns[-1] in self.continues(namespace, used, len(used) - len(used) % self.size)

    @rule(namespace=NAMESPACES, units=UNITS, take_back=st.booleans())
    def acquire(self, namespace, units, take_back):
        before = shape(self.tree)
        undo = UndoLog()
        match = self.tree.match(namespace, units)
        node = self.tree.acquire(namespace, match, undo)
        used = units[: match.num_units - match.num_units % self.size]
        assert spelled(node) == used
        if take_back:
            self.tree.unlock(node, touch=False)
            undo.rollback()
            assert shape(self.tree) == before
        else:
            self.touch(namespace, used)
            self.locked.append((node, namespace, used))

    @rule(which=st.integers(0, 3))
    def unlock(self, which):
        if which < len(self.locked):
            node, namespace, units = self.locked.pop(which)
            self.tree.unlock(node)
            self.touch(namespace, units)

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        if any(self.windows):
            evictable = self.reachable()
            freed = self.tree.evict(count)
            assert freed >= min(count, evictable)
            self.resync()
        else:
            expected = [self.evict_from_model() for _ in range(count)]
            assert self.tree.evict(count) == sum(expected)

    def evict_from_model(self):
        leaves = [
            key
            for key in self.cached
            if not any(k != key and k[0] == key[0] and k[1][: len(key[1])] == key[1] for k in self.cached)
            and not any(namespace == key[0] and units == key[1] for _, namespace, units in self.locked)
        ]
        if not leaves:
            return False
        victim = min(leaves, key=lambda key: self.stamps[key])
        del self.cached[victim]
        parent = (victim[0], victim[1][: (len(victim[1]) - 1) // self.size * self.size])
        self.stamps[parent] = max(self.stamps.get(parent, 0), self.stamps[victim])
        return True

    def reachable(self):
        """Pages that eviction can free: windowed ones, and those on no locked path."""
        kept = {(namespace, prefix) for _, namespace, units in self.locked for prefix in self.prefixes(units)}
        return sum(
            page != TOMBSTONE and (window > 0 or key not in kept)
            for key, column in self.cached.items()
            for page, window in zip(column, self.windows, strict=True)
        )

    def resync(self):
        """Read the survivors back: pages may have turned into tombstones, leaves may have gone, nothing else."""
        survivors = {}
        for node in self.tree.nodes():
            path = spelled(node)
            start = node.start * self.size
            for index, column in enumerate(node.columns):
                survivors[node.namespace, path[: start + (index + 1) * self.size]] = column
        for key, column in survivors.items():
            assert all(new in (old, TOMBSTONE) for old, new in zip(self.cached[key], column, strict=True))
        for _, namespace, units in self.locked:
            assert all((namespace, prefix) in survivors for prefix in self.prefixes(units))
        self.cached = survivors

    @invariant()
    def sound(self):
        self.tree.audit()
        held = {}
        for node in self.tree.nodes():
            path = spelled(node)
            for index, column in enumerate(node.columns):
                assert self.cached[node.namespace, path[: (node.start + index + 1) * self.size]] == column
                held.update({page: {TREE: 1} for page in column if page != TOMBSTONE})
        assert sum(len(node.columns) for node in self.tree.nodes()) == len(self.cached)
        self.pages.audit(held)

    def teardown(self):
        if hasattr(self, "tree"):
            for node, _, _ in self.locked:
                self.tree.unlock(node)
            self.tree.flush()
            assert self.pages.audit({}).free == 400 and not self.tree.nodes() and not self.tree.roots()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def build(page_size=2, windows=(0,), num_pages=40):
    groups = [KVGroup((g,), window=window) for g, window in enumerate(windows)]
    pages = PageAllocator(num_pages)
    return RadixCache(page_size, len(windows), allocator=pages, groups=groups), pages


def publish(tree, units, namespace=""):
    """Insert `units` with fresh pages in all groups, as a branch does that ends at once; the columns."""
    pages, groups = tree.allocator, len(tree.groups)
    columns = [tuple(pages.take(groups, USER)) for _ in range(-(-len(units) // tree.page_size))]
    tree.insert(namespace, units, columns)
    for column in columns:
        for page in column:
            pages.drop_owner(page, USER)
    return columns


def test_a_longer_page_replaces_the_tail_that_it_covers():
    tree, pages = build(4)
    publish(tree, [1, 2])
    publish(tree, [1])  # covered already
    publish(tree, [1, 2, 3])
    assert [node.units for node in tree.nodes()] == [[1, 2, 3]]
    publish(tree, [1, 2, 3, 4])
    publish(tree, [1, 2, 3, 5])
    assert [node.units for node in tree.nodes()] == [[1, 2, 3, 4], [1, 2, 3, 5]] and pages.counts().cached == 2


def test_sinks_and_window_decide_how_long_a_match_is():
    tree, _ = build(1)
    tree.groups = (KVGroup((0,), window=2, sinks=1),)
    publish(tree, range(6))
    node = tree.nodes()[0]
    node.columns[2] = (TOMBSTONE,)
    assert tree.match("", range(6)).num_units == 6  # sees 0 and 4, 5
    assert tree.match("", range(4)).num_units == 2  # would see 0 and 2, 3
    node.columns[0] = (TOMBSTONE,)
    assert tree.match("", range(6)).num_units == 0


def test_decoding_makes_one_long_edge_not_a_chain():
    tree, pages = build(2)
    undo = UndoLog()
    node = tree.acquire("", tree.match("", [0]), undo)
    for step in range(5):
        grown, _ = tree.extend(node, [step, step], [tuple(pages.take(1, USER))])
        tree.lock(grown)
        tree.unlock(node)
        node = grown
    assert len(tree.nodes()) == 1 and node.end == 5


def test_a_leaf_that_another_user_holds_does_not_grow_under_them():
    tree, _ = build(1)
    publish(tree, [7])
    holder = tree.acquire("", tree.match("", [7]), UndoLog())
    publish(tree, [7, 8])
    assert holder.units == [7] and len(tree.nodes()) == 2


def test_windowed_pages_of_long_ago_go_before_leaves_used_since():
    tree, pages = build(1, windows=(0, 1))
    columns = publish(tree, [1, 2, 3])
    publish(tree, [9])
    node = tree.acquire("", tree.match("", [1, 2, 3]), UndoLog())
    tree.unlock(node)  # the leaf is used now, its windowed pages were used at the start
    assert tree.evict(3) == 3
    assert [column[1] for column in tree.nodes()[0].columns] == [TOMBSTONE] * 3
    assert tree.match("", [9]).num_units == 1 and tree.stats.evicted_pages == 3
    assert not any(pages.owners(column[1]) for column in columns)


def test_evicting_past_a_page_that_somebody_uses_frees_what_is_above_it():
    tree, pages = build(1)
    columns = publish(tree, [1, 2, 3])
    pages.add_owner(columns[2][0], USER)
    assert tree.evict(1) == 1 and pages.owners(columns[2][0]) == {USER: 1}
    assert tree.match("", [1, 2, 3]).num_units == 1


def test_shrink_counts_pages_that_a_step_still_names():
    tree, pages = build(1)
    publish(tree, [1, 2, 3])
    ticket = pages.open_ticket("step", range(3))
    tree.shrink(2)
    assert pages.counts().cached == 2 and pages.counts().ticketed == 1
    pages.retire(ticket)


def test_the_eviction_heap_stays_small():
    tree, _ = build(1)
    publish(tree, [1])
    for _ in range(500):
        tree.unlock(tree.acquire("", tree.match("", [1]), UndoLog()))
    assert len(tree._queue._heap) <= 64


def test_a_leaf_whose_use_was_taken_back_can_be_evicted():
    tree, pages = build(1)
    publish(tree, [1])
    undo = UndoLog()
    node = tree.acquire("", tree.match("", [1]), undo)
    assert tree.evict(1) == 0
    tree.unlock(node, touch=False)
    undo.rollback()
    assert tree.evict(1) == 1 == pages.num_free - 39


def test_empty_namespaces_leave_nothing_behind():
    tree, _ = build(1)
    for salt in range(5):
        publish(tree, [1, 2], namespace=str(salt))
    assert len(tree.roots()) == 5
    assert tree.flush() == 10 and tree.roots() == []


def test_namespace_key_depends_on_every_part_and_on_nothing_else():
    base = {"model": "m", "salt": "s"}
    assert namespace_key(base) == namespace_key({"salt": "s", "model": "m"})
    others = [{"model": "m", "salt": "t"}, {"model": "ms", "salt": ""}, {"model": "m"}, {"mode": "lm", "salt": "s"}]
    assert len({namespace_key(parts) for parts in [base, *others]}) == 5
    assert namespace_key(base, key=b"secret") != namespace_key(base)
    assert namespace_key({"salt": 1}) != namespace_key({"salt": "1"})


@pytest.mark.parametrize(("a", "b", "length"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 4), (1, 3, 4), 1)])
def test_common_length(a, b, length):
    assert common_length(a, b) == length == common_length(b, a)


def test_wrong_use_is_an_error():
    tree, pages = build(2)
    with pytest.raises(InvalidInput, match="groups"):
        RadixCache(2, 2, allocator=pages, groups=[KVGroup((0,))])
    root = tree.acquire("", tree.match("", [1]), UndoLog())
    with pytest.raises(InvalidInput, match="units"):
        tree.extend(root, [1], [(0,)])
    tree.unlock(root)
    with pytest.raises(InvariantBroken, match="not locked"):
        tree.unlock(root)
    with pytest.raises(InvariantBroken, match="split"):
        tree._split(root, 1)
    with pytest.raises(InvariantBroken, match="root"):
        tree._remove(root)


def _broken(change):
    tree, _ = build(2)
    for units in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7]):
        publish(tree, units)
    tree.audit()
    change(tree, tree.nodes())
    with pytest.raises(InvariantBroken) as broken:
        tree.audit()
    return str(broken.value)


def test_the_audit_notices_every_kind_of_damage():
    assert "wrong place" in _broken(lambda tree, nodes: setattr(nodes[1], "start", 5))
    assert "columns for its units" in _broken(lambda tree, nodes: nodes[1].columns.append((0,)))
    assert "is a tail" in _broken(lambda tree, nodes: setattr(nodes[3], "locks", 1))
    assert "order" in _broken(lambda tree, nodes: nodes[0].keys.reverse())

    def cover(tree, nodes):
        nodes[0].keys.insert(2, (5,))
        nodes[0].keys.sort()
        nodes[0].children[(5,)] = nodes[3]

    assert "covers" in _broken(cover)
