"""Drafts from what has been seen: suffix trees over a branch's own tokens and over past outputs of its namespace.

SuffixDecoding (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2025). The
last tokens of the branch are looked up; what most often came after them is the draft, as long as it is likely.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidInput
from octavo.core.speculation import Guess
from octavo.decoding.speculation.automaton import ROOT, SuffixAutomaton
from octavo.decoding.speculation.proposer import Proposer

__all__ = ["NODE_BYTES", "SuffixProposer", "SuffixSettings", "SuffixTreeProposer"]

NODE_BYTES = 320  # 312 measured

Match = tuple[SuffixAutomaton, int, int]  # where, the state of the longest match that goes on, and its tokens


@dataclass(frozen=True)
class SuffixSettings:
    """Raises InvalidInput for a depth below 2 or a limit below 1. A node takes NODE_BYTES."""

    depth: int = 16  # tokens of the longest substring that is counted; matches are shorter by one
    least_match: int = 2  # tokens
    floor: float = 0.1  # likelihood below which no draft is made
    drafts_per_match: float = 1.0  # drafts for each token of the match
    own_nodes: int = 1 << 13  # of a branch: beyond, its oldest half is forgotten
    past_nodes: int = 1 << 16  # of a namespace's past outputs
    namespaces: int = 4  # whose past outputs are kept; the one used longest ago goes first
    tokens_at_once: int = 256  # taken in by one call: a longer prompt makes no draft before it is through

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise InvalidInput("depth", self.depth, "give 2 or more")
        for name in ("least_match", "own_nodes", "past_nodes", "namespaces", "tokens_at_once"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "give 1 or more")


class SuffixIndex:
    """Sequences in up to two automata: once the newer has half of `most_nodes`, it is the older one and another begins.
    So what was seen longest ago is forgotten, a half at a time, and a token never waits for it.
    """

    def __init__(self, depth: int, most_nodes: int) -> None:
        self.newer = SuffixAutomaton(depth)
        self.older: SuffixAutomaton | None = None
        self.turns = 0  # how often the newer became the older
        self._most = most_nodes // 2

    @property
    def num_nodes(self) -> int:
        """Of both."""
        return self.newer.num_nodes + (self.older.num_nodes if self.older else 0)

    def make_room(self) -> None:
        """Called before a token is added."""
        if self.newer.num_nodes > self._most:
            self.newer, self.older = SuffixAutomaton(self.newer.depth), self.newer
            self.turns += 1


@dataclass
class Reader:
    """A sequence's place in an index: it is added to the newer automaton and looked up in both."""

    index: SuffixIndex
    turns: int = 0
    context: int = ROOT  # in the newer one
    length: int = 0
    old_state: int = ROOT
    old_length: int = 0

    def __post_init__(self) -> None:
        self.turns = self.index.turns

    def add(self, tokens: Sequence[int]) -> None:
        """More of the sequence."""
        for token in tokens:
            self.index.make_room()
            self._turn()
            self.context, self.length = self.index.newer.append(self.context, self.length, token)
            if self.index.older is not None:
                self.old_state, self.old_length = self.index.older.follow(self.old_state, self.old_length, token)

    def match(self) -> Match:
        """The longer of the two matches; of equals the newer."""
        self._turn()
        match = (self.index.newer, *self.index.newer.continued(self.context, self.length))
        if self.index.older is None:
            return match
        old = (self.index.older, *self.index.older.continued(self.old_state, self.old_length))
        return old if old[2] > match[2] else match

    def _turn(self) -> None:
        """What was the newer automaton is the older one now, or gone."""
        if self.turns == self.index.turns:
            return
        kept = self.turns + 1 == self.index.turns
        self.old_state, self.old_length = (self.context, self.length) if kept else (ROOT, 0)
        self.context, self.length, self.turns = ROOT, 0, self.index.turns


@dataclass
class _Branch:
    own: Reader
    past: Reader | None
    first: int  # output, as an index into its tokens
    taken: int = 0  # tokens looked at so far
    readers: list[Reader] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = [self.own, *([self.past] if self.past else [])]


class SuffixProposer(Proposer):
    """Pure and deterministic: drafts follow from the calls alone. Bounded: `own_nodes` for each branch that is there,
    `past_nodes` for each of `namespaces`.

    `token_ids` is always all of a branch, prompt and output; what is new in it is taken in. A key that was not opened
    is looked up in its own tokens only.
    """

    def __init__(self, settings: SuffixSettings | None = None) -> None:
        self.settings = settings or SuffixSettings()
        self._branches: dict[Hashable, _Branch] = {}
        self._past: OrderedDict[Hashable, SuffixIndex] = OrderedDict()

    def most_bytes(self, branches: int, tokens: int) -> int:
        """See `Proposer`."""
        limits = self.settings
        return (branches * limits.own_nodes + limits.namespaces * limits.past_nodes) * NODE_BYTES

    @property
    def num_nodes(self) -> int:
        """Of all branches and namespaces."""
        own = sum(branch.own.index.num_nodes for branch in self._branches.values())
        return own + sum(index.num_nodes for index in self._past.values())

    def open(self, branch_key: Hashable, namespace: Hashable, num_prompt_tokens: int) -> None:
        """A branch of this prefix namespace begins: it sees past outputs of the namespace, and its own, which begin
        after `num_prompt_tokens` tokens, will be seen by later ones (with the `depth` - 1 tokens before them, to be
        found by).
        """
        if namespace not in self._past:
            self._past[namespace] = SuffixIndex(self.settings.depth, self.settings.past_nodes)
        self._past.move_to_end(namespace)
        if len(self._past) > self.settings.namespaces:
            self._past.popitem(last=False)
        self._branches[branch_key] = self._branch(Reader(self._past[namespace]), num_prompt_tokens)

    def drop(self, branch_key: Hashable) -> None:
        """The branch is over. Its outputs stay."""
        self._branches.pop(branch_key, None)

    def observe(self, branch_key: Hashable, token_ids: Sequence[int]) -> None:
        """The branch has these tokens."""
        self._take_in(branch_key, token_ids)

    def propose(self, branch_key: Hashable, token_ids: Sequence[int], most: int) -> Guess:
        """Up to `most` drafts, each after the one before."""
        best: tuple[list[int], float] = [], 0.0
        for where, state, length in self._matches(branch_key, token_ids):
            found = where.chain(state, length, self._most(most, length), self.settings.floor)
            best = found if found[1] > best[1] else best
        return best[0]

    def propose_tree(self, branch_key: Hashable, token_ids: Sequence[int], most: int) -> DraftTree:
        """Up to `most` drafts as a tree: what most often came, and next to it what came less often."""
        best = DraftTree(), 0.0
        for where, state, length in self._matches(branch_key, token_ids):
            found = where.tree(state, length, self._most(most, length), self.settings.floor)
            best = found if found[1] > best[1] else best
        return best[0]

    def _most(self, most: int, length: int) -> int:
        return min(most, int(self.settings.drafts_per_match * length))

    def _matches(self, key: Hashable, token_ids: Sequence[int]) -> list[Match]:
        """In the branch's own tokens and in past outputs, where they are long enough."""
        branch = self._take_in(key, token_ids)
        if branch.taken < len(token_ids):
            return []
        return [
            match for match in (reader.match() for reader in branch.readers) if match[2] >= self.settings.least_match
        ]

    def _branch(self, past: Reader | None, first: int) -> _Branch:
        return _Branch(Reader(SuffixIndex(self.settings.depth, self.settings.own_nodes)), past, first)

    def _take_in(self, key: Hashable, token_ids: Sequence[int]) -> _Branch:
        branch = self._branches.get(key)
        if branch is None:
            branch = self._branches[key] = self._branch(None, len(token_ids))
        if branch.taken == 0:
            branch.taken = max(0, len(token_ids) - self.settings.own_nodes // 2)
        stop = min(len(token_ids), branch.taken + self.settings.tokens_at_once)
        branch.own.add(token_ids[branch.taken : stop])
        if branch.past is not None:
            lead = max(branch.taken, branch.first - self.settings.depth + 1)
            branch.past.add(token_ids[lead:stop])
        branch.taken = max(branch.taken, stop)
        return branch


class SuffixTreeProposer(SuffixProposer):
    """Its drafts are trees."""

    def propose(self, branch_key: Hashable, token_ids: Sequence[int], most: int) -> DraftTree:
        """See `propose_tree`."""
        return self.propose_tree(branch_key, token_ids, most)
