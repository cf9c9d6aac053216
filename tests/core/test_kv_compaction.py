"""Sequences of which only some tokens stay: the page tables under random plans, forks, failures and too few pages.

What stays is here always the end, so that each place still holds the token of its position.
"""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from test_kv_machine import KVMachine, Memory, dump

from octavo.core.errors import InvalidInput, OutOfPages
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.prefix import TOMBSTONE

BLOCK = 4


class CompactingMachine(KVMachine):
    """The machine, whose branches forget as soon as their prompts are complete, or after every block."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        kept=st.integers(1, 5),
        room=st.integers(6, 48),
        every=st.sampled_from([0, BLOCK]),
    )
    def start(self, page_size, kept, room, every):
        super().start(page_size, "global", room)
        self.groups = (replace(self.groups[0], kept=kept, forgets=BLOCK, looks=max(1, every), every=every),)
        self.kv = KVCacheManager(room, page_size, self.groups, store=self.memory, enable_prefix_cache=False)

    seen: ClassVar[Counter] = Counter()

    def plan_begin(self, which, amount, units):
        super().plan_begin(which, amount, units * 2)

    def commit(self, row, ends):
        super().commit(row, ends and row.resident > row.prompt + BLOCK)  # they get somewhere

    def add(self, sequence):
        sequence.prompt = getattr(sequence, "prompt", len(sequence.units))
        super().add(sequence)

    def plan_fork(self, which, amount, units):
        parent = self.pick(which)
        if parent is not None and parent.key not in self.rows:
            super().plan_fork(which, amount, units)
            self.sequences[self.new[-1]].prompt = parent.prompt

    def plan_row(self, which, amount, units):
        row = self.pick(which)
        if row is None or row.key in self.rows:
            return
        if row.resident == len(row.units):
            row.units.append(amount % 2)
        left = min(len(row.units) - row.resident, self.kv.until_due(row.resident, row.prompt))
        amount *= 3
        mark, before = self.undo.mark(), self.everything()
        lasting = self.kv.num_lasting_pages(row.key)
        try:
            if self.kv.is_due(row.resident, row.prompt):
                self.kv.compact(row.key, row.units[: row.resident], self.undo)
            row.deltas = self.kv.reserve(row.key, row.resident + min(amount, left), self.undo)
        except OutOfPages:
            self.seen["out of pages"] += self.kv.compaction_of(row.key) is not None
            self.undo.rollback_to(mark)
            assert self.everything() == before
            need = self.kv.num_pages_needed(row.resident + min(amount, left))
            assert self.kv.free_pages() < max(1, need - lasting) + 1  # and the page that it has to copy
            return
        row.end = row.resident + min(amount, left)
        self.rows[row.key] = row

    def everything(self):
        return dump(self.kv), {key: b.compaction for key, b in self.kv._branches.items()}

    def tell(self):
        for row in self.rows.values():
            for delta in row.deltas:
                if delta.first == 0 and len(delta.pages) > 1:
                    row.tables.clear()
        super().tell()

    def run_model(self, copies):
        self.forget()
        super().run_model(copies)

    def scribble(self, copies):
        self.forget()
        self.seen["failed"] += any(map(self.kv.compaction_of, self.rows))
        super().scribble(copies)

    def forget(self):
        for row in self.rows.values():
            asked = self.kv.compaction_of(row.key)
            if asked is None:
                continue
            (group,), end = self.groups, row.resident
            assert (asked.num_tokens, asked.token_ids) == (end, tuple(row.units[end - group.looks : end]))
            assert asked.first == (self.kv.num_forgotten(end - BLOCK) if group.every else 0)
            assert len(asked.sources) == -(-(end - asked.first) // self.size)
            self.seen["copied" if asked.targets else "counted only"] += 1
            self.seen["again"] += asked.first > 0 and bool(asked.targets)
            if not asked.targets:
                assert group.every and self.kv.num_forgotten(end) == asked.first
                continue
            assert all("copy" in self.kv.describe(page).tickets for page in asked.sources)
            assert not set(asked.sources) & set(asked.targets)
            for source, target in zip(asked.sources[-len(asked.targets) :], asked.targets, strict=True):
                self.memory.copy_page(source, target)

    def gone(self, row, count):
        """Positions that are gone when so many tokens have been computed: before the last one."""
        (group,) = self.groups
        if group.every:
            return self.kv.num_forgotten((count - 1) // BLOCK * BLOCK) if count else 0
        return self.kv.num_forgotten(row.prompt) if count > row.prompt else 0

    def read_all(self, row):
        for position in range(self.gone(row, row.end), row.end):
            page = row.tables[0, position // self.size]
            assert self.memory.pages[page][position % self.size] == row.content(position)

    def branches_hold_what_they_need(self):
        for row in self.sequences.values():
            (table,) = self.kv.page_table(row.key)
            gone = self.gone(row, row.resident) // self.size
            assert table.count(TOMBSTONE) == gone and set(table[:gone]) <= {TOMBSTONE}
            assert len(table) == -(-row.resident // self.size)
            for position in range(gone * self.size, row.resident):
                assert self.memory.pages[table[position // self.size]][position % self.size] == row.content(position)
            assert len(table) - gone <= self.kv.num_pages_needed(row.resident)


def test_tables_and_pages_under_random_plans():
    CompactingMachine.seen.clear()
    settled = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(CompactingMachine, settings=settled)
    dangers = ("copied", "counted only", "again", "failed", "out of pages")
    assert all(CompactingMachine.seen[danger] for danger in dangers), CompactingMachine.seen


@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(0, 40))
def test_whole_blocks_go_and_at_least_as_much_stays_as_was_asked(kept: int, page_size: int, length: int) -> None:
    group = KVGroup((0,), kept=kept, forgets=BLOCK)
    kv = KVCacheManager(4, page_size, (group,), store=Memory(), enable_prefix_cache=False)
    gone = kv.num_forgotten(length)
    assert gone % BLOCK == 0 and gone % page_size == 0
    assert min(length, kept) <= length - gone <= max(length if not gone else 0, kept + BLOCK - 1)
    stays = -(-(length - gone) // page_size) if gone else 0
    assert stays <= group.kept_columns(page_size)
    assert kv.num_pages_needed(length) >= -(-length // page_size) + stays


@given(
    st.integers(0, 20), st.sampled_from([1, 2, 4]), st.integers(1, 30), st.sampled_from([0, BLOCK]), st.integers(1, 3)
)
def test_the_pool_holds_as_many_tokens_as_it_says(
    kept: int, page_size: int, pages: int, every: int, branches: int
) -> None:
    group = KVGroup((0,), kept=kept, forgets=BLOCK, looks=1, every=every if kept else 0)
    kv = KVCacheManager(pages, page_size, (group,), store=Memory(), enable_prefix_cache=False)
    most = kv.capacity_tokens(7, branches)
    fits = [n for n in range(200) if kv.num_pages_needed(n, 7) <= pages // branches]
    assert fits == list(range(min(most + 1, 200)))


def test_pages_go_as_a_whole() -> None:
    with pytest.raises(InvalidInput, match="divides 4"):
        KVCacheManager(4, 3, (KVGroup((0,), kept=5, forgets=4),), store=Memory(), enable_prefix_cache=False)
