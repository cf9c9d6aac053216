"""Random ragged steps for op tests: the same numbers for every backend, each with its own pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from octavo.backends.ops import ForwardBatch
from octavo.backends.random import round32
from octavo.core.draft_tree import path_of
from octavo.core.kv_groups import KVGroup

WINDOW = 9


def matrix(rng: random.Random, rows: int, columns: int, spread: float = 1.0) -> list[list[float]]:
    """Float32 numbers, so that every backend starts from the same ones."""
    return [[round32(rng.gauss(0.0, spread)) for _ in range(columns)] for _ in range(rows)]


@dataclass
class Scene:
    """Sequences with some history in two KV groups (layer 0 global, layer 1 windowed), and one ragged step after it."""

    rng: random.Random
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    page_size: int = 4
    lengths: list[int] = field(default_factory=list)  # history
    query_lens: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)  # tree rows; empty: a chain
    tables: list[list[list[int]]] = field(default_factory=list)
    num_pages: int = 0
    history: list[list[list[float]]] = field(default_factory=list)  # [group]: key, value, key, value, ... of each token

    @classmethod
    def draw(cls, rng: random.Random, longest: int = 40) -> Scene:
        scene = cls(rng, *rng.choice([(4, 2, 8), (3, 1, 4), (2, 2, 6)]), page_size=rng.choice([1, 2, 4, 16]))
        count = rng.randint(1, 4)
        scene.lengths = [rng.randint(0, longest) for _ in range(count)]
        scene.query_lens = [rng.choice([1, 1, rng.randint(1, 12)]) for _ in range(count)]
        scene.parents = [
            [rng.randrange(-1, row) for row in range(n)] if rng.random() < 0.3 else [] for n in scene.query_lens
        ]
        needed = [-(-(n + q) // scene.page_size) for n, q in zip(scene.lengths, scene.query_lens, strict=True)]
        pages = list(range(2 * sum(needed) + 3))
        rng.shuffle(pages)
        scene.num_pages = len(pages)
        scene.tables = [[[pages.pop() for _ in range(n)] for n in needed] for _ in range(2)]
        for row, length in enumerate(scene.lengths):  # the windowed group has freed what it can no longer see
            for column in range(max(0, length - WINDOW + 1) // scene.page_size):
                scene.tables[1][row][column] = -1
        scene.history = [matrix(rng, 2 * sum(scene.lengths), scene.kv_heads * scene.dim) for _ in range(2)]
        return scene

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        shape = {"num_kv_heads": self.kv_heads, "k_dim": self.dim, "v_dim": self.dim}
        return (KVGroup((0,), **shape), KVGroup((1,), window=WINDOW, **shape))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def positions(self) -> list[int]:
        found: list[int] = []
        for length, count, parents in zip(self.lengths, self.query_lens, self.parents, strict=True):
            depths = [len(path_of(parents, row)) - 1 for row in range(count)] if parents else range(count)
            found += [length + depth for depth in depths]
        return found

    def pool(self, backend: Any) -> Any:
        """A pool of the backend with the history written slot by slot; everything else holds what must not be read."""
        pool = backend.allocate_kv(self.num_pages, self.page_size, self.groups)
        if backend.name == "numpy":
            pool.keys[:, : pool.zero_slot] = float("nan")
            pool.values[:, : pool.zero_slot] = float("inf")
        for group in (0, 1):
            values = iter(self.history[group])
            for row, length in enumerate(self.lengths):
                for position in range(length):
                    page = self.tables[group][row][position // self.page_size]
                    key, value = next(values), next(values)
                    if page >= 0:
                        pool.write(page, position % self.page_size, key, value)
        return pool

    def batch(self, backend: Any, pool: Any, **more: Any) -> ForwardBatch:
        tokens = list(range(self.num_tokens))
        where = self.positions(), self.query_lens, self.tables
        return backend.batch(tokens, *where, pool, parent_rows=self.parents, **more)
