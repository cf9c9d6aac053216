"""DRY, n-grams that come once, banned sequences: followed token by token, as the plain definitions say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.history import History, look_back, suffix_matches
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams

SMALL = st.integers(0, 3)
PARAMS = st.fixed_dictionaries(
    {
        "dry_multiplier": st.sampled_from([0.0, 0.8, 2.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 100.0]),
        "dry_allowed_length": st.integers(1, 4),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 4, 9, 1000]),
        "dry_breaker_ids": st.sampled_from([(), (3,), (0, 2)]),
        "no_repeat_ngram_size": st.integers(0, 4),
        "banned_sequences": st.lists(st.lists(SMALL, min_size=1, max_size=3), max_size=3),
    }
)


def plain_dry(p: SamplingParams, tokens: Sequence[int]) -> dict[int, float]:
    """For each token: the longest end of the text (after the last breaker, within the window) that it once followed."""
    window = list(tokens) if p.dry_penalty_last_n < 0 else list(tokens)[len(tokens) - p.dry_penalty_last_n :]
    if p.dry_penalty_last_n > len(tokens):
        window = list(tokens)
    found: dict[int, float] = {}
    for length in range(p.dry_allowed_length, len(window)) if p.has_dry else ():
        end = window[len(window) - length :]
        if set(end) & set(p.dry_breaker_ids or ()):
            break
        for first in range(len(window) - length):
            if window[first : first + length] == end:
                # 80 / log(base): no logit loses more than a float32 holds
                power = min(length - p.dry_allowed_length, 80.0 / math.log(p.dry_base) if p.dry_base > 1 else 0)
                found[window[first + length]] = p.dry_multiplier * p.dry_base**power
    return found


def plain_bans(p: SamplingParams, num_prompt: int, tokens: Sequence[int]) -> set[int]:
    """Every id that would complete an n-gram that is there already, or a banned sequence in the output."""
    banned, n, output = set(), p.no_repeat_ngram_size, list(tokens[num_prompt:])
    grams = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)} if n else set()
    for token in range(4):
        if n and (*tokens[len(tokens) - n + 1 :], token) in grams and len(tokens) >= n - 1:
            banned.add(token)
        for sequence in p.banned_sequences:
            if [*output, token][-len(sequence) :] == list(sequence):
                banned.add(token)
    return banned


@settings(max_examples=150, deadline=None)
@given(PARAMS, st.lists(SMALL, max_size=40), st.integers(0, 6))
def test_they_are_what_the_plain_definitions_say(values: dict[str, Any], tokens: list[int], num_prompt: int) -> None:
    p = SamplingParams(**values)
    num_prompt = min(num_prompt, len(tokens))
    banned, penalties = look_back(p, num_prompt, tokens)
    assert penalties == pytest.approx(plain_dry(p, tokens))
    assert set(banned) == plain_bans(p, num_prompt, tokens) and len(set(banned)) == len(banned)


@settings(max_examples=120, deadline=None)
@given(PARAMS, st.lists(SMALL, max_size=12), st.lists(st.integers(-2, 3), min_size=8, max_size=40))
def test_followed_is_found_anew(values: dict[str, Any], prompt: list[int], moves: list[int]) -> None:
    """Tokens come, are taken back (-1), and are asked about in between (-2), as verified drafts are."""
    p, tokens = SamplingParams(**values), list(prompt)
    history = History(p, len(prompt), tokens)
    for move in moves:
        if move == -2 or move == -1:
            assert history.next() == look_back(p, len(prompt), tokens)
        if move == -1 and len(tokens) > len(prompt):
            history.shrunk(tokens.pop())
        elif move >= 0:
            tokens.append(move)
            history.grown()
    assert history.next() == look_back(p, len(prompt), tokens)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_matches_of_the_suffix(tokens: list[int]) -> None:
    expected = {}
    for i in range(1, len(tokens)):
        length = 0
        while length < i and tokens[i - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            expected[i] = length
    assert suffix_matches(tokens) == expected


def test_a_processor_adds_to_logits() -> None:
    p = SamplingParams(dry_multiplier=0.8, dry_breaker_ids=(), logits_processors=("shy",))

    def shy(tokens: Sequence[int], num_prompt_tokens: int) -> dict[int, float]:
        return {7: -2.0, tokens[num_prompt_tokens]: 1.0, 4: -math.inf}

    assert look_back(p, 4, [1, 2, 3, 7, 1, 2, 3], [shy])[1] == {7: pytest.approx(3.4), 1: -1.0, 4: math.inf}
    for wrong in ({-1: 0.0}, {9: 0.0}, {1: math.nan}, {1: math.inf}):
        with pytest.raises(InvalidInput, match="logits_processors"):
            History(p, 1, [1], [lambda tokens, num_prompt_tokens, wrong=wrong: wrong], 9).next()
    assert History(p, 1, [1], [lambda tokens, num_prompt_tokens: {8: 1.0}], 9).next() == ((), {8: -1.0})


def test_the_worked_example() -> None:
    p = SamplingParams(dry_multiplier=0.8, dry_breaker_ids=(9,))
    a, b, c, x = 1, 2, 3, 7
    assert look_back(p, 4, [a, b, c, x, a, b, c])[1] == {x: pytest.approx(0.8 * 1.75)}
    assert look_back(p, 4, [a, b, c, x, 9, b, c])[1] == {x: pytest.approx(0.8)}
    assert look_back(p, 4, [a, 9, c, x, a, 9, c])[1] == {}
