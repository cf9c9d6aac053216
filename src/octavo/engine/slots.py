"""What the runner keeps for each branch slot between steps: tokens, page tables, parameters, penalty counts.

Every update is keyed by position, so sending one twice (a step retried after a rollback) changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.backends.counts import TokenCounts
from octavo.backends.history import History
from octavo.backends.ops import NO_ADAPTER, SamplingRow
from octavo.backends.sampling import has_penalties
from octavo.core.batch import PageTableDelta, ScheduledRow, SlotInit, TokenLogprobs
from octavo.core.draft_tree import path_of
from octavo.core.errors import InvariantBroken
from octavo.decoding.grammar import GrammarFault, OutputMasks
from octavo.decoding.processors import processor
from octavo.decoding.speculation import Lookup


class Slot:
    """The state of one slot: one branch's page table for each KV group, how it samples, and what penalties count.

    Tokens are followed beyond those known at the start only where penalties, bans or a grammar depend on them.
    """

    def __init__(
        self, init: SlotInit, num_groups: int, lookup: Lookup | None = None, vocab_size: int = sys.maxsize
    ) -> None:
        """``lookup``: guesses each token, for the residual verifier."""
        self.params = init.params
        self.seed = init.seed
        self.num_prompt_tokens = init.num_prompt_tokens
        self.tokens = list(init.token_ids)
        self.pages: list[list[int]] = [[] for _ in range(num_groups)]
        self._history: History | None = None
        if init.params.looks_back:
            processors = [processor(name) for name in init.params.logits_processors]
            self._history = History(init.params, init.num_prompt_tokens, self.tokens, processors, vocab_size)
        self.counts = has_penalties(init.params)
        self._lookup = lookup
        self.follows = self.counts or lookup is not None or self._history is not None or init.params.grammar is not None
        self._last_n = init.params.repeat_last_n if init.params.repeat_last_n >= 0 else sys.maxsize
        counted = range(max(0, len(self.tokens) - self._last_n), len(self.tokens)) if self.counts else range(0)
        self.prompt_counts = TokenCounts(self.tokens[at] for at in counted if at < init.num_prompt_tokens)
        self.output_counts = TokenCounts(self.tokens[at] for at in counted if at >= init.num_prompt_tokens)
        self.end_ids = init.params.stop_token_ids + (() if init.params.ignore_eos else init.eos_token_ids)
        self._carried: dict[int, Any] = {0: None}  # by position: what pooling the tokens before it came to
        # below this output index, what is done to the logits may be other than at the index before
        fixed_from = init.params.min_tokens + 1 if init.params.min_tokens and self.end_ids else 0
        self.changes_until = sys.maxsize if self.follows or init.params.mirostat else fixed_from
        self._mu = {len(init.token_ids) - init.num_prompt_tokens: init.mu}  # by output index: what mirostat allows
        self.adapter = NO_ADAPTER  # its place
        self.told = 0  # the output index of which the backend was told last
        self._masks: dict[int, bytes] = {}  # by row of the draft tree: what the grammar allows behind it
        self.masks: OutputMasks | None = None  # what gives them

    def update(self, row: ScheduledRow) -> None:
        """Take a row's tokens, if they are followed. Raises ``InvariantBroken`` if they leave a gap."""
        self.follow(row.start, row.token_ids[: len(row.token_ids) - row.num_drafts], row.num_tokens)

    def follow(self, start: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """``update`` with the row's fields."""
        if not self.follows:
            return
        if start > len(self.tokens):
            raise InvariantBroken(f"the slot holds {len(self.tokens)} tokens; its row starts at {start}")
        for position, token in enumerate(token_ids, start):
            self._put(position, token)
        self._truncate(num_tokens)

    def place(self, delta: PageTableDelta) -> None:
        """Change a page table. Raises ``InvariantBroken`` if that leaves a gap."""
        table = self.pages[delta.group]
        if delta.first > len(table):
            raise InvariantBroken(f"a page table of {len(table)} entries gets entries from {delta.first} on")
        table[delta.first : delta.first + len(delta.pages)] = delta.pages

    def sampling_row(self, choice: int, output_index: int) -> SamplingRow:
        """What a backend must know to draw output token ``output_index``."""
        banned, penalties = ((), {}) if self._history is None else self._history.next()
        return SamplingRow(
            params=self.params,
            seed=self.seed,
            choice=choice,
            output_index=output_index,
            prompt_counts=self.prompt_counts,
            output_counts=self.output_counts,
            banned_now=banned + self.end_ids if output_index < self.params.min_tokens else banned,
            penalties=penalties,
            grammar_mask=self._masks.get(0),
            mu=self._mu[output_index] if self.params.mirostat else 0.0,
            guess=None if self._lookup is None else self._lookup.next(self.tokens),
        )

    def sampling_rows(self, row: ScheduledRow) -> dict[int, SamplingRow]:
        """Those of all tokens that a row samples, by row of its tree; each sees the drafts before it as if they were
        known.

        Nothing is sampled behind a draft with which that fails: if the draft is right, the next step has to tell.
        """
        if not row.num_drafts or not row.flags.sample:
            return {0: self.sampling_row(row.choice, row.output_index)} if row.flags.sample else {}
        found: dict[int, SamplingRow] = {}
        drafts, parents = row.drafts, row.parent_rows
        try:
            for place in range(1 + row.num_drafts) if self.params.grammar is None else self._masks:
                if place and parents[place] not in found:
                    continue
                path = [drafts[i - 1] for i in path_of(parents, place)[1:]]
                try:
                    found[place] = self._behind(row, path, place)
                except Exception:  # of a processor of logits: whatever it raises
                    if not place:
                        raise
        finally:
            self.follow(row.num_tokens, (), row.num_tokens)
        return found

    def _behind(self, row: ScheduledRow, path: Sequence[int], place: int) -> SamplingRow:
        """What a backend must know to draw the token behind these drafts."""
        self.follow(row.num_tokens, path, row.num_tokens + len(path))
        found = self.sampling_row(row.choice, row.output_index + len(path))
        prompt, output = self._counts_now()
        mask = self._masks.get(place)
        return replace(found, prompt_counts=prompt, output_counts=output, grammar_mask=mask)

    def draws(self, row: ScheduledRow) -> tuple[Sequence[int], list[SamplingRow]]:
        """The rows of its tree that a row samples; and, if they differ in more than their index, what is to be known of
        each.
        """
        if not row.num_drafts or not self.is_ruled(row):
            return range((1 + row.num_drafts) * row.flags.sample), []
        rows = self.sampling_rows(row)
        return list(rows), list(rows.values())

    def accept(self, row: ScheduledRow, drawn: Sequence[int]) -> None:
        """Of a row's drafts, those that were drawn; the last token drawn comes with the next row."""
        self.follow(row.num_tokens, drawn[:-1], row.num_tokens + max(0, len(drawn) - 1))

    def surprised_by(self, output_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The logprobs of the tokens drawn from ``output_index`` on: what mirostat allows after them."""
        if not self.params.mirostat:
            return
        for index, entry in enumerate(logprobs, output_index):
            mu = self._mu[index]
            self._mu = {index: mu, index + 1: self.params.mirostat_after(mu, entry.logprob)}

    def is_ruled(self, row: ScheduledRow) -> bool:
        """True if the tokens that a row samples differ in more than their index: by counts, bans or logprobs."""
        return self.params.wants_logprobs or row.output_index < self.changes_until

    def constrain(self, output_index: int, row: ScheduledRow | None = None) -> None:
        """Make the masks for output token ``output_index``, before which all are known, and behind a row's drafts.

        Raises ``GrammarFault`` or ``InvalidInput`` if the grammar cannot be followed.
        """
        if self.masks is None:
            raise GrammarFault("this engine has no grammars")
        tree = () if row is None else (row.drafts, row.parent_rows)
        self._masks = self.masks.behind(self.tokens, self.num_prompt_tokens, output_index, *tree)

    def carried(self, start: int) -> Any:
        """What pooling the tokens before ``start`` came to, where all of them are pooled.

        Raises ``InvariantBroken`` for a position at which no row has ended or begun last.
        """
        if self.params.pools_all and start not in self._carried:
            raise InvariantBroken(f"a row at {start} goes on with states that are known up to {sorted(self._carried)}")
        return self._carried.get(start)

    def carry(self, start: int, stop: int, pooled: Any) -> None:
        """The tokens before ``stop`` were pooled; a step that is retried begins at ``start`` again."""
        self._carried = {start: self._carried.get(start), stop: pooled}

    def _put(self, position: int, token: int) -> None:
        if position < len(self.tokens):
            if self.tokens[position] == token:
                return
            self._truncate(position)
        self.tokens.append(token)
        if self._history is not None:
            self._history.grown()
        if self.counts:
            self.output_counts.add(token)
            if position >= self._last_n:
                self._counts_at(position - self._last_n).remove(self.tokens[position - self._last_n])

    def _counts_at(self, position: int) -> TokenCounts:
        return self.prompt_counts if position < self.num_prompt_tokens else self.output_counts

    def _counts_now(self) -> tuple[TokenCounts, TokenCounts]:
        """Copies of the counts, which go on to change: of the prompt's only where they do."""
        prompt = self.prompt_counts if self._last_n == sys.maxsize else TokenCounts.of(self.prompt_counts)
        return prompt, TokenCounts.of(self.output_counts)

    def _truncate(self, length: int) -> None:
        length = max(length, self.num_prompt_tokens)
        if self.masks is not None:
            self.masks.agree(length - self.num_prompt_tokens)
        if self._lookup is not None:
            self._lookup.shrink(self.tokens, length)
        while len(self.tokens) > length:
            token = self.tokens.pop()
            if self.counts:
                if len(self.tokens) >= self._last_n:
                    self._counts_at(len(self.tokens) - self._last_n).add(self.tokens[len(self.tokens) - self._last_n])
                self.output_counts.remove(token)
            if self._history is not None:
                self._history.shrunk(token)
