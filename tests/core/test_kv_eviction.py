"""Lossy eviction: what is kept, over random scores, against the plainest definition of each policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import heavy_hitters, kept_after_prompt, pooled, sinks_and_recent

counts = st.integers(0, 12)
scores = st.lists(st.integers(0, 6).map(float), max_size=24)  # few values: ties are common


def in_order(kept: tuple[int, ...], count: int) -> bool:
    return list(kept) == sorted(set(kept)) and all(0 <= at < count for at in kept)


@given(st.integers(0, 40), counts, counts)
def test_sinks_and_recent_are_the_first_and_the_last(count: int, sinks: int, recent: int) -> None:
    kept = sinks_and_recent(count, sinks, recent)
    assert list(kept) == [at for at in range(count) if at < sinks or at >= count - recent]


@given(scores, counts, counts)
def test_heavy_hitters_are_the_recent_and_the_highest(scores: list[float], heavy: int, recent: int) -> None:
    kept = heavy_hitters(scores, heavy, recent)
    older = range(max(0, len(scores) - recent))
    assert in_order(kept, len(scores)) and len(kept) == min(len(scores), recent + min(heavy, len(older)))
    assert all(at in kept for at in range(len(older), len(scores)))
    dropped = [at for at in older if at not in kept]
    for low in dropped:  # none that was dropped goes before one that was kept
        assert all((-scores[high], high) < (-scores[low], low) for high in kept if high in older)


@given(scores, st.data())
def test_a_token_that_nobody_looks_at_any_more_stays_dropped(scores: list[float], data: st.DataObject) -> None:
    heavy, recent = data.draw(counts), data.draw(counts)
    once = heavy_hitters(scores, heavy, recent)
    again = heavy_hitters([scores[at] for at in once], heavy, recent)
    assert again == tuple(range(len(once)))  # nothing came in: nothing more leaves


@given(scores, counts, counts, st.sampled_from([1, 3, 5]))
def test_a_prompt_keeps_its_end_and_what_the_end_looked_at(
    scores: list[float], window: int, more: int, kernel: int
) -> None:
    kept = kept_after_prompt(scores, window + more, window, kernel)
    assert in_order(kept, len(scores)) and len(kept) == min(len(scores), window + more)
    assert all(at in kept for at in range(max(0, len(scores) - window), len(scores)))
    if len(scores) > window + more:
        first = len(scores) - window
        smooth = pooled(scores[:first], kernel)
        inside = sorted((smooth[at] for at in kept if at < first), reverse=True)
        assert inside == sorted(smooth, reverse=True)[:more]


def test_neighbours_stay_with_what_was_looked_at() -> None:
    needle = [0.0] * 10 + [9.0] + [0.0] * 10
    assert kept_after_prompt(needle, 7, 2) == (8, 9, 10, 11, 12, 19, 20)
    assert pooled([3.0, 0.0, 0.0, 6.0], 3) == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: sinks_and_recent(3, -1, 1), "sinks"),
        (lambda: heavy_hitters([1.0], 1, -1), "recent"),
        (lambda: kept_after_prompt([1.0], 3, 4), "window"),
        (lambda: kept_after_prompt([1.0] * 9, 3, 2, 4), "kernel"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(call, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        call()
    assert caught.value.field == field
