"""Suffix drafts, chains and trees, against prompt lookup on an agent's requests: tokens a step, and what a call costs.
No model: outputs are given, a draft is right if it is the next token.

    python benchmarks/suffix_drafts.py [requests] [most drafts] [seed ...]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from octavo.core.draft_tree import DraftTree, rows_along
from octavo.decoding.speculation.ngram import NgramProposer
from octavo.decoding.speculation.proposer import Proposer
from octavo.decoding.speculation.suffix import SuffixProposer, SuffixTreeProposer

VOCAB, TEMPLATES = 4000, 6


def agent(rng: random.Random, requests: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output): a preamble and a question; one of a few answers, whose slots are filled from the question."""
    preamble = [rng.randrange(VOCAB) for _ in range(200)]
    answers = [[_part(rng, i) for i in range(7)] for _ in range(TEMPLATES)]
    for _ in range(requests):
        kind, question = rng.randrange(TEMPLATES), [rng.randrange(VOCAB) for _ in range(60)]
        output: list[int] = []
        for part in answers[kind]:
            output += [rng.choice(question) for _ in range(part)] if isinstance(part, int) else part
        yield [*preamble, *question, VOCAB + kind], output


def _part(rng: random.Random, place: int) -> list[int] | int:
    """Fixed text, or how many tokens of a slot."""
    return [rng.randrange(VOCAB) for _ in range(rng.randint(10, 40))] if place % 2 == 0 else rng.randint(1, 6)


def played(proposer: Proposer, requests: int, most: int, seed: int) -> tuple[float, float, float]:
    """Tokens a step; drafts a step; microseconds a call."""
    steps, tokens, rows, costs = 0, 0, 0, []
    for number, (prompt, output) in enumerate(agent(random.Random(seed), requests)):
        key, known, left = (f"request {number}", 0), list(prompt), list(output)
        proposer.open(key, "agent", len(prompt))
        while left:
            start = time.perf_counter()
            guess = proposer.propose(key, known, most)
            costs.append(time.perf_counter() - start)
            tree = guess if isinstance(guess, DraftTree) else DraftTree.chain(guess)
            taken = min(len(rows_along(tree.token_ids, tree.parent_rows(), left)), len(left))
            known, left = [*known, *left[:taken]], left[taken:]
            steps, tokens, rows = steps + 1, tokens + taken, rows + len(tree)
        proposer.observe(key, known)
        proposer.drop(key)
    return tokens / steps, rows / steps, 1e6 * statistics.median(costs)


def main() -> None:
    """One line for each seed and proposer."""
    requests, most, *seeds = [int(word) for word in sys.argv[1:]] or [60, 8]
    makers: dict[str, Callable[[], Proposer]] = {
        "prompt lookup": NgramProposer,
        "suffix": SuffixProposer,
        "suffix trees": SuffixTreeProposer,
    }
    for seed in seeds or [1, 2, 3]:
        for name, make in makers.items():
            rate, drafts, cost = played(make(), requests, most, seed)
            print(f"seed {seed}  {name:14} {rate:.2f} tokens, {drafts:.1f} drafts a step  {cost:.1f} us a call")


if __name__ == "__main__":
    main()
