"""Sequences of which only some tokens stay (`SnapKV`, `H2O`): when that is due, and their pages before and after.

positions   0 ........ 8 ........ 16 ........ 24
before      page a   | page b   | page c    |
after       freed    | page d   | page e    |       what stays lies in d and e, whichever tokens it is

What stays stands in the last columns, so that everything else goes on as if a window had passed the columns before.
Fresh pages are filled from the old ones, which a rollback gives back: no step changes what it reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from octavo.core.batch import Compaction
from octavo.core.kv_branches import BranchTables
from octavo.core.kv_table import BranchKey, BranchPages
from octavo.core.prefix_node import TOMBSTONE
from octavo.core.undo import UndoLog

__all__ = ["CompactedTables"]


class CompactedTables(BranchTables):
    """Page tables of models with one KV group, in which `KVGroup.kept` tokens of a sequence stay."""

    def is_due(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """True if something may have to be forgotten between that many tokens and the next one."""
        group = self.groups[0]
        if group.every:
            return num_tokens > 0 and num_tokens % group.every == 0
        return group.kept > 0 and num_tokens == num_prompt_tokens

    def until_due(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Tokens that a row may have behind so many: what comes after sees what stays."""
        group = self.groups[0]
        if group.every:
            return group.every - num_tokens % group.every
        return num_prompt_tokens - num_tokens if group.kept and num_tokens < num_prompt_tokens else sys.maxsize

    def num_forgotten(self, num_tokens: int) -> int:
        """Tokens of so many that go: whole blocks, and so whole pages."""
        group = self.groups[0]
        return max(0, num_tokens - group.kept) // group.forgets * group.forgets if group.kept else 0

    def compaction_pages(self, branch_key: BranchKey, num_tokens: int) -> int:
        """Pages that the branch, for which it is due, takes before it computes anything else."""
        first = self.num_forgotten(num_tokens) // self.page_size
        branch = self._branches.get(branch_key)
        if branch is None or first <= branch.tables[0].count(TOMBSTONE):
            return 0
        return -(-num_tokens // self.page_size) - first

    def compact(self, branch_key: BranchKey, units: Sequence[int], undo: UndoLog) -> None:
        """It is due: plan what stays of these ``units``, all of the branch's so far, into fresh pages, and give up
        those that held them.

        `reserve` tells the runner. Nothing happens if all stays and nothing is counted, or it has been planned. Raises
        `OutOfPages`, leaving all unchanged.
        """
        branch, group = self._branch(branch_key), self.groups[0]
        planned = branch.compaction is not None and branch.compaction.num_tokens == len(units)
        count = self.compaction_pages(branch_key, len(units))
        if planned or not (count or group.every):
            return
        fresh = self._take(count, branch.owner)
        (table,) = branch.tables
        gone, end = table.count(TOMBSTONE), -(-len(units) // self.page_size)
        before = tuple(table[:end])
        self._copies.hold(before[gone:], undo)
        undo.push(lambda: self._undo_compact(branch, before))
        last = tuple(units[-group.looks :])
        branch.compaction = Compaction(len(units), last, gone * self.page_size, before[gone:], tuple(fresh))
        if count:
            table[:end] = [TOMBSTONE] * (end - count) + fresh
            for page in before[gone:]:
                self._drop(page, branch.owner)
            branch.tell_all()

    def compaction_of(self, branch_key: BranchKey) -> Compaction | None:
        """What was planned for the branch's next row."""
        return self._branch(branch_key).compaction

    def num_lasting_pages(self, branch_key: BranchKey) -> int:
        """As before; what was forgotten for good, and was needed only to forget it, needs no page any more."""
        lasting, group = super().num_lasting_pages(branch_key), self.groups[0]
        branch = self._branches.get(branch_key)
        if not group.kept or group.every or branch is None or TOMBSTONE not in branch.tables[0]:
            return lasting
        return lasting + branch.tables[0].count(TOMBSTONE) + group.kept_columns(self.page_size)

    def _undo_compact(self, branch: BranchPages, before: tuple[int, ...]) -> None:
        branch.compaction = None
        (table,) = branch.tables
        if branch.released or table[: len(before)] == list(before):
            return
        for page in before:
            if page != TOMBSTONE:
                self.allocator.add_owner(page, branch.owner)  # its ticket has kept it
        for page in table[: len(before)]:
            if page != TOMBSTONE:
                self._drop(page, branch.owner)
        table[: len(before)] = before
        branch.tell_all()
        self.unsettled[branch.key] = None
