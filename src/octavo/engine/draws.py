"""Which logits the rows of a step need, and what the tokens drawn from them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.batch import RowResult, ScheduledRow, TokenLogprobs
from octavo.decoding.speculation import accepted
from octavo.engine.slots import Slot

__all__ = ["Answer", "Wanted", "sampling_tokens", "take_drawn", "wanted_of", "without"]


@dataclass
class Wanted:
    """Which logits the step's rows need. Indices are into the logits, in the order of ``logit_rows``."""

    logit_rows: list[int] = field(default_factory=list)  # token rows of the batch
    sampled: list[tuple[int, int]] = field(default_factory=list)  # (logits index, decision row), in order of drafts
    prompt: list[tuple[int, int, int]] = field(default_factory=list)  # (logits index, decision row, prompt token id)


@dataclass
class Answer:
    """A ``RowResult`` in the making."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden: bytes = b""
    error: str | None = None

    def result(self) -> RowResult:
        if self.error is not None:
            return RowResult(error=self.error)
        return RowResult(self.token_ids, self.logprobs, tuple(self.prompt_logprobs), self.hidden)


def without(left: Sequence[int], bad: Sequence[int], wanted: Wanted, error: str, answers: list[Answer]) -> list[int]:
    """The draws ``left`` without those that cannot be made. What a row drew before one of them counts; if that is
    nothing, it has the error.
    """
    first = {row: i for i, (_, row) in reversed(list(enumerate(wanted.sampled)))}
    stop = {wanted.sampled[i][1]: i for i in sorted(bad, reverse=True)}
    for row, i in stop.items():
        if i == first[row]:
            answers[row].error = error
    return [i for i in left if i < stop.get(wanted.sampled[i][1], i + 1)]


def take_drawn(
    owners: Sequence[int], ids: Sequence[int], rows: Sequence[ScheduledRow], answers: list[Answer]
) -> list[tuple[int, int, int]]:
    """Give each decision row those of its draws that count; (draw, decision row, token) of these."""
    kept: list[tuple[int, int, int]] = []
    begin = 0
    while begin < len(owners):
        row, end = owners[begin], begin + 1
        while end < len(owners) and owners[end] == row:
            end += 1
        drawn = tuple(map(int, ids[begin:end]))
        answers[row].token_ids = drawn[: accepted(rows[row].drafts, drawn)]
        kept += [(begin + i, row, token) for i, token in enumerate(answers[row].token_ids)]
        begin = end
    return kept


def wanted_of(rows: Sequence[ScheduledRow], slots: Sequence[Slot], counts: Sequence[int]) -> Wanted:
    """Token rows whose logits are needed: those that predict a prompt token asked about, and those that sample.

    ``counts``: how many tokens each row samples.
    """
    wanted = Wanted()
    first = 0
    for index, (row, slot, count) in enumerate(zip(rows, slots, counts, strict=True)):
        if row.flags.prompt_logprobs >= 0:
            stop = min(row.start + len(row.token_ids), slot.num_prompt_tokens - 1)
            for position in range(row.start, stop):
                wanted.prompt.append((len(wanted.logit_rows), index, slot.tokens[position + 1]))
                wanted.logit_rows.append(first + position - row.start)
        first += len(row.token_ids)
        for at in sampling_tokens(row, first, count):
            wanted.sampled.append((len(wanted.logit_rows), index))
            wanted.logit_rows.append(at)
    return wanted


def sampling_tokens(row: ScheduledRow, end: int, count: int) -> range:
    """Those of the batch's tokens that a row samples ``count`` tokens from, if its own are the last before ``end``."""
    first = end - 1 - row.num_drafts
    return range(first, first + count)
