"""Prompts of which only some tokens stay: the page tables under random plans, forks, failures and too few pages.

What stays is here always the prompt's end, so that each place still holds the token of its position.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_kv_machine import KVMachine, Memory, dump

from octavo.core.errors import OutOfPages
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.prefix import TOMBSTONE

BLOCK = 4


class CompactingMachine(KVMachine):
    """The machine, whose branches forget as soon as their prompts are complete."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), kept=st.integers(1, 5), room=st.integers(6, 24))
    def start(self, page_size, kept, room):
        super().start(page_size, "global", room)
        self.groups = (replace(self.groups[0], kept=kept, forgets=BLOCK, looks=1),)
        self.kv = KVCacheManager(room, page_size, self.groups, store=self.memory, enable_prefix_cache=False)

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
        left = (row.prompt if row.resident < row.prompt else len(row.units)) - row.resident
        mark, before = self.undo.mark(), self.everything()
        lasting = self.kv.num_lasting_pages(row.key)
        try:
            if row.resident == row.prompt:
                self.kv.compact(row.key, row.units[: row.prompt], self.undo)
            row.deltas = self.kv.reserve(row.key, row.resident + min(amount, left), self.undo)
        except OutOfPages:
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
        super().scribble(copies)

    def forget(self):
        for row in self.rows.values():
            asked = self.kv.compaction_of(row.key)
            if asked is None:
                continue
            assert (asked.num_tokens, asked.token_ids) == (row.prompt, (row.units[row.prompt - 1],))
            assert all("copy" in self.kv.describe(page).tickets for page in asked.sources)
            assert not set(asked.sources) & set(asked.targets)
            for source, target in zip(asked.sources[-len(asked.targets) :], asked.targets, strict=True):
                self.memory.copy_page(source, target)

    def first(self, row):
        """The first position that is kept now."""
        return self.kv.num_forgotten(row.prompt) if row.end > row.prompt else 0

    def read_all(self, row):
        for position in range(self.first(row), row.end):
            page = row.tables[0, position // self.size]
            assert self.memory.pages[page][position % self.size] == row.content(position)

    def branches_hold_what_they_need(self):
        for row in self.sequences.values():
            (table,) = self.kv.page_table(row.key)
            gone = self.kv.num_forgotten(row.prompt) // self.size if row.resident > row.prompt else 0
            assert table.count(TOMBSTONE) == gone and set(table[:gone]) <= {TOMBSTONE}
            assert len(table) == -(-row.resident // self.size)
            for position in range(gone * self.size, row.resident):
                assert self.memory.pages[table[position // self.size]][position % self.size] == row.content(position)
            assert len(table) - gone <= self.kv.num_pages_needed(row.resident)


TestCompaction = CompactingMachine.TestCase
TestCompaction.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, report_multiple_bugs=False)


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
