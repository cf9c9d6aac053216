"""Prompt lookup against its definition by brute force, and the fold that says what of a guess counts."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.decoding.speculation import NgramProposer, accepted
from octavo.decoding.speculation.ngram import CANDIDATES, Lookup

KEY = ("r", 0)
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def looked_up(tokens, shortest, longest, most):
    """What followed the longest match of the newest few, by trying every place."""
    known, best, reach = len(tokens), 0, 0
    places = [p for p in range(known - 1, shortest - 1, -1) if tokens[p - shortest : p] == tokens[known - shortest :]]
    for place in places[:CANDIDATES] if known > shortest else ():
        length = shortest
        while length < longest and place > length and tokens[place - length - 1] == tokens[known - length - 1]:
            length += 1
        if length > reach:
            best, reach = place, length
    if not best:
        return []
    said = list(tokens)
    for _ in range(most):
        said.append(said[best + len(said) - known])
    return said[known:]


@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9), st.integers(1, 7))
def test_it_finds_what_brute_force_finds(tokens, shortest, more, most, stride):
    proposer = NgramProposer(shortest, shortest + more)
    proposer.open(KEY, "", 0)
    for end in [*range(0, len(tokens), stride), len(tokens)]:
        said = list(proposer.propose(KEY, tokens[:end], most))
        assert said == looked_up(tokens[:end], shortest, shortest + more, most)
    proposer.drop(KEY)
    proposer.drop(KEY)


@given(TOKENS, TOKENS)
def test_what_counts_is_what_a_plain_run_would_have_drawn(drafts, drawn):
    drawn = drawn[: len(drafts) + 1]
    rows = accepted(drafts, range(-1, len(drafts)), dict(enumerate(drawn)))
    plain = []  # each draw is right as long as the drafts before it were drawn
    for i, token in enumerate(drawn):
        if list(drafts[:i]) != list(drawn[:i]):
            break
        plain.append(token)
    assert [drawn[row] for row in rows] == plain and rows == [*range(len(plain))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=9), st.lists(st.integers(0, 3), max_size=10))
def test_in_a_tree_it_goes_where_the_draws_lead(asked, drawn):
    """``drawn[i]``: from row i, where 3 is no draft; rows behind the last one were not drawn from."""
    where: dict[tuple[int, int], int] = {}
    for parent, token in asked:
        where.setdefault((parent % (1 + len(where)), token), 1 + len(where))
    parents, drafts = (-1, *(parent for parent, _ in where)), [token for _, token in where]
    rows = accepted(drafts, parents, dict(enumerate(drawn[: len(parents)])))
    walk, row = [], 0
    while row is not None and row < len(drawn):
        walk.append(row)
        row = where.get((row, drawn[row]))
    assert rows == walk


@given(TOKENS, TOKENS, st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
def test_a_guess_follows_from_the_tokens_alone(tokens, others, kept, shortest, more):
    """Whatever has come and gone before."""
    lookup, kept = Lookup(shortest, shortest + more), min(kept, len(tokens))
    text = tokens[:kept] + others
    lookup.next(text)
    lookup.shrink(text, kept)
    assert [lookup.next(tokens)] == (looked_up(tokens, shortest, shortest + more, 1) or [-1])


@pytest.mark.parametrize("shortest", [1, 2, 16])
def test_what_it_takes_is_bounded_and_foretold(shortest):
    tokens = [(1 << 31) + i for i in range(11_000)]  # no n-gram comes twice, and the table has just grown
    proposer = NgramProposer(shortest, 64)
    tracemalloc.start()
    try:
        proposer.open(KEY, "", 0)
        proposer.propose(KEY, tokens, 8)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    foretold = proposer.most_bytes(1, len(tokens))
    assert 0.6 * foretold < taken < foretold
    assert proposer.most_bytes(3, len(tokens)) == 3 * foretold
