"""A runner without arithmetic: the next token is a keyed hash of all tokens before it.

So a lost, repeated or foreign token shows in every token after it. Each K/V slot stores the hash of the token prefix
that ends there, and "attention" refuses a slot with another one: stale, foreign and overwritten pages show at once. On
the way it checks the decision itself: positions, page tables, copies, and that nobody writes to a page that others see.

A *salt* is where the hash of a prefix begins: what two namespaces must not share differs from its first token on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lying_trees import lying_tree

from octavo.core.batch import (
    DrawnRows,
    GangEnding,
    GangMove,
    RowResult,
    ScheduleDecision,
    ScheduledRow,
    StepResult,
    StepRows,
    TokenLogprobs,
)
from octavo.core.errors import CorruptPages, RowError
from octavo.core.kv import KVCacheManager
from octavo.core.request import Branch
from octavo.core.speculation import Guess

MASK = 2**64 - 1
GARBAGE = -1


class WrongDecision(AssertionError):
    """The scheduler asked for something that a model could not do rightly; ``code`` names the broken invariant."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def mix(value: int, item: int) -> int:
    """One step of a 64-bit keyed hash."""
    value = (value ^ (item + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def extend_hashes(hashes: list[int], tokens: Sequence[int], salt: int = 0) -> None:
    """Bring ``hashes``, those of the first tokens, up to all of ``tokens``."""
    value = hashes[-1] if hashes else salt
    for token in tokens[len(hashes) :]:
        value = (value ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK  # `mix`, without the call
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
        value ^= value >> 31
        hashes.append(value)


def prefix_hashes(tokens: Sequence[int], salt: int = 0) -> list[int]:
    """The hash of tokens [0, i] for every i."""
    hashes: list[int] = []
    extend_hashes(hashes, tokens, salt)
    return hashes


def next_token(prefix_hash: int, seed: int, choice: int, vocab_size: int) -> tuple[int, float]:
    """Token and logprob that follow a prefix."""
    value = mix(mix(prefix_hash, seed), choice)
    return value % vocab_size, -float(value >> 44)


def null_stream(
    prompt: Sequence[int], seed: int, choice: int = 0, vocab_size: int = 97, salt: int = 0
) -> Iterator[tuple[int, float]]:
    """Tokens and logprobs that the null model appends to ``prompt``, without end: the definition, free of any cache."""
    value = salt
    for token in prompt:
        value = mix(value, token)
    while True:
        token, logprob = next_token(value, seed, choice, vocab_size)
        yield token, logprob
        value = mix(value, token)


def null_tokens(
    prompt: Sequence[int], count: int, seed: int, choice: int = 0, vocab_size: int = 97, salt: int = 0
) -> list[int]:
    """The first ``count`` tokens of ``null_stream``."""
    stream = null_stream(prompt, seed, choice, vocab_size, salt)
    return [next(stream)[0] for _ in range(count)]


def lying_drafts(
    running: Sequence[Branch],
    most: int,
    lies: int,
    key: int,
    vocab_size: int = 97,
    salt_of: Callable[[str], int] = lambda request_id: 0,
) -> dict[tuple[str, int], Guess]:
    """Up to ``most`` drafts for each that runs, as the null model would go on; ``lies`` of eight are others. Of three
    branches one has a chain of drafts, the others have trees.
    """
    drafts: dict[tuple[str, int], Guess] = {}
    for number, branch in enumerate(running if most else ()):
        salt = salt_of(branch.key[0])
        right = null_tokens(branch.token_ids, most, branch.seed, branch.choice, vocab_size, salt)
        dice = [mix(mix(key, number), i) for i in range(most + 2)]
        if dice[most + 1] % 3:
            roll = partial(_roll, mix(key, number), itertools.count(most + 2))
            drafts[branch.key] = lying_tree(right, dice[most] % (most + 1), lies, roll, lambda path: range(vocab_size))
            continue
        said = [token if dice[i] % 8 >= lies else dice[i] // 8 % vocab_size for i, token in enumerate(right)]
        drafts[branch.key] = said[: dice[most] % (most + 1)]
    return drafts


def _roll(key: int, rolls: Iterator[int], sides: int) -> int:
    return mix(key, next(rolls)) % sides


def null_score(token: int, seed: int) -> TokenLogprobs:
    """The logprob of a token that a gang's driver chose."""
    return TokenLogprobs(token, -float(mix(seed, token) >> 44), 1)


def null_move(
    request_id: str, members: Sequence[tuple[int, Sequence[int]]], seed: int, width: int, vocab: int
) -> GangMove:
    """Beam search without scores: whom each choice of a gang goes on from, and with what token, by a hash of all of it.

    ``members`` are (hash of all tokens, output) of those that have drawn. Now and then all of it ends.
    """
    key = seed
    for value, _ in members:
        key = mix(key, value)
    if members[0][1] and mix(key, 1) % 8 == 0:
        said = [members[mix(key, 2 + i) % len(members)][1] for i in range(width)]
        said = [output[: 1 + mix(key, 1000 + i) % len(output)] for i, output in enumerate(said)]
        scores = [tuple(null_score(token, seed) for token in output) for output in said]
        endings = (GangEnding(tuple(output), "stop", None, scored) for output, scored in zip(said, scores, strict=True))
        return GangMove(request_id, endings=tuple(endings))
    tokens = tuple(mix(key, 2000 + i) % vocab for i in range(width))
    parents = tuple(mix(key, 3000 + i) % len(members) for i in range(width))
    return GangMove(request_id, parents, tokens, tuple(null_score(token, seed) for token in tokens))


def null_gang(
    prompt: Sequence[int], seed: int, width: int, most: int, vocab: int = 97, salt: int = 0
) -> tuple[list[list[int]], bool]:
    """What each choice of a gang says, of at most ``most`` tokens, and whether its driver ended it."""
    outputs: list[list[int]] = [[]]
    while len(outputs[0]) < most:
        members = [(prefix_hashes([*prompt, *output], salt)[-1], output) for output in outputs]
        move = null_move("", members, seed, width, vocab)
        if move.endings:
            return [list(ending.token_ids) for ending in move.endings], True
        outputs = [[*outputs[parent], token] for parent, token in zip(move.parents, move.token_ids, strict=True)]
    return outputs, False


def prompt_logprob(prefix_hash: int, token: int) -> TokenLogprobs:
    """The logprob that the null model gives to a prompt token after a prefix."""
    return TokenLogprobs(token, -float(mix(prefix_hash, token) >> 44), 1)


def null_state(prefix_hash: int) -> bytes:
    """The pooled state of a prefix."""
    return prefix_hash.to_bytes(8, "little")


@dataclass
class Slot:
    """What a runner keeps for a slot."""

    key: tuple[str, int]
    tokens: list[int]
    num_prompt_tokens: int
    seed: int
    tables: list[list[int]]
    salt: int = 0
    hashes: list[int] = field(default_factory=list)

    def hashes_up_to(self, end: int) -> list[int]:
        """The hashes of tokens [0, i] for every i < ``end``, and perhaps more."""
        if len(self.hashes) < end:
            extend_hashes(self.hashes, self.tokens[:end], self.salt)
        return self.hashes

    def hashes_of(self, row: ScheduledRow) -> list[int]:
        """The hashes up to the end of a row, perhaps more; then those of its drafts, each behind the one it follows."""
        if not row.num_drafts:
            return self.hashes_up_to(row.start + row.num_scheduled_tokens)
        hashes = self.hashes_up_to(len(self.tokens))[: len(self.tokens)]
        last = len(hashes) - 1
        for draft, parent in zip(row.drafts, row.parent_rows[1:], strict=True):
            hashes.append(mix(hashes[last + parent], draft))
        return hashes


class NullModel:
    """Executes decisions for a scheduler over ``kv``.

    ``fault(decision)`` may return an exception (raised after garbage was written wherever the step writes), or a dict
    of row index to message (those rows fail alone, leaving garbage). ``salt_of`` gives the salt of a request.
    """

    def __init__(self, kv: KVCacheManager, vocab_size: int = 97) -> None:
        self.kv = kv
        self.page_size = kv.page_size
        self.windows = [group.window for group in kv.groups]
        self.vocab_size = vocab_size
        self.pages: dict[int, list[int | None]] = {}  # page -> by offset: the hash of the prefix that ends there
        self.host: dict[int, list[int | None]] = {}  # the same, of host pages
        self.slots: dict[int, Slot] = {}
        self.corrupt: Callable[[ScheduleDecision], Sequence[int]] = lambda decision: ()  # bad host pages that it reads
        self.fault: Callable[[ScheduleDecision], Exception | dict[int, str] | None] | None = None
        self.salt_of: Callable[[str], int] = lambda request_id: 0
        self.width_of: Callable[[str], int] = lambda request_id: 0  # choices of a request that is a gang
        self.decisions: list[ScheduleDecision] = []
        self.rows_computed = 0
        self.always_draws = False  # answer plain decodes as columns in every step, not in every second one

    def __call__(self, decision: ScheduleDecision) -> StepResult:
        """Execute one step."""
        self.decisions.append(decision)
        self._swap_pages(decision)
        self._copy_pages(decision)
        for slot in decision.freed_slots:
            self.slots.pop(slot, None)
        rows = list(decision.rows)
        for row in rows:
            self._update_slot(row)
        self._check_rows(rows)
        fault = self.fault(decision) if self.fault else None
        failed = fault if isinstance(fault, dict) else {}
        everybody = isinstance(fault, Exception) and not isinstance(fault, RowError)
        broken = set(fault.rows) if isinstance(fault, RowError) else set(failed)
        for i, row in enumerate(rows):
            self._write(row, garbage=everybody or i in broken)
        if isinstance(fault, Exception):
            raise fault
        moves = self._moves(rows)
        results = tuple(RowResult(error=failed[i]) if i in failed else self._answer(row) for i, row in enumerate(rows))
        self.rows_computed += decision.num_scheduled_tokens
        if isinstance(decision.rows, StepRows) and not failed and (self.always_draws or decision.step % 2):
            decodes = len(decision.rows.slots)
            results = DrawnRows([row.token_ids[0] for row in results[:decodes]], results[decodes:])
        return StepResult(decision.step, results, moves)

    def _moves(self, rows: Sequence[ScheduledRow]) -> tuple[GangMove, ...]:
        """How the gangs that draw in this step go on."""
        drawn: dict[str, list[Slot]] = {}
        for row in sorted((row for row in rows if row.flags.sample), key=lambda row: row.choice):
            if self.width_of(row.request_id):
                drawn.setdefault(row.request_id, []).append(self.slots[row.slot])
        return tuple(self._move(request_id, slots) for request_id, slots in drawn.items())

    def _move(self, request_id: str, slots: Sequence[Slot]) -> GangMove:
        members = [(slot.hashes_up_to(len(slot.tokens))[-1], slot.tokens[slot.num_prompt_tokens :]) for slot in slots]
        width = self.width_of(request_id)
        if members[0][1] and len(members) != width:
            raise WrongDecision(f"{len(members)} members of {request_id} draw, of {width}", "GANG")
        return null_move(request_id, members, slots[0].seed, width, self.vocab_size)

    def _swap_pages(self, decision: ScheduleDecision) -> None:
        """Sinks, swap-outs, swap-ins; all are checked, and bad pages found, before anything else is written."""
        for copy in decision.sinks:
            if copy.source not in self.host:
                raise WrongDecision(f"host page {copy.source} goes to disk and was never written", "I5")
            self.host[copy.target] = list(self.host[copy.source])
        for copy in decision.swap_outs:
            self.host[copy.target] = list(self.pages.get(copy.source, self._blank()))
        bad = self.corrupt(decision)
        if bad:
            raise CorruptPages(bad, f"host pages {list(bad)} are not what was written")
        for copy in decision.swap_ins:
            if copy.source not in self.host:
                raise WrongDecision(f"host page {copy.source} was never written", "I5")
            self.pages[copy.target] = list(self.host[copy.source])
        if len({copy.target for copy in decision.swap_outs}) != len(decision.swap_outs):
            raise WrongDecision("two swap-outs into one host page", "I5")
        moved = [copy.target for copy in (*decision.swap_ins, *decision.copies)]
        if len(set(moved)) != len(moved):
            raise WrongDecision("two moves into one page", "I5")

    def _copy_pages(self, decision: ScheduleDecision) -> None:
        if not decision.copies:
            return
        sources, targets = [c.source for c in decision.copies], [c.target for c in decision.copies]
        if set(sources) & set(targets):
            raise WrongDecision("a page is source and target of a copy in one step", "I5")
        if len(set(targets)) != len(targets):
            raise WrongDecision("two copies into one page", "I5")
        for copy in decision.copies:
            self.pages[copy.target] = list(self.pages.get(copy.source, self._blank()))

    def _blank(self) -> list[int | None]:
        return [None] * self.page_size

    def _update_slot(self, row: ScheduledRow) -> None:
        if row.init is not None:
            tables: list[list[int]] = [[] for _ in self.windows]
            init, key, salt = row.init, (row.request_id, row.choice), self.salt_of(row.request_id)
            self.slots[row.slot] = Slot(key, list(init.token_ids), init.num_prompt_tokens, init.seed, tables, salt)
        if row.slot not in self.slots:
            raise WrongDecision(f"slot {row.slot} was never initialised", "I14")
        for delta in row.page_deltas:
            table = self.slots[row.slot].tables[delta.group]
            if delta.first > len(table):
                raise WrongDecision("a page table delta leaves a gap", "I14")
            table[delta.first : delta.first + len(delta.pages)] = delta.pages

    def _check_rows(self, rows: Sequence[ScheduledRow]) -> None:
        if len({row.slot for row in rows}) != len(rows):
            raise WrongDecision("a slot has two rows", "I14")
        for row in rows:
            problem = _problem(row, self.slots[row.slot])
            if problem:
                raise WrongDecision(f"{row.request_id}/{row.choice}: {problem}", "I14")

    def _stretches(self, slot: Slot, group: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(page, from, to) of the positions [start, end) page by page."""
        table, size = slot.tables[group], self.page_size
        while start < end:
            column = start // size
            if column >= len(table):
                raise WrongDecision(f"{slot.key} has no page for position {start}", "I14")
            page, last = table[column], min(end, column * size + size)
            if page < 0:
                raise WrongDecision(f"{slot.key} has given up the page of position {start}", "I14")
            yield page, start, last
            start = last

    def _write(self, row: ScheduledRow, garbage: bool) -> None:
        slot, size, end = self.slots[row.slot], self.page_size, row.start + row.num_scheduled_tokens
        if row.flags.no_write:
            return
        hashes = slot.hashes_of(row)
        for group in range(len(self.windows)):
            for page, first, last in self._stretches(slot, group, row.start, end):
                self._check_writable(slot, page)
                held = self.pages.setdefault(page, self._blank())
                held[first % size : first % size + last - first] = (
                    [GARBAGE] * (last - first) if garbage else hashes[first:last]
                )

    def _check_writable(self, slot: Slot, page: int) -> None:
        owners = list(self.kv.allocator.owners(page).items())
        if not self.kv.has_branch(slot.key):  # ended after this step was planned: only the cache may have the page
            if any(self.kv.has_branch(owner.key) for owner, _ in owners):
                raise WrongDecision(f"{slot.key} has ended and writes to page {page} of {owners}", "I5")
            return
        if len(owners) != 1 or owners[0][0].key != slot.key or owners[0][1] != 1:
            raise WrongDecision(f"{slot.key} writes to page {page} of {owners}", "I5")

    def _read(self, slot: Slot, start: int, end: int, hashes: list[int]) -> None:
        """What attention does: every position that tokens [start, end) see must hold this very prefix."""
        size = self.page_size
        for group, window in enumerate(self.windows):
            first = max(0, start - window + 1) if window else 0
            for page, low, high in self._stretches(slot, group, first, end):
                held = self.pages.get(page, [])[low % size : low % size + high - low]
                if held != hashes[low:high]:
                    raise WrongDecision(f"{slot.key} reads foreign K/V in [{low}, {high}) in page {page}", "I14")

    def _answer(self, row: ScheduledRow) -> RowResult:
        slot, end = self.slots[row.slot], row.start + row.num_scheduled_tokens
        hashes = slot.hashes_of(row)
        self._read(slot, row.start, end, hashes)
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if row.flags.prompt_logprobs >= 0:
            last = min(end, slot.num_prompt_tokens - 1)
            prompt = tuple(prompt_logprob(hashes[p - 1], slot.tokens[p]) for p in range(row.start + 1, last + 1))
        if row.flags.sample:
            first = end - 1 - row.num_drafts
            drawn = [next_token(each, slot.seed, row.choice, self.vocab_size) for each in hashes[first:end]]
            path = _path(row, [token for token, _ in drawn])
            self._compact(slot, first, path)
            tokens = tuple(drawn[place][0] for place in path)
            slot.tokens.extend(tokens)
            found = tuple(TokenLogprobs(drawn[place][0], drawn[place][1], 1) for place in path)
            logprobs = found if row.flags.logprobs >= 0 else ()
        hidden = null_state(hashes[end - 1]) if row.flags.hidden and end == row.num_tokens else b""
        return RowResult(tokens, logprobs, prompt, hidden)

    def _compact(self, slot: Slot, first: int, path: Sequence[int]) -> None:
        """Bring what is along the path to the slots of its positions."""
        for depth, place in enumerate(path):
            for table in slot.tables:
                source, target = first + place, first + depth
                held = self.pages[table[source // self.page_size]][source % self.page_size]
                self.pages[table[target // self.page_size]][target % self.page_size] = held


def _path(row: ScheduledRow, drawn: Sequence[int]) -> list[int]:
    """The places of a row, its last known token (0) and drafts, along what was drawn."""
    behind = {pair: i for i, pair in enumerate(zip(row.parent_rows[1:], row.drafts, strict=True), 1)}
    path = [0]
    while (place := behind.get((path[-1], drawn[path[-1]]))) is not None:
        path.append(place)
    return path


def _problem(row: ScheduledRow, slot: Slot) -> str | None:
    """What is wrong with a row, given what the runner knows of its slot."""
    known, end = len(slot.tokens), row.start + row.num_scheduled_tokens - row.num_drafts
    if slot.key != (row.request_id, row.choice):
        return f"slot {row.slot} belongs to {slot.key}"
    if row.num_tokens != known:
        return f"{row.num_tokens} tokens known, {known} here"
    if list(row.token_ids[: end - row.start]) != slot.tokens[row.start : end]:
        return "the row's tokens are not the branch's"
    if end <= row.start:
        return "an empty row"
    if row.num_drafts and not row.flags.sample:
        return "drafts of a row that samples nothing"
    if row.flags.sample and end != row.num_tokens:
        return "samples before all tokens are there"
    if row.output_index != known - slot.num_prompt_tokens:
        return "wrong output index"
    if not row.reason:
        return "a row without a reason"
    if row.flags.no_write and row.num_scheduled_tokens != 1:
        return "no_write with several tokens"
    if row.init is not None and row.init.params.pools_all and row.start:
        return "pools all of its tokens, and does not begin with the first"
    return None
