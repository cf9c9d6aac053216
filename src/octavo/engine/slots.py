"""What the runner keeps for each branch slot between steps: tokens, page tables, parameters, penalty counts.

Every update is keyed by position, so sending one twice (a step retried after a rollback) changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from octavo.backends.ops import SamplingRow
from octavo.backends.sampling import has_penalties, is_plain
from octavo.core.batch import PageTableDelta, ScheduledRow, SlotInit
from octavo.core.errors import InvariantBroken


class Slot:
    """The state of one slot: one branch's page table for each KV group, how it samples, and what penalties count.

    Tokens are followed beyond those known at the start only where a penalty asks for counts: nobody else reads them.
    """

    def __init__(self, init: SlotInit, num_groups: int) -> None:
        self.params = init.params
        self.seed = init.seed
        self.num_prompt_tokens = init.num_prompt_tokens
        self.tokens = list(init.token_ids)
        self.pages: list[list[int]] = [[] for _ in range(num_groups)]
        self.follows = has_penalties(init.params)
        self.prompt_counts = count(self.tokens[: init.num_prompt_tokens]) if self.follows else {}
        self.output_counts = count(self.tokens[init.num_prompt_tokens :]) if self.follows else {}
        self.end_ids = init.params.stop_token_ids + (() if init.params.ignore_eos else init.eos_token_ids)
        self.plain_from = self._plain_from()

    def _plain_from(self) -> int:
        """The output index from which tokens are drawn from the model's logits as they are."""
        if not is_plain(SamplingRow(self.params, self.seed)):
            return sys.maxsize
        return self.params.min_tokens if self.end_ids else 0

    def update(self, row: ScheduledRow) -> None:
        """Take a row's tokens, if they are followed. Raises ``InvariantBroken`` if they leave a gap."""
        if not self.follows:
            return
        if row.start > len(self.tokens):
            raise InvariantBroken(f"slot {row.slot} holds {len(self.tokens)} tokens; its row starts at {row.start}")
        for position, token in enumerate(row.token_ids, row.start):
            self._put(position, token)
        self._truncate(row.num_tokens)

    def place(self, delta: PageTableDelta) -> None:
        """Change a page table. Raises ``InvariantBroken`` if that leaves a gap."""
        table = self.pages[delta.group]
        if delta.first > len(table):
            raise InvariantBroken(f"a page table of {len(table)} entries gets entries from {delta.first} on")
        table[delta.first : delta.first + len(delta.pages)] = delta.pages

    def sampling_row(self, choice: int, output_index: int) -> SamplingRow:
        """What a backend must know to draw output token ``output_index``."""
        return SamplingRow(
            params=self.params,
            seed=self.seed,
            choice=choice,
            output_index=output_index,
            prompt_counts=self.prompt_counts,
            output_counts=self.output_counts,
            banned_now=self.end_ids if output_index < self.params.min_tokens else (),
        )

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
