"""Sampling on arrays: the definitions of backends/sampling.py, one row at a time except for the greedy fast path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import numpy_random, numpy_shaping
from octavo.backends.ops import SamplingRow
from octavo.backends.random import MASK32
from octavo.backends.sampling import REACH, banned_ids, check_ids, is_plain, refuse_undrawable
from octavo.backends.shaping import excludes_top_choices
from octavo.core.batch import TokenLogprobs

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

FIRST_SORT = 1024  # how many of the best are ordered before more are needed


def process_logits(logits: Floats, rows: Sequence[SamplingRow]) -> Floats:
    """New logits [R, V] after bias, bans and penalties; the input itself when no row asks for any."""
    if all(is_plain(wanted) for wanted in rows):
        return logits
    logits = logits.copy()
    for row, wanted in zip(logits, rows, strict=True):
        if not is_plain(wanted):
            _process_row(row, wanted)
    return logits


def _process_row(row: Floats, wanted: SamplingRow) -> None:
    bias = wanted.params.logit_bias
    check_ids("logit_bias", bias, len(row))
    if bias:
        row[_keys(bias)] += np.fromiter(bias.values(), np.float64, len(bias))
    allowed, mask = wanted.params.allowed_token_ids, wanted.grammar_mask
    if allowed is not None:
        check_ids("allowed_token_ids", allowed, len(row))
        _keep_only(row, np.asarray(allowed, np.int64))
    check_ids("banned_token_ids", banned_ids(wanted), len(row))
    row[list(banned_ids(wanted))] = -np.inf
    if mask is not None:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(row)]
        _keep_only(row, np.flatnonzero(bits))
    _penalise(row, wanted)


def _keep_only(row: Floats, ids: Ids) -> None:
    kept = row[ids]
    row[:] = -np.inf
    row[ids] = kept


def _keys(counts: Mapping[int, object]) -> Ids:
    return np.fromiter(counts, np.int64, len(counts))


def _penalise(row: Floats, wanted: SamplingRow) -> None:
    p = wanted.params
    if p.repetition_penalty != 1.0:
        seen = _keys({**wanted.prompt_counts, **wanted.output_counts})
        logits = row[seen].astype(np.float64)
        row[seen] = np.where(logits > 0.0, logits / p.repetition_penalty, logits * p.repetition_penalty)
    if (p.frequency_penalty or p.presence_penalty) and wanted.output_counts:
        seen = _keys(wanted.output_counts)
        counts = np.fromiter(wanted.output_counts.values(), np.float64, len(seen))
        row[seen] -= counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
    if wanted.penalties:
        row[_keys(wanted.penalties)] -= np.fromiter(wanted.penalties.values(), np.float64, len(wanted.penalties))


def sample(logits: Floats, rows: Sequence[SamplingRow]) -> list[int]:
    """One id per row. Raises RowError naming the rows (indices into `rows`) from which nothing can be drawn."""
    best = logits.argmax(axis=1) if len(rows) else np.empty(0, np.int64)  # the first NaN, where there is one
    ids: list[int | None] = []
    for row, wanted, place in zip(logits, rows, best.tolist(), strict=True):
        ids.append(_draw(*_drawable(row, place, wanted), wanted) if _can_draw(row, place) else None)
    refuse_undrawable(ids)
    return [i for i in ids if i is not None]


def law(row: NDArray[Any], wanted: SamplingRow) -> Doubles | None:
    """The probability of each token of one row of processed logits [V]; None where nothing can be drawn."""
    place = int(row.argmax())
    if not _can_draw(row, place):
        return None
    scores, ids = _drawable(row, place, wanted)
    weights, found = np.exp(scores), np.zeros(len(row))
    found[ids] = weights / weights.sum()
    return found


def _can_draw(row: NDArray[Any], place: int) -> bool:
    """False where all are -inf or all inf, or one is NaN; `place` is that of the first NaN, or of the largest."""
    top = float(row[place])
    return not (math.isnan(top) or top == -math.inf or (top == math.inf and row.min() == math.inf))


def _drawable(row: Floats, place: int, wanted: SamplingRow) -> tuple[Doubles, Ids]:
    """(score, id) of what may be drawn from a row whose largest logit stands at `place` first."""
    p, top = wanted.params, float(row[place])
    if top == math.inf:
        row, top = np.where(row == np.inf, np.float32(0.0), np.float32(-np.inf)), 0.0
    temperature = numpy_shaping.temperature_of(row, top, p) if p.dynatemp_range > 0.0 else p.temperature
    if temperature == 0.0:
        return np.zeros(1), np.array([place])
    with np.errstate(over="ignore"):
        scores = (row.astype(np.float64) - top) / temperature
    return _candidates(row, scores, top, wanted)


def _candidates(row: Floats, scores: Doubles, top: float, wanted: SamplingRow) -> tuple[Doubles, Ids]:
    """(score, id) of what may be drawn: `sampling.candidates`."""
    p = wanted.params
    if p.typical_p < 1.0 or p.top_n_sigma > 0.0 or p.xtc_probability > 0.0 or p.mirostat:
        return _shaped(row, scores, top, wanted)
    if p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0:
        ids = np.flatnonzero(scores >= -REACH)
        return scores[ids], ids
    if p.top_k > 0:
        ids = _best(row, p.top_k)
        return _cut(scores[ids], ids, float(np.exp(scores[ids]).sum()), p.top_p, p.min_p)
    total = float(np.exp(scores).sum())
    for count in (FIRST_SORT, 16 * FIRST_SORT, len(row)):
        ids = _best(row, count)
        kept = _cut(scores[ids], ids, total, p.top_p, p.min_p)
        if len(kept[1]) < len(ids):
            break
    return kept


def _shaped(row: Floats, scores: Doubles, top: float, wanted: SamplingRow) -> tuple[Doubles, Ids]:
    p = wanted.params
    if p.top_n_sigma > 0.0:
        row = np.where(row >= numpy_shaping.sigma_floor(row, top, p.top_n_sigma), row, np.float32(-np.inf))
    ids = _best(row, p.top_k if p.top_k > 0 else len(row))
    if p.typical_p < 1.0:
        ids = ids[numpy_shaping.typical(scores[ids], p.typical_p)]
    kept, ids = _cut(scores[ids], ids, float(np.exp(scores[ids]).sum()), p.top_p, p.min_p)
    if p.xtc_probability > 0.0 and excludes_top_choices(wanted):
        first = numpy_shaping.after_top_choices(kept, p.xtc_threshold)
        kept, ids = kept[first:], ids[first:]
    if p.mirostat:
        count = numpy_shaping.mirostat_count(kept, p.mirostat, wanted.mu)
        kept, ids = kept[:count], ids[:count]
    return kept, ids


def _best(row: Floats, count: int) -> Ids:
    """The ids of the `count` largest logits above -inf, ordered (logit descending, id ascending)."""
    if count < len(row):
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        ids = np.flatnonzero((row >= threshold) & (row > -np.inf))
    else:
        ids = np.flatnonzero(row > -np.inf)
    return ids[np.lexsort((ids, -row[ids]))][:count]


def _cut(scores: Doubles, ids: Ids, total: float, top_p: float, min_p: float) -> tuple[Doubles, Ids]:
    """`sampling.cut` of ordered candidates; `total` is the sum of all weights that top_p refers to."""
    weights = np.exp(scores)
    kept = weights >= min_p * weights[0]
    if top_p < 1.0:
        before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
        before[0] = -1.0  # the likeliest always stays
        kept &= before < top_p * total
    return scores[kept], ids[kept]


def _draw(scores: Doubles, ids: Ids, wanted: SamplingRow) -> int:
    bits = numpy_random.noise_bits(wanted.seed, wanted.choice, wanted.output_index, ids, wanted.purpose)
    if len(ids) > FIRST_SORT:
        able = _may_win(scores, bits)
        scores, ids, bits = scores[able], ids[able], bits[able]
    keys = scores + numpy_random.gumbel(bits)
    return int(ids[keys == keys.max()].min())


def _may_win(scores: Doubles, bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """False only for candidates that the likeliest one beats for certain, without their Gumbel values.

    To reach `bound`, one with noise u needs -log(u) <= exp(score - bound), and 1 - u <= -log(u). The factor covers the
    error of the Gumbel function.
    """
    place = int(scores.argmax())
    bound = scores[place] + float(numpy_random.gumbel(bits[place : place + 1])[0])
    distance = (np.uint64(MASK32) - bits) * 2.0**-32  # not above 1 - u
    return distance <= np.exp(scores - bound) * 1.00001


def logprobs_row(row: Floats, token_id: int, k: int, chosen: Sequence[int]) -> TokenLogprobs:
    """`sampling.logprobs_row` of one row of raw logits."""
    logits = row.astype(np.float64)
    top = logits.max()
    with np.errstate(invalid="ignore"):  # a logit that is not finite gives NaN, as in the definition
        normaliser = float(top + np.log(np.exp(logits - top).sum()))
    mine = row[token_id]
    rank = 1 + int(np.count_nonzero(row > mine)) + int(np.count_nonzero(row[:token_id] == mine))
    best = _best(row, k).tolist() if k > 0 else []
    return TokenLogprobs(
        int(token_id),
        float(logits[token_id]) - normaliser,
        rank,
        tuple((i, float(logits[i]) - normaliser) for i in best),
        tuple((i, float(logits[i]) - normaliser) for i in chosen),
    )
