"""A draft model: a smaller model of the same vocabulary continues each branch, all branches at once.

It reads what the branch has, in pages of its own, and then its own guesses, one forward pass a depth. Of these, the
keys and values of guesses that turn out right stay; the pages behind them are given back.

known n tokens, 3 drafts    n - 1 in, then d0, then d1    K/V of n + 2 tokens    d0 right, d1 wrong: of n + 1

Method: Leviathan et al. and Chen et al. (2023), with drafts that depend on the same noise as the tokens: a draft is
what the branch would draw if the draft model's law were its own, so where the two laws are near, the tokens are mostly
the same (common random numbers). The exact verifier needs no law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from octavo.backends.ops import ForwardBatch, SamplingRow
from octavo.core.batch import PageTableDelta
from octavo.core.errors import OutOfPages, RowError
from octavo.core.kv import KVCacheManager
from octavo.core.params import SamplingParams
from octavo.core.undo import UndoLog
from octavo.decoding.speculation.proposer import Ask, BranchKey, Proposer

__all__ = ["DraftLimits", "DraftModelProposer"]

SHORT = 32  # tokens that are read together with the first draft; more are read before it, and counted apart
_GREEDY = SamplingRow(SamplingParams(temperature=0.0), 0)


@dataclass(frozen=True)
class DraftLimits:
    """The largest forward pass of a draft model; named as the scheduler's own limits are."""

    max_batched_tokens: int
    max_running_requests: int
    max_seq_len: int
    max_prefill_chunk: int  # tokens that are read of what branches have, before the drafts of one step

    @property
    def max_logit_rows(self) -> int:
        """One for each branch."""
        return self.max_running_requests


@dataclass
class _Branch:
    slot: int  # of its page table
    namespace: str
    written: int = 0  # tokens of the branch whose K/V are there
    guessed: list[int] = field(default_factory=list)  # drafts behind them whose K/V are there
    num_prompt_tokens: int = 0
    draw: SamplingRow = _GREEDY  # how its tokens are drawn, but for what depends on those before
    is_lost: bool = False  # it has no finite logit


@dataclass
class _Row:
    """A branch's part of a forward pass: ``token_ids`` from position ``start`` on."""

    key: BranchKey
    branch: _Branch
    known: Sequence[int]  # all tokens of the branch
    token_ids: Sequence[int]
    start: int
    most: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position behind."""
        return self.start + len(self.token_ids)

    @property
    def sampling(self) -> SamplingRow:
        """How the token behind is drawn."""
        draw = self.branch.draw
        return draw if draw is _GREEDY else replace(draw, output_index=self.end - self.branch.num_prompt_tokens)

    def next(self) -> _Row:
        """Its last draft is read."""
        return replace(self, token_ids=self.drafts[-1:], start=self.end)


class _Tables:
    """Page tables by slot, changed where they change: the backend's own array, or lists."""

    def __init__(self, backend: Any, num_groups: int) -> None:
        self._array = backend.step_arrays(num_groups).tables if hasattr(backend, "step_arrays") else None
        self._lists: dict[int, list[list[int]]] = {}
        self._num_groups = num_groups

    def clear(self, slot: int) -> None:
        """Another branch takes the slot."""
        self._lists[slot] = [[] for _ in range(self._num_groups)]
        if self._array is not None:
            self._array.clear(slot)

    def place(self, slot: int, deltas: Sequence[PageTableDelta]) -> None:
        """What `KVCacheManager.reserve` tells."""
        for delta in deltas:
            if self._array is not None:
                self._array.place(slot, delta.group, delta.first, delta.pages)
            else:
                self._lists[slot][delta.group][delta.first : delta.first + len(delta.pages)] = delta.pages

    def of(self, slots: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Tables of a step, as `batch` takes them, and what else it takes."""
        if self._array is not None:
            return self._array.array, {"table_rows": slots}
        return [[self._lists[slot][group] for slot in slots] for group in range(self._num_groups)], {}


class DraftModelProposer(Proposer):
    """Drafts of a model on a backend. Deterministic where the backend is; never fails a branch: it has no drafts then.

    ``prefix_cache``: prompts that were read are found again, within a namespace. ``clock`` measures what drafts take.
    """

    def __init__(
        self,
        model: Any,
        backend: Any,
        weights: Mapping[str, Any],
        *,
        num_pages: int,
        page_size: int,
        limits: DraftLimits,
        prefix_cache: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.model, self.backend, self.weights, self.limits, self.clock = model, backend, weights, limits, clock
        groups = model.kv_groups()
        self.pool = backend.allocate_kv(num_pages, page_size, groups)
        if hasattr(model, "make_room"):
            model.make_room(self.pool, limits)
        self.kv = KVCacheManager(num_pages, page_size, groups, store=self.pool, enable_prefix_cache=prefix_cache)
        self._branches: dict[BranchKey, _Branch] = {}
        self._free_slots: list[int] = []
        self._tables = _Tables(backend, len(groups))
        self.draft_seconds = self.catch_up_seconds = 0.0
        self.reads, self.num_read = True, 0

    def open(self, branch_key: BranchKey, namespace: str, num_prompt_tokens: int) -> None:
        """See `Proposer`."""
        self.drop(branch_key)
        slot = self._free_slots.pop() if self._free_slots else len(self._branches)
        self._branches[branch_key] = _Branch(slot, namespace, num_prompt_tokens=num_prompt_tokens)
        self._tables.clear(slot)

    def draws_as(self, branch_key: BranchKey, params: SamplingParams, seed: int) -> None:
        """See `Proposer`. Drafts are drawn after the draft model's law without penalties, bans, grammar."""
        if params.temperature:
            cuts = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            self._branches[branch_key].draw = SamplingRow(SamplingParams(**cuts), seed, branch_key[1])

    def propose(self, branch_key: BranchKey, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See `Proposer`."""
        return self.propose_all([(branch_key, token_ids, most)])[0]

    def propose_all(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """Drafts for each branch; none where it has no pages, or has more to be read than fits into one step."""
        begun = self.clock()
        for key, token_ids, _ in asks:
            self._agree(key, token_ids)
        self._catch_up(asks)
        read = self.clock()
        drafted = self._draft(asks)
        self.catch_up_seconds += read - begun
        self.draft_seconds += self.clock() - read
        return [drafted.get(key, ()) for key, _, _ in asks]

    def rehearse(self) -> list[tuple[int, float, int, float]]:
        """Drafts for one branch, and for as many as there may be, of tokens that mean nothing: branches and seconds of
        their pass, tokens that were read before and their seconds. Nothing of it stays, but that later passes are warm.
        """
        most = min(self.limits.max_running_requests, self.limits.max_batched_tokens)
        longest = min(2 * SHORT, self.limits.max_seq_len - 1)
        told = []
        for branches, length in ((1, longest), (most, 1), (1, longest), (most, 1)):
            asks = [(("", branch), [0] * length, 1) for branch in range(branches)]
            for key, _, _ in asks:
                self.open(key, "", length)
            self.draft_seconds, self.catch_up_seconds, self.num_read = 0.0, 0.0, 0
            drafted = sum(map(len, self.propose_all(asks)))
            told.append((drafted, self.draft_seconds, self.num_read, self.catch_up_seconds))
            for key, _, _ in asks:
                self.drop(key)
            self.flush()
        self.draft_seconds, self.catch_up_seconds, self.num_read = 0.0, 0.0, 0
        return told[2:]

    def unread(self, branch_key: BranchKey, token_ids: Sequence[int]) -> int:
        """See `Proposer`. What others have read of a branch's beginning is found only when it is asked for."""
        branch = self._branches[branch_key]
        return max(0, len(token_ids) - 1 - branch.written - len(branch.guessed))

    def observe(self, branch_key: BranchKey, token_ids: Sequence[int]) -> None:
        """See `Proposer`. Nothing is read before it is asked for."""

    def most_bytes(self, branches: int, tokens: int) -> int:
        """See `Proposer`. Pages and weights are in the memory plan by themselves."""
        return 0

    def drop(self, branch_key: BranchKey) -> None:
        """See `Proposer`."""
        branch = self._branches.pop(branch_key, None)
        if branch is not None:
            self.kv.release_branch(branch_key)
            self._free_slots.append(branch.slot)

    def flush(self) -> None:
        """Forget what was read for branches that have ended."""
        self.kv.flush_prefix_cache()

    # ---- what is there

    def _agree(self, key: BranchKey, token_ids: Sequence[int]) -> None:
        """Keep what was written of the drafts that were right; find what others have written of the branch."""
        branch = self._branches[key]
        if not self.kv.has_branch(key):
            undo = UndoLog()
            hit = self.kv.begin(key, branch.namespace, token_ids, 0.0, undo, may_wait=False)
            undo.clear()
            self._copy_pages()
            branch.written = hit.num_tokens
            return
        for guessed, known in zip(branch.guessed, token_ids[branch.written :], strict=False):
            if guessed != known:
                break
            branch.written += 1
        branch.guessed = []
        self.kv.give_back(key, branch.written)

    def _reserve(self, key: BranchKey, num_tokens: int) -> bool:
        undo = UndoLog()
        try:
            deltas = self.kv.reserve(key, num_tokens, undo)
        except OutOfPages:
            undo.rollback()
            return False
        undo.clear()
        self._tables.place(self._branches[key].slot, deltas)
        self._copy_pages()
        return True

    def _copy_pages(self) -> None:
        copies = self.kv.take_copies()
        if copies:
            self.backend.copy_pages(self.pool, [(copy.source, copy.target) for copy in copies])

    def _publish(self, row: _Row) -> None:
        """The K/V of the row are there. May change the branch's page table, of which the next `reserve` tells."""
        row.branch.written = row.end
        self.kv.commit(row.key, row.known, row.end, 0.0)

    # ---- forward passes

    def _catch_up(self, asks: Sequence[Ask]) -> None:
        """Read what branches have, but for the last token, where that is much: in one pass for all."""
        left = min(self.limits.max_prefill_chunk, self.limits.max_batched_tokens)
        rows: list[_Row] = []
        for key, known, _ in asks:
            branch = self._branches[key]
            start, missing = branch.written, min(len(known), self.limits.max_seq_len) - 1 - branch.written
            count = min(left, missing)
            if missing <= SHORT or not count or branch.is_lost or len(rows) == self.limits.max_running_requests:
                continue
            if self._reserve(key, start + count):
                rows.append(_Row(key, branch, known, known[start : start + count], start))
                left -= count
        if rows:
            self.model.forward(self.backend, self.weights, self._batch(rows, logits=False))
        for row in rows:
            self.num_read += len(row.token_ids)
            self._publish(row)

    def _draft(self, asks: Sequence[Ask]) -> dict[BranchKey, list[int]]:
        """One draft for each branch, then one more for each that may have more, and so on."""
        rows = active = self._first_rows(asks)
        while active:
            ids = self._next(active)
            for row, token in zip(active, ids, strict=False):
                row.drafts.append(token)
            active = [row.next() for row in active if ids and len(row.drafts) < row.most]
        for row in filter(lambda row: row.drafts, rows):
            self._publish(row)
            row.branch.guessed = row.drafts[:-1]
        return {row.key: row.drafts for row in rows}

    def _first_rows(self, asks: Sequence[Ask]) -> list[_Row]:
        """Those that have few tokens to be read, with pages for them and for all drafts but the last."""
        left, rows = self.limits.max_batched_tokens, list[_Row]()
        for key, known, most in asks:
            branch = self._branches[key]
            start = min(branch.written, len(known) - 1)  # the last token once more: its logits are wanted
            missing = len(known) - start
            most = min(most, self.limits.max_seq_len - len(known) + 1)
            if missing > min(left, SHORT + 1) or most <= 0 or branch.is_lost:
                continue
            if len(rows) < self.limits.max_running_requests and self._reserve(key, len(known) + most - 1):
                rows.append(_Row(key, branch, known, known[start:], start, most))
                left -= missing
        return rows

    def _next(self, rows: Sequence[_Row]) -> Sequence[int]:
        """The token behind each row; none if one has no finite logit: its branch gets no drafts any more."""
        batch = self._batch(rows, logits=True)
        logits = self.model.forward(self.backend, self.weights, batch)
        try:
            ids = self.backend.sample(self.backend.process_logits(logits, batch.sampling), batch.sampling)
        except RowError as error:
            for at in error.rows:
                rows[at].branch.is_lost = True
            return ()
        return [int(token) for token in ids]

    def _batch(self, rows: Sequence[_Row], logits: bool) -> ForwardBatch:
        tables, where = self._tables.of([row.branch.slot for row in rows])
        ends = accumulate(len(row.token_ids) for row in rows)
        batch: ForwardBatch = self.backend.batch(
            [token for row in rows for token in row.token_ids],
            [position for row in rows for position in range(row.start, row.end)],
            [len(row.token_ids) for row in rows],
            tables,
            self.pool,
            logit_rows=[end - 1 for end in ends] if logits else [],
            **where,
        )
        batch.sampling = tuple(row.sampling for row in rows) if logits else ()
        return batch
