"""Sampling of one row of logits in the standard library: the definition that every backend follows.

Order: logit bias; allowed, banned and end ids; grammar mask; repetition, frequency and presence penalties, DRY
(`process_row`); temperature, fixed or dynamic; candidates by (logit descending, id ascending), cut by top_n_sigma,
top_k, typical_p, top_p, min_p, XTC, mirostat; noise (`sample_row`). backends/shaping.py has the rarer ones.
A banned token's logit is -inf and it can never be chosen. Logprobs come from the raw logits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from octavo.backends import shaping
from octavo.backends.ops import SamplingRow
from octavo.backends.random import GUMBEL_MAX, GUMBEL_MIN, MASK32, gumbel, philox4x32
from octavo.backends.shaping import Candidate
from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput, RowError
from octavo.core.params import SamplingParams

BANNED = -math.inf
REACH = GUMBEL_MAX - GUMBEL_MIN  # a candidate further behind the best one than this cannot win


def has_penalties(p: SamplingParams) -> bool:
    """True when a logit depends on how often its token has occurred."""
    any_at_all = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return any_at_all and p.repeat_last_n != 0


def is_plain(wanted: SamplingRow) -> bool:
    """True when `process_row` would change nothing."""
    p = wanted.params
    bans = p.banned_token_ids or wanted.banned_now or p.allowed_token_ids is not None or wanted.grammar_mask is not None
    return not (p.logit_bias or bans or has_penalties(p) or wanted.penalties)


def leaves_a_token(wanted: SamplingRow, vocab_size: int) -> bool:
    """Whether any id is allowed, by bans, ``allowed_token_ids`` and grammar together."""
    allowed, mask, banned = wanted.params.allowed_token_ids, wanted.grammar_mask, frozenset(banned_ids(wanted))
    ids = range(vocab_size) if allowed is None else allowed
    in_mask = (i for i in ids if mask is None or (i >> 3 < len(mask) and mask[i >> 3] >> (i & 7) & 1))
    return any(i not in banned for i in in_mask)


def banned_ids(wanted: SamplingRow) -> tuple[int, ...]:
    """The ids that the row forbids by name."""
    return (*wanted.params.banned_token_ids, *wanted.banned_now)


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidInput for a token id outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidInput(field, token_id, f"token ids are 0 to {vocab_size - 1}")


def grammar_allows(mask: bytes, token_id: int) -> bool:
    """Whether the mask has the bit of this id set."""
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def penalised(logit: float, wanted: SamplingRow, token_id: int) -> float:
    """A logit after the penalties of a token that occurred in the prompt or the output.

    Repetition divides a positive logit and multiplies a negative one; frequency subtracts once per output occurrence,
    presence once if there is any.
    """
    p = wanted.params
    logit = logit / p.repetition_penalty if logit > 0.0 else logit * p.repetition_penalty
    count = wanted.output_counts.get(token_id, 0)
    return logit - count * p.frequency_penalty - (p.presence_penalty if count > 0 else 0.0)


def process_row(logits: list[float], wanted: SamplingRow) -> list[float]:
    """A row after bias, bans and penalties: [V]. The row itself when nothing is asked of it.

    Raises InvalidInput for an id outside the vocabulary.
    """
    if is_plain(wanted):
        return logits
    row, p = list(logits), wanted.params
    check_ids("logit_bias", p.logit_bias, len(row))
    for token_id, bias in p.logit_bias.items():
        row[token_id] += bias
    _ban(row, wanted)
    for token_id in {**wanted.prompt_counts, **wanted.output_counts}:
        row[token_id] = penalised(row[token_id], wanted, token_id)
    for token_id, penalty in wanted.penalties.items():
        row[token_id] -= penalty
    return row


def _ban(row: list[float], wanted: SamplingRow) -> None:
    allowed, mask = wanted.params.allowed_token_ids, wanted.grammar_mask
    if allowed is not None:
        check_ids("allowed_token_ids", allowed, len(row))
        kept = {i: row[i] for i in allowed}
        row[:] = [BANNED] * len(row)
        for token_id, logit in kept.items():
            row[token_id] = logit
    check_ids("banned_token_ids", banned_ids(wanted), len(row))
    for token_id in banned_ids(wanted):
        row[token_id] = BANNED
    if mask is not None:
        row[:] = [logit if grammar_allows(mask, i) else BANNED for i, logit in enumerate(row)]


def sample(logits: Sequence[Sequence[float]], rows: Sequence[SamplingRow]) -> list[int]:
    """One id per row. Raises RowError naming the rows (indices into `rows`) from which nothing can be drawn."""
    ids = [sample_row(row, wanted) for row, wanted in zip(logits, rows, strict=True)]
    refuse_undrawable(ids)
    return [i for i in ids if i is not None]


def refuse_undrawable(ids: Sequence[int | None]) -> None:
    """Raises RowError when a row has no id."""
    bad = [index for index, token_id in enumerate(ids) if token_id is None]
    if bad:
        raise RowError(bad, "no token can be drawn: every token is banned, or a logit is not a number")


def sample_row(logits: Sequence[float], wanted: SamplingRow) -> int | None:
    """The id drawn from one row of processed logits; None when all are -inf, all are inf, or one is NaN."""
    if any(v != v for v in logits):
        return None
    top = max(logits)
    if top == BANNED or min(logits) == math.inf:
        return None
    return draw(candidates(logits, top, wanted), wanted)


def candidates(logits: Sequence[float], top: float, wanted: SamplingRow) -> list[Candidate]:
    """What may be drawn: at temperature 0 the first of the largest; with any cut ordered by (logit descending, id
    ascending) and cut. `top` is the largest logit.
    """
    p = wanted.params
    if top == math.inf:  # infinitely likely: they share the place of the largest
        logits, top = [0.0 if v == math.inf else BANNED for v in logits], 0.0
    temperature = shaping.temperature_of(logits, top, p)
    if temperature == 0.0:
        return [(0.0, list(logits).index(top))]
    if p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 and not p.shapes:
        all_of_them = ((v - top) / temperature for v in logits)
        return [(z, i) for i, z in enumerate(all_of_them) if z >= -REACH]
    floor = shaping.sigma_floor(logits, top, p.top_n_sigma) if p.top_n_sigma > 0.0 else BANNED
    order = sorted((i for i, v in enumerate(logits) if v != BANNED and v >= floor), key=lambda i: (-logits[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    ordered = [((logits[i] - top) / temperature, i) for i in order]
    if p.typical_p < 1.0:
        ordered = shaping.typical(ordered, p.typical_p)
    ordered = cut(ordered, p.top_p, p.min_p)
    if p.xtc_probability > 0.0 and shaping.excludes_top_choices(wanted):
        ordered = shaping.without_top_choices(ordered, p.xtc_threshold)
    return shaping.mirostat(ordered, p.mirostat, wanted.mu) if p.mirostat else ordered


def cut(ordered: list[Candidate], top_p: float, min_p: float) -> list[Candidate]:
    """The shortest prefix whose probability reaches top_p, less what is below min_p times the likeliest."""
    weights = [math.exp(z) for z, _ in ordered]
    kept = len(ordered)
    if top_p < 1.0:
        enough, reached, kept = top_p * sum(weights), 0.0, 0
        while kept < len(ordered) and (kept == 0 or reached < enough):
            reached += weights[kept]
            kept += 1
    least = min_p * weights[0]
    return [pair for pair, weight in zip(ordered[:kept], weights, strict=False) if weight >= least]


def draw(survivors: Sequence[Candidate], wanted: SamplingRow) -> int:
    """The id with the largest score + Gumbel noise, the lowest on ties: a draw from softmax(score)."""
    noise = gumbels(wanted, [i for _, i in survivors])
    best = max((z + g, -i) for (z, i), g in zip(survivors, noise, strict=True))
    return -best[1]


def gumbels(wanted: SamplingRow, ids: Sequence[int]) -> Iterator[float]:
    """The Gumbel noise of each id in the row's coordinates: `random.noise_bits`, one Philox call per four ids."""
    key = (wanted.seed & MASK32, wanted.seed >> 32 & MASK32)
    rest = (wanted.output_index & MASK32, wanted.choice & MASK32, wanted.purpose & MASK32)
    calls: dict[int, tuple[int, int, int, int]] = {}
    for token_id in ids:
        call = token_id >> 2
        if call not in calls:
            calls[call] = philox4x32((call, *rest), key)
        yield gumbel(calls[call][token_id & 3])


def logprobs_row(logits: Sequence[float], token_id: int, k: int, chosen: Sequence[int]) -> TokenLogprobs:
    """Log-softmax of one row of raw logits: of its token, of the k most likely (ties: lower id), of `chosen`."""
    top = max(logits)
    normaliser = top + math.log(sum(math.exp(v - top) for v in logits))
    mine = logits[token_id]
    rank = 1 + sum(v > mine for v in logits) + sum(v == mine for v in logits[:token_id])
    possible = (i for i, v in enumerate(logits) if v != BANNED)
    best = heapq.nsmallest(k, possible, key=lambda i: (-logits[i], i)) if k > 0 else []
    return TokenLogprobs(
        token_id,
        mine - normaliser,
        rank,
        tuple((i, logits[i] - normaliser) for i in best),
        tuple((i, logits[i] - normaliser) for i in chosen),
    )
