"""Suffix drafts against a naive definition: counts, matches, chains and trees of any sequences; memory; namespaces."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidInput
from octavo.decoding.speculation.automaton import MOST_CHILDREN, ROOT, SuffixAutomaton
from octavo.decoding.speculation.suffix import SuffixProposer, SuffixSettings

Context = tuple[int, ...]
Naive = dict[Context, dict[int, int]]  # context -> token that came after it -> how often, in the order of appearance


def naive(steps: Sequence[tuple[int, int]], depth: int) -> tuple[Naive, dict[int, list[int]]]:
    """`steps`: (sequence, token) in the order of their arrival."""
    counts: Naive = defaultdict(dict)
    texts: dict[int, list[int]] = defaultdict(list)
    for sequence, token in steps:
        text = texts[sequence]
        for length in range(min(len(text), depth - 1) + 1):
            seen = counts[tuple(text[len(text) - length :])]
            seen[token] = seen.get(token, 0) + 1
        text.append(token)
    return counts, texts


def longest(counts: Naive, text: Sequence[int], depth: int) -> Context:
    """The longest end of the text, below `depth` tokens, after which something has come."""
    ends = (tuple(text[len(text) - n :]) for n in range(min(len(text), depth - 1), 0, -1))
    return next((end for end in ends if counts.get(end)), ())


def shares(counts: Naive, context: Context) -> list[tuple[float, int]]:
    seen = counts[context]
    if not context or len(seen) > MOST_CHILDREN:
        return []
    order = sorted(range(len(seen)), key=lambda i: (list(seen.values())[i], i), reverse=True)
    return [(list(seen.values())[i] / sum(seen.values()), list(seen)[i]) for i in order]


def naive_chain(counts: Naive, text: Sequence[int], depth: int, most: int, floor: float) -> list[int]:
    text, drafts, likelihood = list(text), [], 1.0
    while len(drafts) < most:
        best = shares(counts, longest(counts, text, depth))[:1]
        likelihood *= best[0][0] if best else 0.0
        if likelihood < floor:
            break
        drafts.append(best[0][1])
        text.append(best[0][1])
    return drafts


def naive_tree(counts: Naive, text: Sequence[int], depth: int, most: int, floor: float) -> list[float]:
    """Likelihoods of the `most` likeliest beginnings."""
    found, todo = [], [([*text], 1.0)]
    while todo:
        so_far, likelihood = todo.pop()
        for share, token in shares(counts, longest(counts, so_far, depth)):
            if likelihood * share >= floor and len(so_far) < len(text) + most:
                found.append(likelihood * share)
                todo.append(([*so_far, token], likelihood * share))
    return sorted(found, reverse=True)[:most]


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60)


def built(steps: Sequence[tuple[int, int]], depth: int) -> tuple[SuffixAutomaton, dict[int, tuple[int, int]]]:
    automaton, places = SuffixAutomaton(depth), defaultdict(lambda: (ROOT, 0))
    for sequence, token in steps:
        places[sequence] = automaton.append(*places[sequence], token)
    return automaton, places


@settings(max_examples=150)
@given(STEPS, st.integers(2, 7), st.sampled_from([0.1, 0.3]))
def test_counts_matches_chains_and_trees_are_those_of_the_definition(
    steps: list[tuple[int, int]], depth: int, floor: float
) -> None:
    automaton, places = built(steps, depth)
    counts, texts = naive(steps, depth)
    for sequence, text in texts.items():
        state, length = automaton.continued(*places[sequence])
        want = longest(counts, text, depth)
        assert length == len(want)
        assert not length or automaton.shares(state) == shares(counts, want)
        drafts, score = automaton.chain(*places[sequence], 6, floor)
        assert drafts == naive_chain(counts, text, depth, 6, floor)
        tree, total = automaton.tree(*places[sequence], 5, floor)
        likelihoods = naive_tree(counts, text, depth, 5, floor)
        assert len(tree) == len(likelihoods)
        assert total == pytest.approx(sum(likelihoods))
        assert total >= score * (1 - 1e-9) or len(drafts) > 5


@settings(max_examples=100)
@given(STEPS, st.lists(st.integers(0, 3), max_size=20), st.integers(2, 6))
def test_another_text_is_followed_to_its_longest_end_that_occurs(
    steps: list[tuple[int, int]], text: list[int], depth: int
) -> None:
    automaton, _ = built(steps, depth)
    counts, _ = naive(steps, depth)
    place = ROOT, 0
    for token in text:
        place = automaton.follow(*place, token)
    assert automaton.continued(*place)[1] == len(longest(counts, text, depth))


def test_repeated_text_adds_no_nodes_and_new_text_two_a_token_at_most() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50) for _ in range(2000)]
    automaton, place = SuffixAutomaton(8), (ROOT, 0)
    for token in text:
        place = automaton.append(*place, token)
    once = automaton.num_nodes
    assert once <= 2 * len(text)
    for _ in range(3):
        for token in text:
            place = automaton.append(*place, token)
    assert automaton.num_nodes <= once + 40  # where the copies meet


LOOP = [5, 6, 7, 8, 9]


def test_a_branch_proposes_what_came_before() -> None:
    proposer = SuffixProposer()
    assert proposer.propose("a", LOOP * 3, 7) == (LOOP * 2)[:7]
    assert proposer.propose_tree("a", LOOP * 3, 4) == DraftTree.chain(LOOP[:4])
    assert proposer.propose("a", [*LOOP * 3, 1, 2], 7) == []


def test_past_outputs_are_seen_in_their_namespace_only() -> None:
    proposer = SuffixProposer()
    proposer.open("first", "x", 2)
    proposer.observe("first", [1, 2, 3, 4, 5, 6])
    proposer.drop("first")
    for name, namespace in (("same", "x"), ("other", "y")):
        proposer.open(name, namespace, 2)
        assert proposer.propose(name, [1, 2], 9) == ([3, 4] if namespace == "x" else [])
        assert proposer.propose(name, [9, 1, 2, 3, 4], 9) == ([5, 6] if namespace == "x" else [])


def test_prompts_of_others_are_not_proposed() -> None:
    proposer = SuffixProposer(SuffixSettings(depth=3))
    proposer.open("first", "x", 6)
    proposer.observe("first", [1, 2, 3, 4, 5, 6, 7])
    proposer.open("second", "x", 2)
    assert proposer.propose("second", [1, 2], 9) == []


def test_memory_stays_bounded_and_what_is_old_goes_first() -> None:
    limits = SuffixSettings(depth=4, own_nodes=60, past_nodes=100, namespaces=2)
    proposer, rng = SuffixProposer(limits), random.Random(2)
    for i in range(60):
        proposer.open(i, f"space {i % 3}", 1)
        tokens = [rng.randrange(1000) for _ in range(40)]
        proposer.observe(i, tokens)
        assert proposer.num_nodes <= 60 + 2 + 2 * (100 + 2)
        proposer.drop(i)
    proposer.open("old", "fresh", 1)
    proposer.observe("old", [1, 2, 3, 4])
    proposer.drop("old")
    found = []
    for i in range(60, 70):
        proposer.open(i, "fresh", 2)
        found.append(proposer.propose(i, [2, 3], 1) == [4])
        proposer.drop(i)
        proposer.open(i, "fresh", 1)
        proposer.observe(i, [rng.randrange(5, 1000) for _ in range(12)])
        proposer.drop(i)
    assert found[:2] == [True, True]
    assert found == sorted(found, reverse=True)
    assert not found[-1]


def test_a_branch_that_waits_while_others_fill_the_index_finds_nothing_in_what_has_gone() -> None:
    proposer, rng = SuffixProposer(SuffixSettings(depth=4, past_nodes=200)), random.Random(5)
    proposer.open("waits", "x", 1)
    known = [rng.randrange(10, 1000) for _ in range(40)]
    proposer.observe("waits", known)
    for i in range(6):
        proposer.open(i, "x", 1)
        proposer.observe(i, [rng.randrange(10, 1000) for _ in range(60)])
        proposer.drop(i)
    for token in (2001, 2002, 2003):
        assert proposer.propose("waits", known, 2) == []
        known.append(token)
    proposer.open("last", "x", 1)
    proposer.observe("last", [2, 3001, 3002, 3003, 3004])
    assert proposer.propose("waits", [*known, 2003, 3001, 3002], 1) == [3003]


def test_a_long_prompt_is_taken_in_by_slices() -> None:
    proposer = SuffixProposer(SuffixSettings(tokens_at_once=20))
    calls = [proposer.propose("a", LOOP * 10, 3) for _ in range(4)]
    assert calls == [[], [], LOOP[:3], LOOP[:3]]


def test_the_same_calls_give_the_same_drafts() -> None:
    def play() -> list[list[int]]:
        proposer, rng, drafts = SuffixProposer(), random.Random(3), []
        texts = {key: [1, 2] for key in range(4)}
        for key in texts:
            proposer.open(key, "x", 2)
        for _ in range(400):
            key = rng.randrange(4)
            drafts.append(proposer.propose(key, texts[key], 5))
            texts[key].append(rng.randrange(3))
        return drafts

    first = play()
    assert first == play()
    assert any(first)


@pytest.mark.parametrize("wrong", [((1, 2), (-1,)), ((1, 2), (-1, 1)), ((1, 1), (-1, -1)), ((1,), (-2,))])
def test_what_is_no_tree_is_refused(wrong: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(InvalidInput):
        DraftTree(*wrong)


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInput):
        SuffixSettings(depth=1)
    with pytest.raises(InvalidInput):
        SuffixSettings(past_nodes=0)
