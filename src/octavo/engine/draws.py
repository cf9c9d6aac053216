"""Which logits the rows of a step need, and what the tokens drawn from them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.batch import RowResult, ScheduledRow, TokenLogprobs
from octavo.decoding.speculation import accepted
from octavo.engine.slots import Slot
from octavo.engine.trees import token_rows

__all__ = ["Answer", "Wanted", "take_drawn", "wanted_of", "without"]


@dataclass
class Wanted:
    """Which logits the step's rows need. Indices are into the logits, in the order of ``logit_rows``."""

    logit_rows: list[int] = field(default_factory=list)  # token rows of the batch
    sampled: list[tuple[int, int, int]] = field(default_factory=list)  # (logits index, decision row, row of its tree)
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
    """The draws ``left`` without those that cannot be made. What was drawn before one of them counts; if that is
    nothing, the decision row has the error.
    """
    for i in bad:
        _, row, place = wanted.sampled[i]
        if place == 0:
            answers[row].error = error
    return [i for i in left if i not in bad and answers[wanted.sampled[i][1]].error is None]


def take_drawn(
    sampled: Sequence[tuple[int, int]], ids: Sequence[int], rows: Sequence[ScheduledRow], answers: list[Answer]
) -> list[tuple[int, int, int]]:
    """Give each decision row those of its draws that count; (draw, decision row, token) of these.

    ``sampled``: (decision row, row of its tree) of each draw.
    """
    found: dict[int, dict[int, int]] = {}  # by decision row: the draw from each row of its tree
    for i, (row, place) in enumerate(sampled):
        found.setdefault(row, {})[place] = i
    kept: list[tuple[int, int, int]] = []
    for row, draws in found.items():
        tokens = {place: int(ids[i]) for place, i in draws.items()}
        path = accepted(rows[row].drafts, rows[row].parent_rows, tokens)
        answers[row].token_ids = tuple(tokens[place] for place in path)
        kept += [(draws[place], row, tokens[place]) for place in path]
    return kept


def wanted_of(rows: Sequence[ScheduledRow], slots: Sequence[Slot], places: Sequence[Sequence[int]]) -> Wanted:
    """Token rows whose logits are needed: those that predict a prompt token asked about, and those that sample.

    ``places``: the rows of its tree that each row samples from.
    """
    wanted = Wanted()
    first = 0
    for index, (row, slot, sampled) in enumerate(zip(rows, slots, places, strict=True)):
        if row.flags.prompt_logprobs >= 0:
            stop = min(row.start + len(row.token_ids), slot.num_prompt_tokens - 1)
            for position in range(row.start, stop):
                wanted.prompt.append((len(wanted.logit_rows), index, slot.tokens[position + 1]))
                wanted.logit_rows.append(first + position - row.start)
        first += len(row.token_ids)
        for place, at in zip(sampled, token_rows(row, first, sampled), strict=True):
            wanted.sampled.append((len(wanted.logit_rows), index, place))
            wanted.logit_rows.append(at)
    return wanted
