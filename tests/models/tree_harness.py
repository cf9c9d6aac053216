"""Steps whose rows are trees of drafts, and the chains that their paths stand for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np
from model_harness import Array, Loaded, forward
from tiny_checkpoints import CASES, VOCAB, make_weights

from octavo.backends import create_backend
from octavo.backends.ops import path_moves
from octavo.core.draft_tree import path_of
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model


@dataclass(frozen=True)
class TreeCase:
    """One sequence: its history, a tree of rows after it, an accepted path of these, and a token after that path.

    The first `shared` tokens of the history are those of all sequences and may lie in the same pages.
    """

    history: list[int]
    tokens: list[int]
    parents: list[int]
    path: list[int]
    last: int

    @classmethod
    def draw(cls, rng: Random, history: list[int], most: int) -> TreeCase:
        count = rng.randint(1, most)
        fork = rng.choice([0.0, 0.3, 0.7, 1.0])
        parents = [row - 1 if rng.random() > fork else rng.randrange(-1, row) for row in range(count)]
        path = path_of(parents, rng.randrange(count))
        return cls(history, [rng.randrange(VOCAB) for _ in range(count)], parents, path, rng.randrange(VOCAB))

    def positions(self) -> list[int]:
        return [len(self.history) + len(path_of(self.parents, row)) - 1 for row in range(len(self.parents))]

    def chain(self, path: list[int]) -> list[int]:
        return [*self.history, *(self.tokens[row] for row in path)]


def tiny(name: str, backend: str) -> Loaded:
    """A tiny checkpoint on a backend with single ops."""
    model, ops = build_model(ModelConfig.from_dict(CASES[name])), create_backend(backend)
    return Loaded(ops, model, {key: ops.weight(key, model.prepare(key, value)) for key, value in make_weights(name)})


class TreeRun:
    """Some sequences in scattered pages; those of their first `shared` tokens are the same ones for all."""

    def __init__(self, loaded: Loaded, cases: list[TreeCase], page_size: int, shared: int = 0) -> None:
        self.loaded, self.cases, self.page_size = loaded, cases, page_size
        self.groups = loaded.model.kv_groups()
        common = shared // page_size
        self.shared = common * page_size
        needs = [-(-(len(case.history) + len(case.tokens) + 1) // page_size) for case in cases]
        ids = list(range((common + sum(needs)) * len(self.groups)))
        Random(1).shuffle(ids)
        self.kv = loaded.ops.allocate_kv(len(ids), page_size, self.groups)
        first = [[ids.pop() for _ in range(common)] for _ in self.groups]
        self.tables = [[[*front, *(ids.pop() for _ in range(need - common))] for need in needs] for front in first]

    def step(
        self, tokens: list[list[int]], positions: list[list[int]], *, first: int = 0, **more: object
    ) -> list[Array]:
        """Logits of all rows of some sequences, from `first` on; by sequence."""
        lens, (flat, places) = [len(each) for each in tokens], ([*chain(*each)] for each in (tokens, positions))
        tables = [table[first : first + len(tokens)] for table in self.tables]
        rows = list(range(len(flat)))
        batch = self.loaded.ops.batch(flat, places, lens, tables, self.kv, logit_rows=rows, **more)
        logits = np.array(self.loaded.ops.to_lists(forward(self.loaded, batch)), np.float32)
        return np.split(logits, np.cumsum(lens)[:-1])

    def trees(self) -> tuple[list[Array], list[Array]]:
        """Logits of the trees' rows; and, once their paths are accepted, of the token after them."""
        for s, case in enumerate(self.cases):
            known = self.shared if s else 0
            self.step([case.history[known:]], [list(range(known, len(case.history)))], first=s)
        rows = self.step(
            [case.tokens for case in self.cases],
            [case.positions() for case in self.cases],
            parent_rows=[case.parents for case in self.cases],
        )
        rows = [np.array(each) for each in rows]
        for table in self.tables:
            for case, pages in zip(self.cases, table, strict=True):
                self.loaded.ops.move_slots(self.kv, path_moves(len(case.history), case.path, pages, self.page_size))
        ends = [[len(case.history) + len(case.path)] for case in self.cases]
        return rows, self.step([[case.last] for case in self.cases], ends)


def by_chains(loaded: Loaded, cases: list[TreeCase], page_size: int) -> tuple[list[Array], list[Array]]:
    """The same, each row at the end of its chain."""
    rows, after = [], []
    for case in cases:
        logits = [np.empty(0, np.float32)] * len(case.tokens)
        leaves = {*range(len(case.tokens))} - {*case.parents}
        for path in [*(path_of(case.parents, leaf) for leaf in sorted(leaves)), case.path]:
            ids = case.chain(path)
            run = TreeRun(loaded, [TreeCase(ids, [], [], [], 0)], page_size)
            found = run.step([ids], [list(range(len(ids)))])[0]
            for depth, row in enumerate(path):
                logits[row] = np.array(found[len(case.history) + depth])
        rows.append(np.stack(logits))
        after.append(np.array(run.step([[case.last]], [[len(ids)]])[0]))
    return rows, after


def differences(got: tuple[list[Array], list[Array]], want: tuple[list[Array], list[Array]]) -> float:
    """The largest one of all logits; a NaN is infinite."""
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a, b, strict=True)]
    return max(float(np.nan_to_num(np.abs(a - b), nan=np.inf).max()) for a, b in pairs)


def cases_of(rng: Random, count: int, longest: int, most: int, shared: int = 0) -> list[TreeCase]:
    """Ragged ones."""
    common = [rng.randrange(VOCAB) for _ in range(shared)]
    lengths = [rng.randint(1, longest) for _ in range(count)]
    return [TreeCase.draw(rng, [*common, *(rng.randrange(VOCAB) for _ in range(n))], most) for n in lengths]
