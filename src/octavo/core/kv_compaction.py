"""Prompts of which only some tokens stay (`SnapKV`): their pages, once they are complete.

positions   0 ........ 8 ........ 16 ........ 24
before      page a   | page b   | page c    |
after       freed    | page d   | page e    |       what stays lies in d and e, whichever tokens it is

What stays stands in the last columns of the prompt, so that everything else goes on as if a window had passed the
columns before. Fresh pages are filled from the old ones, which a rollback gives back: no step changes what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import Compaction
from octavo.core.kv_branches import BranchTables
from octavo.core.kv_table import BranchKey, BranchPages
from octavo.core.prefix_node import TOMBSTONE
from octavo.core.undo import UndoLog

__all__ = ["CompactedTables"]


class CompactedTables(BranchTables):
    """Page tables of models with one KV group, in which `KVGroup.kept` tokens of a prompt stay."""

    @property
    def forgets_prompts(self) -> bool:
        """True if only some tokens of a complete prompt stay. No row then crosses the end of a prompt."""
        return self.groups[0].kept > 0

    def num_forgotten(self, num_prompt_tokens: int) -> int:
        """Tokens of a prompt that go: whole blocks, and so whole pages."""
        group = self.groups[0]
        return max(0, num_prompt_tokens - group.kept) // group.forgets * group.forgets if group.kept else 0

    def compaction_pages(self, branch_key: BranchKey, num_prompt_tokens: int) -> int:
        """Pages that the branch, whose prompt is complete, takes before it computes anything else."""
        first = self.num_forgotten(num_prompt_tokens) // self.page_size
        branch = self._branches.get(branch_key)
        if not first or branch is None or not branch.tables[0] or branch.tables[0][0] == TOMBSTONE:
            return 0
        return -(-num_prompt_tokens // self.page_size) - first

    def compact(self, branch_key: BranchKey, prompt: Sequence[int], undo: UndoLog) -> None:
        """Plan what stays of a complete ``prompt`` into fresh pages, and give up those that held it all.

        `reserve` tells the runner. Nothing happens if all stays, or it has been done. Raises `OutOfPages`, leaving all
        unchanged.
        """
        count = self.compaction_pages(branch_key, len(prompt))
        if not count:
            return
        branch = self._branch(branch_key)
        fresh = self._take(count, branch.owner)
        (table,) = branch.tables
        end = -(-len(prompt) // self.page_size)
        before = tuple(table[:end])
        self._copies.hold(before, undo)
        undo.push(lambda: self._undo_compact(branch, before))
        table[:end] = [TOMBSTONE] * (end - count) + fresh
        for page in before:
            self._drop(page, branch.owner)
        last = tuple(prompt[-self.groups[0].looks :])
        branch.compaction = Compaction(len(prompt), last, before, tuple(fresh))
        branch.tell_all()

    def compaction_of(self, branch_key: BranchKey) -> Compaction | None:
        """What was planned for the branch's next row."""
        return self._branch(branch_key).compaction

    def num_lasting_pages(self, branch_key: BranchKey) -> int:
        """As before; what was forgotten, and was needed only to forget it, needs no page any more."""
        lasting = super().num_lasting_pages(branch_key)
        branch = self._branches.get(branch_key)
        if not self.forgets_prompts or branch is None or TOMBSTONE not in branch.tables[0]:
            return lasting
        return lasting + branch.tables[0].count(TOMBSTONE) + self.groups[0].kept_columns(self.page_size)

    def _undo_compact(self, branch: BranchPages, before: tuple[int, ...]) -> None:
        branch.compaction = None
        if branch.released:
            return
        for page in before:
            self.allocator.add_owner(page, branch.owner)  # its ticket has kept it
        (table,) = branch.tables
        for page in table[: len(before)]:
            if page != TOMBSTONE:
                self._drop(page, branch.owner)
        table[: len(before)] = before
        branch.tell_all()
        self.unsettled[branch.key] = None
