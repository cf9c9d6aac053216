"""A runner without arithmetic: the next token is a keyed hash of all tokens before it.

So a lost, repeated or foreign token shows in every token after it. Each K/V slot stores the hash of the token prefix
that ends there, and "attention" refuses a slot with another one: stale, foreign and overwritten pages show at once. On
the way it checks the decision itself: positions, page tables, copies, and that nobody writes to a page that others see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.core.batch import (
    DrawnRows,
    RowResult,
    ScheduleDecision,
    ScheduledRow,
    StepResult,
    StepRows,
    TokenLogprobs,
)
from octavo.core.errors import RowError
from octavo.core.kv import KVCacheManager

MASK = 2**64 - 1
GARBAGE = -1


class WrongDecision(AssertionError):
    """The scheduler asked for something that a model could not do rightly."""


def mix(value: int, item: int) -> int:
    """One step of a 64-bit keyed hash."""
    value = (value ^ (item + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """The hash of tokens [0, i] for every i."""
    hashes, value = [], 0
    for token in tokens:
        value = mix(value, token)
        hashes.append(value)
    return hashes


def next_token(prefix_hash: int, seed: int, choice: int, vocab_size: int) -> tuple[int, float]:
    """Token and logprob that follow a prefix."""
    value = mix(mix(prefix_hash, seed), choice)
    return value % vocab_size, -float(value >> 44)


def null_tokens(prompt: Sequence[int], count: int, seed: int, choice: int = 0, vocab_size: int = 97) -> list[int]:
    """The first ``count`` tokens that the null model appends to ``prompt``: the definition, free of any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(prefix_hashes(tokens)[-1], seed, choice, vocab_size)[0])
    return tokens[len(prompt) :]


def prompt_logprob(prefix_hash: int, token: int) -> TokenLogprobs:
    """The logprob that the null model gives to a prompt token after a prefix."""
    return TokenLogprobs(token, -float(mix(prefix_hash, token) >> 44), 1)


@dataclass
class Slot:
    """What a runner keeps for a slot."""

    key: tuple[str, int]
    tokens: list[int]
    num_prompt_tokens: int
    seed: int
    tables: list[list[int]]
    hashes: list[int] = field(default_factory=list)

    def hash_up_to(self, position: int) -> int:
        """The hash of tokens [0, position]."""
        while len(self.hashes) <= position:
            self.hashes.append(mix(self.hashes[-1] if self.hashes else 0, self.tokens[len(self.hashes)]))
        return self.hashes[position]


class NullModel:
    """Executes decisions for a scheduler over ``kv``.

    ``fault(decision)`` may return an exception (raised after garbage was written wherever the step writes), or a dict
    of row index to message (those rows fail alone, leaving garbage).
    """

    def __init__(self, kv: KVCacheManager, vocab_size: int = 97) -> None:
        self.kv = kv
        self.page_size = kv.page_size
        self.windows = [group.window for group in kv.groups]
        self.vocab_size = vocab_size
        self.pages: dict[int, dict[int, int]] = {}  # page -> offset -> prefix hash
        self.slots: dict[int, Slot] = {}
        self.fault: Callable[[ScheduleDecision], Exception | dict[int, str] | None] | None = None
        self.decisions: list[ScheduleDecision] = []
        self.rows_computed = 0
        self.always_draws = False  # answer plain decodes as columns in every step, not in every second one

    def __call__(self, decision: ScheduleDecision) -> StepResult:
        """Execute one step."""
        self.decisions.append(decision)
        self._copy_pages(decision)
        for slot in decision.freed_slots:
            self.slots.pop(slot, None)
        for row in decision.rows:
            self._update_slot(row)
        self._check_rows(decision)
        fault = self.fault(decision) if self.fault else None
        failed = fault if isinstance(fault, dict) else {}
        everybody = isinstance(fault, Exception) and not isinstance(fault, RowError)
        broken = set(fault.rows) if isinstance(fault, RowError) else set(failed)
        for i, row in enumerate(decision.rows):
            self._write(row, garbage=everybody or i in broken)
        if isinstance(fault, Exception):
            raise fault
        results = tuple(
            RowResult(error=failed[i]) if i in failed else self._answer(row) for i, row in enumerate(decision.rows)
        )
        self.rows_computed += decision.num_scheduled_tokens
        if isinstance(decision.rows, StepRows) and not failed and (self.always_draws or decision.step % 2):
            decodes = len(decision.rows.slots)
            results = DrawnRows([row.token_ids[0] for row in results[:decodes]], results[decodes:])
        return StepResult(decision.step, results)

    def _copy_pages(self, decision: ScheduleDecision) -> None:
        sources, targets = [c.source for c in decision.copies], [c.target for c in decision.copies]
        check(not set(sources) & set(targets), "a page is source and target of a copy in one step")
        check(len(set(targets)) == len(targets), "two copies into one page")
        for copy in decision.copies:
            self.pages[copy.target] = dict(self.pages.get(copy.source, {}))

    def _update_slot(self, row: ScheduledRow) -> None:
        if row.init is not None:
            tables: list[list[int]] = [[] for _ in self.windows]
            init = row.init
            key = (row.request_id, row.choice)
            self.slots[row.slot] = Slot(key, list(init.token_ids), init.num_prompt_tokens, init.seed, tables)
        check(row.slot in self.slots, f"slot {row.slot} was never initialised")
        for delta in row.page_deltas:
            table = self.slots[row.slot].tables[delta.group]
            check(delta.first <= len(table), "a page table delta leaves a gap")
            table[delta.first : delta.first + len(delta.pages)] = delta.pages

    def _check_rows(self, decision: ScheduleDecision) -> None:
        slots = [row.slot for row in decision.rows]
        check(len(set(slots)) == len(slots), "a slot has two rows")
        for row in decision.rows:
            slot, end = self.slots[row.slot], row.start + row.num_scheduled_tokens
            check(slot.key == (row.request_id, row.choice), f"slot {row.slot} belongs to {slot.key}")
            check(row.num_tokens == len(slot.tokens), f"{row.num_tokens} tokens known, {len(slot.tokens)} here")
            check(list(row.token_ids) == slot.tokens[row.start : end], "the row's tokens are not the branch's")
            check(row.num_scheduled_tokens > 0, "an empty row")
            check(not row.flags.sample or end == row.num_tokens, "samples before all tokens are there")
            check(row.output_index == len(slot.tokens) - slot.num_prompt_tokens, "wrong output index")
            check(bool(row.reason), "a row without a reason")
            check(not row.flags.no_write or row.num_scheduled_tokens == 1, "no_write with several tokens")

    def _page(self, slot: Slot, group: int, position: int) -> int:
        table = slot.tables[group]
        check(position // self.page_size < len(table), f"{slot.key} has no page for position {position}")
        page = table[position // self.page_size]
        check(page >= 0, f"{slot.key} has given up the page of position {position}")
        return page

    def _write(self, row: ScheduledRow, garbage: bool) -> None:
        slot = self.slots[row.slot]
        if row.flags.no_write:
            return
        for group in range(len(self.windows)):
            for position in range(row.start, row.start + row.num_scheduled_tokens):
                page = self._page(slot, group, position)
                owners = [owner.key for owner in self.kv.allocator.owners(page)]
                check(owners == [slot.key], f"{slot.key} writes to page {page} of {owners}")
                check(not self.kv.allocator.is_shared(page), f"a write to the shared page {page}")
                value = GARBAGE if garbage else slot.hash_up_to(position)
                self.pages.setdefault(page, {})[position % self.page_size] = value

    def _read(self, slot: Slot, start: int, end: int) -> None:
        """What attention does: every position that tokens [start, end) see must hold this very prefix."""
        for group, window in enumerate(self.windows):
            first = max(0, start - window + 1) if window else 0
            for position in range(first, end):
                page = self._page(slot, group, position)
                stored = self.pages.get(page, {}).get(position % self.page_size)
                check(stored == slot.hash_up_to(position), f"{slot.key} reads foreign K/V at {position} in page {page}")

    def _answer(self, row: ScheduledRow) -> RowResult:
        slot, end = self.slots[row.slot], row.start + row.num_scheduled_tokens
        self._read(slot, row.start, end)
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if row.flags.prompt_logprobs >= 0:
            last = min(end, slot.num_prompt_tokens - 1)
            prompt = tuple(
                prompt_logprob(slot.hash_up_to(p - 1), slot.tokens[p]) for p in range(row.start + 1, last + 1)
            )
        if row.flags.sample:
            token, logprob = next_token(slot.hash_up_to(end - 1), slot.seed, row.choice, self.vocab_size)
            slot.tokens.append(token)
            tokens = (token,)
            logprobs = (TokenLogprobs(token, logprob, 1),) if row.flags.logprobs >= 0 else ()
        return RowResult(tokens, logprobs, prompt)


def check(condition: bool, message: str) -> None:
    """Raise ``WrongDecision`` unless the condition holds."""
    if not condition:
        raise WrongDecision(message)
