"""Longest cached prefix first: requests that share a prefix run while it is there.

         root                     order of service: a b | c d e
    .----+----.                   (depth first: the shared part of each subtree
 A B           C                   is computed once, and not needed after it)
.--+--.     .--+--+--.
a     b     c     d   e
"""

from __future__ import annotations

from octavo.core.policies.base import Key, Policy, Scene
from octavo.core.request import Branch

LOOKED_AT = 128  # waiting branches that are matched with the tree, the oldest; a longer queue is served as it came


class LongestPrefix(Policy):
    """The longest prefix in the cache first (SGLang's RadixAttention).

    With all requests known ahead and a cache that holds the longest of them, it visits the tree of prompts depth first
    and computes each edge once: the optimal hit rate (Zheng et al. 2024, theorem 3.1).
    """

    name = "prefix"
    changes_as_it_admits = True

    def __init__(self) -> None:
        self._matched: dict[tuple[str, int], int] = {}

    def prepare(self, scene: Scene) -> None:
        """Match those that wait longest."""
        oldest = sorted(scene.waiting, key=lambda b: (b.arrival_index, b.choice))[:LOOKED_AT]
        self._matched = {b.key: scene.kv.match_length(b.request.namespace, b.token_ids) for b in oldest}

    def key(self, branch: Branch) -> Key:
        """(minus the tokens that the cache has,)."""
        return (-self._matched.get(branch.key, 0),)

    def rank(self, branch: Branch) -> Key:
        """As they came: what was in the cache at admission is no reason to give way later."""
        return ()
