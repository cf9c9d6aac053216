"""The substrings of some sequences up to a length, each with its number of occurrences: online, O(1) a token."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from octavo.core.draft_tree import DraftTree

__all__ = ["SuffixAutomaton"]

ROOT = 0
MOST_CHILDREN = 32  # a context with more continuations foretells nothing


class SuffixAutomaton:
    """A suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985) over the
    substrings of up to `depth` tokens of all sequences appended to it. It holds what a suffix tree of that depth holds,
    with as few nodes whatever the order of tokens, and its links are the suffix links of that tree.

    A state stands for substrings that end at the same places; with `depth` - 1 tokens of context a repeated text adds
    no state. A sequence appends at its `context`, the state of its last `depth` - 1 tokens: ROOT for a new one.
    Amortised O(1) a token beside the counts, which take up to `depth` additions. Nothing is ever removed.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._length = [0]  # of the longest substring of the state, up to depth
        self._link = [-1]  # the state of its longest suffix that ends at more places
        self._next: list[dict[int, int]] = [{}]  # token -> state, in the order of first occurrence
        self._count = [0]  # occurrences

    @property
    def num_nodes(self) -> int:
        """States so far."""
        return len(self._length)

    def append(self, context: int, length: int, token: int) -> tuple[int, int]:
        """One more token of a sequence whose context has `length` tokens: counts all substrings that end with it.
        -> the context of the next token and its length.
        """
        target = self._next[context].get(token)
        if target is None:
            target = self._add(context, token)
        elif self._length[target] > self._length[context] + 1:
            target = self._split(context, token, target)
        state, count, link = target, self._count, self._link
        while state > ROOT:
            count[state] += 1
            state = link[state]
        length = min(length + 1, self.depth - 1)
        return self._settled(target, length), length

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a context of `length` tokens in `state`, then `token`) that occurs, and its length."""
        while (target := self._next[state].get(token)) is None:
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]
        length = min(length + 1, self.depth - 1)
        return self._settled(target, length), length

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of that context after which something has come, and its length; (ROOT, 0): none."""
        state = self._settled(state, length)
        while not self._next[state] and state != ROOT:
            state = self._link[state]
            length = self._length[state]
        return state, length if state != ROOT else 0

    def shares(self, state: int) -> list[tuple[float, int]]:
        """(share, token) of what has come after the context, most frequent first; of equals what came up later first.
        Nothing where there are more than MOST_CHILDREN.
        """
        children, count = self._next[state], self._count
        if len(children) == 1:
            return [(1.0, token) for token in children]
        if len(children) > MOST_CHILDREN:
            return []
        counted = [(count[target], order, token) for order, (token, target) in enumerate(children.items())]
        total = sum(seen for seen, _, _ in counted)
        return [(seen / total, token) for seen, _, token in sorted(counted, reverse=True)]

    def chain(self, state: int, length: int, most: int, floor: float) -> tuple[list[int], float]:
        """The likeliest continuation of up to `most` tokens, as long as its likelihood is `floor` or more; and how many
        of its tokens are expected to be right: the sum of the likelihoods of its beginnings.
        """
        tokens: list[int] = []
        likelihood, score = 1.0, 0.0
        while len(tokens) < most:
            state, length = self.continued(state, length)
            share, token = self._likeliest(state) if length else (0.0, 0)
            likelihood *= share
            if not share or likelihood < floor:
                break
            tokens.append(token)
            score += likelihood
            state, length = self.follow(state, length, token)
        return tokens, score

    def tree(self, state: int, length: int, most: int, floor: float) -> tuple[DraftTree, float]:
        """The `most` likeliest beginnings of continuations (those of `floor` or more), as a tree; and the sum of their
        likelihoods: SuffixDecoding's score. Grown from the likeliest, of equals from the one found first.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        score, found = 0.0, 0
        open_ends = self._children(state, length, 1.0, -1, found)
        heapify(open_ends)
        while open_ends and len(token_ids) < most:
            negative, found_as, parent, token, state, length = heappop(open_ends)
            if -negative < floor:
                break
            token_ids.append(token)
            parents.append(parent)
            score -= negative
            found = max(found, found_as) + MOST_CHILDREN
            for child in self._children(state, length, -negative, len(token_ids) - 1, found):
                heappush(open_ends, child)
        return DraftTree(tuple(token_ids), tuple(parents)), score

    def _children(
        self, state: int, length: int, likelihood: float, parent: int, found: int
    ) -> list[tuple[float, int, int, int, int, int]]:
        """(-likelihood, order of discovery, parent, token, state, length) of each continuation."""
        state, length = self.continued(state, length)
        shares = self.shares(state) if length else []
        return [
            (-likelihood * share, found + i, parent, token, *self.follow(state, length, token))
            for i, (share, token) in enumerate(shares)
        ]

    def _likeliest(self, state: int) -> tuple[float, int]:
        """The first of `shares`; (0, 0): there are none."""
        children, count = self._next[state], self._count
        if len(children) > MOST_CHILDREN:
            return 0.0, 0
        total = most = likeliest = 0
        for token, target in children.items():
            seen = count[target]
            total += seen
            if seen >= most:
                most, likeliest = seen, token
        return most / total, likeliest

    def _settled(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a substring of `state`."""
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state

    def _node(self, length: int, link: int, children: dict[int, int], count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(children)
        self._count.append(count)
        return len(self._length) - 1

    def _add(self, context: int, token: int) -> int:
        """A state for a continuation that has not been there."""
        new = self._node(min(self._length[context] + 1, self.depth), ROOT, {}, 0)
        state, children = context, self._next
        while state >= 0 and token not in children[state]:
            children[state][token] = new
            state = self._link[state]
        if state >= 0:
            shorter = children[state][token]
            exact = self._length[shorter] == self._length[state] + 1
            self._link[new] = shorter if exact else self._split(state, token, shorter)
        return new

    def _split(self, context: int, token: int, target: int) -> int:
        """The substrings of `target` that `context` leads to, as a state of their own."""
        part = self._node(self._length[context] + 1, self._link[target], dict(self._next[target]), self._count[target])
        self._link[target] = part
        state, children = context, self._next
        while state >= 0 and children[state].get(token) == target:
            children[state][token] = part
            state = self._link[state]
        return part
