"""What the scheduler tells the runner to do in one step, and what the runner answers: plain, serialisable values.

plan(now) -> ScheduleDecision -> ModelRunner.execute -> StepResult -> commit(result)

Most rows of most steps plainly decode: one token in, one drawn. These travel as columns (`StepRows`, `DrawnRows`), and
whoever wants single rows reads the same objects as sequences. What is made for every row and step is not frozen: that
would cost more than all else about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.lazy import LazyRows
from octavo.core.params import SamplingParams


@dataclass(frozen=True)
class RowFlags:
    """What a row asks of the forward pass beyond writing its K/V."""

    sample: bool = False  # sample one token from the logits of the row's last token
    logprobs: int = -1  # -1: none; k >= 0: the sampled token's logprob and the k most likely
    logprob_ids: tuple[int, ...] = ()  # logprobs of exactly these ids as well
    prompt_logprobs: int = -1  # -1: none; k >= 0: for every prompt token that this row's tokens predict
    hidden: bool = False  # this row's tokens are pooled; the row that ends the prompt gives the vector
    no_write: bool = False  # the K/V of this one-token row is already in its (shared) page
    parent_rows: tuple[int, ...] = ()  # drafts in a tree: see `ScheduledRow.parent_rows`; empty: a chain


@dataclass(frozen=True)
class SlotInit:
    """Sent when a branch (re)enters a slot: everything that the per-slot arrays must hold for it."""

    params: SamplingParams
    seed: int  # resolved: never None
    token_ids: tuple[int, ...]  # all known tokens, prompt then output
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()  # with stop_token_ids, what min_tokens forbids
    adapter: str = ""  # digest of its content; empty: none
    mu: float = 0.0  # what mirostat allows the next token


@dataclass(frozen=True)
class PageTableDelta:
    """Page ids to write into one group's page table of a slot, from index ``first`` on. -1 marks a freed page."""

    group: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Compaction:
    """Before its row is computed, what stays of a branch's tokens goes to other pages (`SnapKV`, `H2O`).

    Of its first ``num_tokens`` tokens, of which ``token_ids`` are the last ones, those from column of position
    ``first`` on are in the pages ``sources``; those that stay are to fill ``targets`` in their order. They stand in the
    last columns of all, so the columns before are free. Without ``targets`` all stay, and only what is looked at is
    counted.
    """

    num_tokens: int
    token_ids: tuple[int, ...]  # what these look at says what stays
    first: int  # tokens that went before
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(slots=True)
class ScheduledRow:
    """One branch's share of a step: ``len(token_ids)`` tokens at positions ``start, start + 1, ...``.

    With d ``num_drafts`` the last d tokens are guesses behind all known ones, and the row samples d + 1 tokens, output
    tokens ``output_index, output_index + 1, ...``: each as if the drafts before it were known. Those count that come up
    to and with the first that is not its draft. Where the drafts are a tree, there are several paths of them: each
    token is at the position of its depth, and still has the K/V slot of its place in the row until its path is taken.
    """

    request_id: str
    choice: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    num_tokens: int  # all known tokens of the branch, prompt and output
    output_index: int  # index of the output token that this row samples; meaningful with flags.sample
    flags: RowFlags = RowFlags()
    page_deltas: tuple[PageTableDelta, ...] = ()
    init: SlotInit | None = None
    reason: str = ""  # why it runs now: "decode", "prefill", "chunk 2 of 5", "recompute", ...
    num_drafts: int = 0
    compaction: Compaction | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that this step computes for the branch."""
        return len(self.token_ids)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The guesses among its tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def parent_rows(self) -> Sequence[int]:
        """Of the last known token (0) and its drafts (1, 2, ...): which each of them follows; -1 for the first."""
        return self.flags.parent_rows or range(-1, self.num_drafts)


SAMPLES, WRITES = RowFlags(sample=True), RowFlags()  # of nearly every row, so made once


@dataclass(slots=True, eq=False)
class StepRows(LazyRows[ScheduledRow]):
    """The rows of a step: those that plainly decode, as columns, then all others.

    A plain decode of n known tokens computes token n - 1 at position ``starts`` = n - 1, draws token n, output token
    ``output_indices``, and asks for nothing else (flags ``SAMPLES``). ``page_deltas`` are those of few rows, by index.
    """

    request_ids: list[str]
    choices: list[int]
    slots: list[int]
    starts: list[int]
    token_ids: list[int]
    output_indices: list[int]
    page_deltas: dict[int, tuple[PageTableDelta, ...]]
    others: Sequence[ScheduledRow] = ()

    def __len__(self) -> int:
        return len(self.slots) + len(self.others)

    def _row(self, index: int) -> ScheduledRow:
        if index >= len(self.slots):
            return self.others[index - len(self.slots)]
        return ScheduledRow(
            request_id=self.request_ids[index],
            choice=self.choices[index],
            slot=self.slots[index],
            start=self.starts[index],
            token_ids=(self.token_ids[index],),
            num_tokens=self.starts[index] + 1,
            output_index=self.output_indices[index],
            flags=SAMPLES,
            page_deltas=self.page_deltas.get(index, ()),
            reason="decode",
        )


@dataclass(frozen=True)
class PageCopy:
    """Copy all bytes of page ``source`` to page ``target`` before the step's writes. In a swap one is a host page."""

    source: int
    target: int


@dataclass(frozen=True)
class Preemption:
    """A branch that lost its pages in this plan, to whom, and how it will come back."""

    request_id: str
    choice: int
    kind: str  # "recompute" or "swap"
    reason: str


@dataclass(slots=True)
class ScheduleDecision:
    """One step: sinks (host memory to disk), swap-outs, swap-ins, page copies, writes, attention, in that order."""

    model: str
    step: int
    rows: Sequence[ScheduledRow] = ()
    copies: tuple[PageCopy, ...] = ()
    swap_ins: tuple[PageCopy, ...] = ()
    swap_outs: tuple[PageCopy, ...] = ()
    freed_slots: tuple[int, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    num_waiting: int = 0
    num_running: int = 0
    sinks: tuple[PageCopy, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of all rows."""
        if isinstance(self.rows, StepRows):
            return len(self.rows.slots) + sum(len(row.token_ids) for row in self.rows.others)
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_scheduled_sequences(self) -> int:
        """Rows of the step."""
        return len(self.rows)


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprob of one token (natural log of the raw softmax) and of the most likely ones, ties by lower id."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely
    top: tuple[tuple[int, float], ...] = ()
    chosen: tuple[tuple[int, float], ...] = ()  # for RowFlags.logprob_ids

    def to_json(self) -> list[Any]:
        """As JSON values, in the order of the fields."""
        top, chosen = [list(pair) for pair in self.top], [list(pair) for pair in self.chosen]
        return [self.token_id, self.logprob, self.rank, top, chosen]

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> TokenLogprobs:
        """The inverse of ``to_json``. Raises ``ValueError`` or ``TypeError`` for anything else."""
        token_id, logprob, rank, top, chosen = saved
        return cls(token_id, logprob, rank, tuple((t, p) for t, p in top), tuple((t, p) for t, p in chosen))


@dataclass(slots=True)
class RowResult:
    """What a row produced: sampled tokens, their logprobs, logprobs of prompt tokens from start+1, a pooled state
    (float32, little-endian), or an error."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: bytes = b""
    error: str | None = None


@dataclass(slots=True, eq=False)
class DrawnRows(LazyRows[RowResult]):
    """The results of a step's ``StepRows``: the token drawn for each plain decode, then what the others came to."""

    ids: list[int]
    others: Sequence[RowResult] = ()

    def __len__(self) -> int:
        return len(self.ids) + len(self.others)

    def _row(self, index: int) -> RowResult:
        return RowResult((self.ids[index],)) if index < len(self.ids) else self.others[index - len(self.ids)]


@dataclass(frozen=True)
class GangEnding:
    """What a choice of a gang said in all, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if asked for

    def to_json(self) -> list[Any]:
        """As JSON values, in the order of the fields."""
        scores = [entry.to_json() for entry in self.logprobs]
        return [list(self.token_ids), self.finish_reason, self.stop_reason, scores]

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> GangEnding:
        """The inverse of ``to_json``. Raises ``ValueError`` or ``TypeError`` for anything else."""
        token_ids, why, at, scores = saved
        return cls(tuple(token_ids), why, at, tuple(map(TokenLogprobs.from_json, scores)))


@dataclass(frozen=True)
class GangMove:
    """How a gang goes on after a step in which it has drawn: one entry for each choice, in their order.

    Choice i takes over the tokens and pages that choice ``parents[i]`` had, and ``token_ids[i]`` behind them. With
    ``endings`` all choices end. Tokens that the rows themselves drew do not count. ``ended`` is what the request keeps
    for its driver (`Request.ended`), all of it anew with each move.
    """

    request_id: str
    parents: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if asked for
    endings: tuple[GangEnding, ...] = ()
    ended: tuple[GangEnding, ...] = ()


@dataclass(slots=True)
class StepResult:
    """One ``RowResult`` for each row of the decision, in its order, and a move for each gang that has drawn."""

    step: int
    rows: Sequence[RowResult]
    moves: tuple[GangMove, ...] = ()


def build_batch(
    requests: Sequence[Mapping[str, Any]], token_budget: int, max_sequences: int, prefill_chunk: int
) -> list[tuple[Any, str, int]]:
    """Hand out one step's tokens: ``(id, phase, tokens)``, decodes first, in the given order.

    ``requests`` are ``{"id", "phase": "decode" | "waiting" | "prefill", "prompt_left"}``; a decode takes one token, the
    others what is left of the prompt, bounded by the chunk and the budget. Nothing is changed, no fairness promised:
    that is the caller's order. Raises ``InvalidInput`` for a budget below 1 or an id that comes twice.
    """
    for name, budget in (
        ("token_budget", token_budget),
        ("max_sequences", max_sequences),
        ("prefill_chunk", prefill_chunk),
    ):
        if budget <= 0:
            raise InvalidInput(name, budget, "scheduler budgets must be positive")
    seen: set[Hashable] = set()
    for request in requests:
        if request["id"] in seen:
            raise InvalidInput("id", request["id"], "request ids must be unique within a scheduling round")
        seen.add(request["id"])
    decodes = [request for request in requests if request["phase"] == "decode"]
    prefills = [request for request in requests if request["phase"] in ("waiting", "prefill")]
    batch: list[tuple[Any, str, int]] = []
    left = token_budget
    for request in decodes + prefills:
        if len(batch) == max_sequences or left == 0:
            break
        tokens = 1 if request["phase"] == "decode" else min(request["prompt_left"], prefill_chunk, left)
        if tokens > 0:
            batch.append((request["id"], request["phase"], tokens))
            left -= tokens
    return batch
