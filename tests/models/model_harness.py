"""Runs a model over whole sequences without an engine: pages, page tables and slots by hand, in any chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import create_backend
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.names import open_weights

Array = NDArray[np.float32]
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Loaded:
    """A model and its weights on one backend."""

    ops: Any
    model: Decoder
    weights: dict[str, Any]


def load(path: Path, backend: str) -> Loaded:
    """A checkpoint folder or file. Every weight of the model must be there, with the shape that the model expects."""
    with open_weights(path) as source:
        model, ops = build_model(ModelConfig.from_dict(source.config)), create_backend(backend)
        shapes = model.weight_shapes()
        assert {name: tuple(source.info(name).shape) for name in source.names()} == shapes
        weights = {name: ops.weight(name, model.prepare(name, source.read(name))) for name in shapes}
    return Loaded(ops, model, weights)


def chunked(length: int, chunk: int) -> list[int]:
    """`length` in steps of `chunk` tokens."""
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def batches(
    loaded: Loaded, sequences: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], page_size: int, seed: int = 0
) -> Iterator[tuple[Any, list[int]]]:
    """The steps of these sequences, all rows' logits wanted; `chunks[s]` adds up to the length of sequence s.

    Yields each batch and the sequence of each token row. Page ids are scattered over the pool.
    """
    groups = loaded.model.kv_groups()
    needs = [-(-len(ids) // page_size) for ids in sequences]
    ids = list(range(sum(needs) * len(groups)))
    Random(seed).shuffle(ids)
    tables = [[[ids.pop() for _ in range(need)] for need in needs] for _ in groups]
    kv = loaded.ops.allocate_kv(sum(needs) * len(groups), page_size, groups)
    ends = [list(accumulate(sizes)) for sizes in chunks]
    for step in range(max(map(len, chunks))):
        live = [s for s in range(len(sequences)) if step < len(chunks[s])]
        spans = {s: range(ends[s][step] - chunks[s][step], ends[s][step]) for s in live}
        owners = [s for s in live for _ in spans[s]]
        batch = loaded.ops.batch(
            [sequences[s][position] for s in live for position in spans[s]],
            [position for s in live for position in spans[s]],
            [len(spans[s]) for s in live],
            [[tables[group][s] for s in live] for group in range(len(groups))],
            kv,
            logit_rows=list(range(len(owners))),
        )
        yield batch, owners


def all_logits(
    loaded: Loaded, sequences: Sequence[Sequence[int]], chunk: int = 1 << 20, page_size: int = 16
) -> list[Array]:
    """Logits of every position of every sequence, `[length, V]` each; all sequences step together."""
    rows: list[list[Array]] = [[] for _ in sequences]
    for batch, owners in batches(loaded, sequences, [chunked(len(s), chunk) for s in sequences], page_size):
        logits = np.asarray(loaded.ops.to_lists(forward(loaded, batch)), dtype=np.float32)
        for owner, row in zip(owners, logits, strict=True):
            rows[owner].append(row)
    return [np.stack(each) for each in rows]


def forward(loaded: Loaded, batch: Any) -> Any:
    """Logits of one step."""
    return loaded.model.forward(loaded.ops, loaded.weights, batch)
