"""What a branch's row of a step says: one row in full, or the plain decodes of many branches as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.batch import SAMPLES, WRITES, PageTableDelta, RowFlags, ScheduledRow, SlotInit, StepRows, build_batch
from octavo.core.gang import held_back, short_of
from octavo.core.kv_table import PrefixHit
from octavo.core.request import Branch, RequestState

UNKNOWN = -1  # a token that is being drawn


def decode_rows(
    steady: Sequence[Branch],
    page_deltas: dict[int, tuple[PageTableDelta, ...]],
    like: StepRows | None = None,
    ahead: int = 0,
) -> StepRows:
    """The next token of branches of which all is resident but the last token; deltas by index.

    ``like`` are rows of the same branches in the same slots: what cannot have changed is taken from there. ``ahead`` 1:
    the token after that, which the step in flight has yet to draw (`UNKNOWN`).
    """
    starts = [branch.num_resident_tokens + ahead for branch in steady]
    return StepRows(
        request_ids=[branch.key[0] for branch in steady] if like is None else like.request_ids,
        choices=[branch.choice for branch in steady] if like is None else like.choices,
        slots=[_slot(branch) for branch in steady] if like is None else like.slots,
        starts=starts,
        token_ids=[UNKNOWN] * len(steady) if ahead else [branch.token_ids[-1] for branch in steady],
        output_indices=[start + 1 - branch.num_prompt_tokens for start, branch in zip(starts, steady, strict=True)],
        page_deltas=page_deltas,
    )


def make_row(
    branch: Branch, tokens: int, page_deltas: tuple[PageTableDelta, ...], hit: PrefixHit | None = None
) -> ScheduledRow:
    """The next ``tokens`` tokens of a branch; ``hit`` is what it has just been attached to."""
    start, end = branch.num_resident_tokens, branch.num_resident_tokens + tokens
    return ScheduledRow(
        request_id=branch.key[0],
        choice=branch.choice,
        slot=_slot(branch),
        start=start,
        token_ids=tuple(branch.token_ids[start:end]),
        num_tokens=branch.num_tokens,
        output_index=branch.num_output_tokens,
        flags=_flags(branch, start, end, hit is not None and hit.no_write),
        page_deltas=page_deltas,
        init=_slot_init(branch) if branch.needs_init else None,
        reason=_reason(branch, start, end, 0 if hit is None else hit.num_tokens),
    )


def grant(branches: Sequence[Branch], budget: int, most: int, chunk: int) -> list[tuple[Branch, int]]:
    """What `build_batch` gives of ``budget`` tokens to at most ``most`` branches; a gang that would not draw as a whole
    draws nothing.
    """
    by_key = {branch.key: branch for branch in branches}
    batch = build_batch([_ask_of(branch) for branch in branches], budget, most, chunk)
    granted = [(by_key[key], tokens) for key, _, tokens in batch]
    short = short_of(branches, {branch.key for branch, _ in granted})
    return grant([b for b in branches if b not in short], budget, most, chunk) if short else granted


def _ask_of(branch: Branch) -> dict[str, Any]:
    phase = "decode" if branch.state is RequestState.DECODING else "prefill"
    return {"id": branch.key, "phase": phase, "prompt_left": branch.num_missing_tokens - held_back(branch)}


def _flags(branch: Branch, start: int, end: int, no_write: bool) -> RowFlags:
    params = branch.params
    sample = end == branch.num_tokens and branch.num_tokens < branch.request.token_limit
    if branch.is_plain and not no_write:
        return SAMPLES if sample else WRITES
    logprobs = -1
    if sample and params.draws_logprobs:
        logprobs = params.num_top_logprobs
    last_predicted = min(end, branch.num_prompt_tokens - 1)
    prompt = params.prompt_logprobs if branch.wants_prompt_logprobs else None
    return RowFlags(
        sample=sample,
        logprobs=logprobs,
        logprob_ids=params.logprob_token_ids if sample else (),
        prompt_logprobs=prompt if prompt is not None and last_predicted > len(branch.prompt_logprobs) else -1,
        hidden=params.pools_all or (params.pooling is not None and end == branch.num_tokens),
        no_write=no_write,
    )


def _slot(branch: Branch) -> int:
    return -1 if branch.slot is None else branch.slot


def _slot_init(branch: Branch) -> SlotInit:
    return SlotInit(
        params=branch.params,
        seed=branch.seed,
        token_ids=tuple(branch.token_ids),
        num_prompt_tokens=branch.num_prompt_tokens,
        eos_token_ids=branch.request.eos_token_ids,
        adapter=branch.request.adapter,
        mu=branch.mu,
    )


def _reason(branch: Branch, start: int, end: int, hit: int) -> str:
    """``decode``, or ``prefill 16..48 of 100``; ``recompute`` after a preemption; the prefix hit where there is one."""
    if branch.state is RequestState.DECODING:
        return "decode"
    verb = "recompute" if branch.admissions > 1 else "prefill"
    cached = f", {hit} from the prefix cache" if hit else ""
    return f"{verb} {start}..{end} of {branch.num_tokens}{cached}"
