"""What the runner keeps for each branch slot between steps: tokens, page tables, parameters, penalty counts.

Every update is keyed by position, so sending one twice (a step retried after a rollback) changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import PageTableDelta, ScheduledRow, SlotInit
from octavo.core.errors import InvariantBroken


class Slot:
    """The state of one slot: one branch's tokens, its page table for each KV group, and what sampling counts."""

    def __init__(self, init: SlotInit, num_groups: int) -> None:
        self.params = init.params
        self.seed = init.seed
        self.eos_token_ids = init.eos_token_ids
        self.num_prompt_tokens = init.num_prompt_tokens
        self.tokens = list(init.token_ids)
        self.pages: list[list[int]] = [[] for _ in range(num_groups)]
        self.prompt_counts = count(self.tokens[: init.num_prompt_tokens])
        self.output_counts = count(self.tokens[init.num_prompt_tokens :])

    def update(self, row: ScheduledRow) -> None:
        """Take a row's page deltas and tokens. Raises ``InvariantBroken`` if they leave a gap."""
        for delta in row.page_deltas:
            _place(self.pages[delta.group], delta)
        if row.start > len(self.tokens):
            raise InvariantBroken(f"slot {row.slot} holds {len(self.tokens)} tokens; its row starts at {row.start}")
        for position, token in enumerate(row.token_ids, row.start):
            self._put(position, token)
        self._truncate(row.num_tokens)

    def _put(self, position: int, token: int) -> None:
        if position < len(self.tokens):
            if self.tokens[position] == token:
                return
            self._truncate(position)
        self.tokens.append(token)
        if position >= self.num_prompt_tokens:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def _truncate(self, length: int) -> None:
        while len(self.tokens) > max(length, self.num_prompt_tokens):
            token = self.tokens.pop()
            self.output_counts[token] -= 1
            if not self.output_counts[token]:
                del self.output_counts[token]


def count(token_ids: Sequence[int]) -> dict[int, int]:
    """How often each token occurs."""
    counts: dict[int, int] = {}
    for token in token_ids:
        counts[token] = counts.get(token, 0) + 1
    return counts


def _place(table: list[int], delta: PageTableDelta) -> None:
    if delta.first > len(table):
        raise InvariantBroken(f"a page table of {len(table)} entries gets entries from {delta.first} on")
    table[delta.first : delta.first + len(delta.pages)] = delta.pages
