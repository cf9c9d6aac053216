"""The KV cache manager under random plans, with a memory that knows what each slot must hold.

Every slot written holds the whole unit prefix that its key and value depend on. So a page that is stale, foreign,
shared wrongly, copied too late or reused too early is seen as soon as a row reads it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.errors import OutOfPages
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.prefix import TOMBSTONE
from octavo.core.undo import UndoLog

GROUPS = {
    "global": (KVGroup((0,)),),
    "windowed": (KVGroup((0,), window=2),),
    "mixed": (KVGroup((0,)), KVGroup((1,), window=3)),
    "three": (KVGroup((0,), window=1), KVGroup((1,)), KVGroup((2,), window=4, sinks=1)),
}


class Memory:
    """Page contents: slot -> (namespace, units up to and including the slot's)."""

    def __init__(self):
        self.pages = {}

    def forget(self, page):
        self.pages.pop(page, None)

    def copy_page(self, source, target):
        self.pages[target] = dict(self.pages.get(source, {}))

    def write(self, page, offset, key, value):
        self.pages.setdefault(page, {})[offset] = (key, value)


class Sequence:
    """What the scheduler knows of a branch, and the runner's copy of its page tables."""

    def __init__(self, key, namespace, units, resident, no_write):
        self.key, self.namespace, self.units = key, namespace, list(units)
        self.resident, self.no_write = resident, no_write
        self.tables = {}  # (group, column) -> page, as the deltas told

    def fork(self, key):
        return Sequence(key, self.namespace, self.units, self.resident, self.no_write)

    def content(self, position):
        return self.namespace, tuple(self.units[: position + 1])


def spelled(node):
    return tuple(unit for n in node.path() for unit in n.units) if node is not None else None


def dump(kv):
    """All state of the manager as plain values."""
    nodes = [*kv.prefix.roots(), *kv.prefix.nodes()]
    return {
        "pages": [(kv.describe(page).state, kv.allocator.owners(page)) for page in range(kv.allocator.num_pages)],
        "tree": [(n.namespace, spelled(n), n.start, list(n.columns), n.locks, n.stamp) for n in nodes],
        "branches": {
            key: (b.namespace, [list(t) for t in b.tables], b.present, spelled(b.cursor), list(b.behind))
            for key, b in kv._branches.items()
        },
        "coming": dict(kv._coming._coming),
        "copies": dict(kv._copies._planned),
        "stats": kv.usage().prefix,
    }


PLANS = st.lists(
    st.tuples(st.sampled_from(["begin", "fork", "preempt", "row", "row", "row"]), st.integers(0, 9), st.integers(1, 6)),
    max_size=7,
)
BASES = st.sampled_from([[0] * 12, [0, 1] * 6])
UNITS = st.builds(
    lambda base, n, tail: base[:n] + tail, BASES, st.integers(1, 12), st.lists(st.integers(0, 1), max_size=2)
)


class KVMachine(RuleBasedStateMachine):
    """Each rule is one whole step: a plan, then success, failure in the model, or failure before it ran."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), groups=st.sampled_from(sorted(GROUPS)), room=st.integers(4, 16))
    def start(self, page_size, groups, room):
        self.groups = GROUPS[groups]
        self.memory = Memory()
        self.kv = KVCacheManager(room * len(self.groups), page_size, self.groups, store=self.memory)
        self.size = page_size
        self.sequences = {}
        self.number = self.step = 0

    # ---- planning

    def plan(self, plan, units):
        self.undo, self.rows, self.new, self.preempted = UndoLog(), {}, [], False
        for kind, which, amount in plan:
            getattr(self, f"plan_{kind}")(which, amount, units[which % len(units)])

    def pick(self, which):
        return list(self.sequences.values())[which % len(self.sequences)] if self.sequences else None

    def plan_begin(self, which, amount, units):
        self.number += 1
        key, namespace = (f"r{self.number}", 0), "ab"[which % 2]
        before = dump(self.kv)
        hit = self.kv.begin(key, namespace, units, 0.0, self.undo, use_prefix=amount > 1, may_wait=amount > 2)
        if hit.wait:
            assert dump(self.kv) == before and amount > 2
            assert any(row.namespace == namespace for row in self.rows.values())
            return
        assert hit.num_tokens <= len(units) - 1 and (amount > 1 or hit.num_tokens == 0)
        assert not hit.no_write or hit.num_tokens == len(units) - 1
        self.add(Sequence(key, namespace, units, hit.num_tokens, hit.no_write))

    def plan_fork(self, which, amount, units):
        parent = self.pick(which)
        if parent is not None and parent.key not in self.rows:
            self.number += 1
            child = parent.fork((f"r{self.number}", amount))
            self.kv.fork(parent.key, child.key, self.undo)
            self.add(child)

    def add(self, sequence):
        self.sequences[sequence.key] = sequence
        self.new.append(sequence.key)

    def plan_preempt(self, which, amount, units):
        sequence = self.pick(which)
        if sequence is not None and amount > 3:
            self.kv.release_branch(sequence.key)
            self.kv.release_branch(sequence.key)  # idempotent
            self.preempted = True
            del self.sequences[sequence.key]
            self.rows.pop(sequence.key, None)

    def plan_row(self, which, amount, units):
        row = self.pick(which)
        if row is None or row.key in self.rows:
            return
        if row.resident == len(row.units):
            row.units.append(amount % 2)  # decode
        count = 1 if row.no_write else min(amount, len(row.units) - row.resident)
        before = dump(self.kv)
        try:
            row.deltas = self.kv.reserve(row.key, row.resident + count, self.undo)
        except OutOfPages:
            if self.kv.prefix.stats.evicted_pages == before["stats"].evicted_pages:
                assert dump(self.kv) == before
            need = -(-(row.resident + count) // self.size) * len(self.groups)
            assert self.kv.free_pages() < need
            return
        row.end = row.resident + count
        self.rows[row.key] = row
        self.kv.computing(row.key, row.units, self.undo, num_tokens=row.end)

    # ---- running

    def tell(self):
        for row in self.rows.values():
            for delta in row.deltas:
                for place, page in enumerate(delta.pages, delta.first):
                    row.tables[delta.group, place] = page

    def write_slots(self, row):
        """(page, offset, position) of every slot that the row writes; each page must be the branch's alone."""
        for position in range(row.resident, row.end if not row.no_write else row.resident):
            for group in range(len(self.groups)):
                page = row.tables[group, position // self.size]
                assert list(self.kv.allocator.owners(page).values()) == [1]
                yield page, position % self.size, position

    def run_model(self, copies):
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        assert len({copy.target for copy in copies}) == len(copies)
        for copy in copies:
            assert "copy" in self.kv.describe(copy.source).tickets
            self.memory.copy_page(copy.source, copy.target)
        for row in self.rows.values():
            for page, offset, position in self.write_slots(row):
                self.memory.write(page, offset, *row.content(position))
        for row in self.rows.values():
            self.read_all(row)

    def read_all(self, row):
        for group, shape in enumerate(self.groups):
            low = max(0, row.resident - shape.window + 1) if shape.window else 0
            for position in [*range(min(shape.sinks, low)), *range(low, row.end)]:
                page = row.tables[group, position // self.size]
                assert self.memory.pages[page][position % self.size] == row.content(position)

    @rule(plan=PLANS, units=st.lists(UNITS, min_size=1, max_size=3), ends=st.integers(0, 2**8), early_end=st.booleans())
    def step_succeeds(self, plan, units, ends, early_end):
        self.plan(plan, units)
        copies = self.kv.take_copies()
        assert self.kv.take_copies() == ()
        self.step += 1
        self.kv.start_step(self.step)
        self.tell()
        self.run_model(copies)
        self.undo.clear()
        if early_end:
            self.kv.end_step(self.step)
        for place, row in enumerate(self.rows.values()):
            self.commit(row, ends >> place & 1)
        self.kv.end_step(self.step)
        assert self.kv.usage().pages.ticketed == 0

    def commit(self, row, ends):
        row.resident, row.no_write = row.end, False
        if ends:
            self.kv.finish(row.key, row.units, row.resident, 0.0)
            self.kv.finish(row.key, row.units, row.resident, 0.0)  # idempotent
            del self.sequences[row.key]
        else:
            self.kv.commit(row.key, row.units, row.resident, 0.0)

    @rule(plan=PLANS, units=st.lists(UNITS, min_size=1, max_size=3), ran=st.integers(0, 3))
    def step_fails(self, plan, units, ran):
        before = dump(self.kv)
        self.plan(plan, units)
        self.step += 1
        if ran:
            copies = self.kv.take_copies()
            self.kv.start_step(self.step)
            if ran > 1:
                self.tell()
            if ran > 2:
                self.scribble(copies)
        self.undo.rollback()
        self.kv.end_step(self.step)
        for key in self.new:
            self.sequences.pop(key, None)
        if not self.preempted and self.kv.prefix.stats.evicted_pages == before["stats"].evicted_pages:
            assert dump(self.kv) == before

    def scribble(self, copies):
        """The model fails half-way: copies are made, slots are written with rubbish."""
        for copy in copies:
            self.memory.copy_page(copy.source, copy.target)
        for row in self.rows.values():
            for page, offset, _ in self.write_slots(row):
                self.memory.write(page, offset, "rubbish", "rubbish")

    @rule()
    def flush(self):
        evictable = self.kv.usage().pages.evictable
        assert self.kv.flush_prefix_cache() == evictable
        assert self.kv.usage().pages.cached == 0

    # ---- always

    @invariant()
    def audited(self):
        counts = self.kv.audit()
        assert counts.free + counts.cached + counts.referenced + counts.ticketed == counts.total
        assert self.kv.free_pages() == counts.free + counts.cached  # between steps nothing is named

    @invariant()
    def cached_pages_hold_what_the_tree_says(self):
        for node in self.kv.prefix.nodes():
            path = spelled(node)
            for index, column in enumerate(node.columns, node.start):
                for page in column:
                    for position in range(index * self.size, min(len(path), (index + 1) * self.size)):
                        if page != TOMBSTONE:
                            expected = (node.namespace, path[: position + 1])
                            assert self.memory.pages[page][position % self.size] == expected

    @invariant()
    def branches_hold_what_they_need(self):
        for row in self.sequences.values():
            tables = self.kv.page_table(row.key)
            present = row.resident + row.no_write
            for group, table in zip(self.groups, tables, strict=True):
                sinks, first = group.needed_columns(present, self.size)
                for position in range(present):
                    page = table[position // self.size]
                    needed = position // self.size < sinks or position // self.size >= first
                    assert (page != TOMBSTONE) == needed
                    if needed:
                        assert self.memory.pages[page][position % self.size] == row.content(position)

    def teardown(self):
        if hasattr(self, "kv"):
            for key in self.sequences:
                self.kv.release_branch(key)
            assert self.kv.audit().referenced == 0
            self.kv.flush_prefix_cache()
            assert self.kv.audit().free == self.kv.allocator.num_pages and not self.memory.pages


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=100, stateful_step_count=25, deadline=None, report_multiple_bugs=False)
