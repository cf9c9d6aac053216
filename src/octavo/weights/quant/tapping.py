"""Runs a captured program on NumPy, weights read when they are needed, and shows a hook what each matrix multiplies.

So one pass over a model holds one matrix at a time, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.capture import OpRecord, Program, Value, Weight, Weights
from octavo.backends.numpy_backend import NumpyBackend

__all__ = ["Handle", "LazyWeights", "SharedInput", "TappingBackend", "hidden_states", "shared_inputs"]

Floats = NDArray[np.float32]
Hook = Callable[[str, Floats], tuple[Floats, Floats]]  # (name, inputs [T, K]) -> inputs and matrix [N, K] to multiply

_PAGE = 64


@dataclass(frozen=True)
class Handle:
    """A matrix that has not been read."""

    name: str


class LazyWeights(Mapping[str, Any]):
    """Vectors are read at once, when asked for; matrices stay handles."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], read: Callable[[str], Floats]) -> None:
        self.shapes, self.read = shapes, read

    def __getitem__(self, name: str) -> Any:
        return Handle(name) if len(self.shapes[name]) == 2 else self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class TappingBackend(NumpyBackend):
    """NumPy, with `hook` between each product and its operands. `logits` gives the hidden states back."""

    def __init__(self, read: Callable[[str], Floats], hook: Hook) -> None:
        self.read, self.hook = read, hook
        self.soft_cap = 0.0

    def embed(self, ids: Any, table: Any) -> Floats:
        """[T], [V, H] -> [T, H]."""
        return super().embed(ids, self.read(table.name))

    def linear(self, x: Floats, weight: Any, bias: Any = None, *, adapters: None = None) -> Floats:
        """x[T, K] @ weight[N, K]^T + bias[N] -> [T, N]."""
        x, matrix = self.hook(weight.name, x)
        return super().linear(x, matrix, bias)

    def logits(self, x: Floats, weight: Any, *, soft_cap: float = 0.0) -> Floats:
        """x as it is: the vocabulary is wide, so logits are made a few rows at a time elsewhere."""
        self.soft_cap = soft_cap
        return x


def hidden_states(model: Any, program: Program, sequences: Sequence[Sequence[int]], weights: LazyWeights, hook: Hook) -> Floats:  # fmt: skip  # noqa: E501
    """Final hidden states of every token of some sequences, [T, H], all in one pass."""
    backend = TappingBackend(weights.read, hook)
    groups = model.kv_groups()
    needs = [-(-len(ids) // _PAGE) for ids in sequences]
    pool = backend.allocate_kv(sum(needs) * len(groups), _PAGE, groups)
    pages = iter(range(sum(needs) * len(groups)))
    tables = [[[next(pages) for _ in range(need)] for need in needs] for _ in groups]
    tokens = [token for ids in sequences for token in ids]
    positions = [position for ids in sequences for position in range(len(ids))]
    lens = list(map(len, sequences))
    batch = backend.batch(tokens, positions, lens, tables, pool, logit_rows=list(range(len(tokens))))
    states: Floats = program.replay(backend, weights, batch)
    return states


@dataclass(frozen=True)
class SharedInput:
    """Matrices that multiply one value, and what can absorb a factor for each of its channels.

    `norm`: the weight of the norm that makes it, used nowhere else; `rows`: the matrix whose outputs, times a gate,
    it is. At most one is set.
    """

    names: tuple[str, ...]
    norm: str = ""
    rows: str = ""


def shared_inputs(program: Program) -> tuple[SharedInput, ...]:
    """The matrices of a program by their inputs, in order. Experts stand alone: each sees its own rows."""
    makers = {value: record for record in program.records for value in record.outputs}
    uses: dict[int, list[OpRecord]] = {value: [] for value in makers}
    for record in program.records:
        for _, operand in record.operands:
            if isinstance(operand, Value):
                uses[operand.index].append(record)
    found: list[SharedInput] = []
    for record in program.records:
        given = dict(record.operands)
        if record.op == "moe":
            lists = [given[key] for key in ("gate", "up", "down")]
            found += [SharedInput((name,)) for part in lists if isinstance(part, Weights) for name in part.names]
        elif record.op == "linear" and isinstance(given["x"], Value):
            value = given["x"].index
            users = [user for user in uses[value] if user.op == "linear"]
            if users[0] is record:
                found.append(_shared(makers[value], value, users, len(uses[value]) == len(users), makers))
    return tuple(found)


def _shared(maker: OpRecord, value: int, users: Sequence[OpRecord], alone: bool, makers: Mapping[int, OpRecord]) -> SharedInput:  # fmt: skip  # noqa: E501
    names = tuple(_weight(user, "weight") for user in users)
    if not alone:
        return SharedInput(names)
    if maker.op == "rms_norm" and value == maker.outputs[0]:
        return SharedInput(names, norm=_weight(maker, "weight"))
    if maker.op == "gated_activation":
        up = dict(maker.operands)["up"]
        source = makers[up.index] if isinstance(up, Value) else None
        if source is not None and source.op == "linear" and not _weight(source, "bias"):
            return SharedInput(names, rows=_weight(source, "weight"))
    return SharedInput(names)


def _weight(record: OpRecord, place: str) -> str:
    operand = dict(record.operands)[place]
    return operand.name if isinstance(operand, Weight) else ""
