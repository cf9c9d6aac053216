"""Runs a captured program on NumPy, weights read when they are needed, and shows a hook what each matrix multiplies.

So one pass over a model holds one matrix at a time, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.capture import OpRecord, Program, Value, Weight
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

    def linear(self, x: Floats, weight: Any, bias: Any = None, *, adapters: Any = None) -> Floats:
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

    `norm`: the weight of the norm that makes it, used nowhere else; `rows`: the matrix whose outputs it is, times a
    gate or mixed by attention over positions. At most one is set. `heads`: with `rows` behind attention, the query
    heads that read one key-value head, and the size of a head: channels of those heads share a row, hence a factor.
    `plain`: a matrix of the same input that is not quantized (the router of experts) and takes the factors too; it sees
    all rows before the others see theirs, one matrix at a time.
    """

    names: tuple[str, ...]
    norm: str = ""
    rows: str = ""
    heads: tuple[int, int] = (1, 1)
    plain: str = ""

    def fold(self, values: Floats) -> Floats:
        """Of each row of `rows`, the largest value of the channels that it makes. [K] -> [R]."""
        group, size = self.heads
        folded: Floats = values.reshape(-1, group, size).max(axis=1).ravel()
        return folded

    def tied(self, values: Floats) -> Floats:
        """The same for all channels that one row makes. [K]."""
        group, size = self.heads
        return self.fold(values).reshape(-1, 1, size).repeat(group, axis=1).ravel()


def shared_inputs(program: Program) -> tuple[SharedInput, ...]:
    """The matrices of a program by their inputs, in order."""
    return _Inputs(program).found()


class _Inputs:
    def __init__(self, program: Program) -> None:
        self.records = program.records
        self.makers = {value: record for record in program.records for value in record.outputs}
        self.uses: dict[int, list[OpRecord]] = {value: [] for value in self.makers}
        for record in program.records:
            for _, operand in record.operands:
                if isinstance(operand, Value):
                    self.uses[operand.index].append(record)
        # layer -> its values, before they are written
        self.values: dict[int, Any] = {}
        for record in program.records:
            if record.op == "write_kv":
                given: dict[str, Any] = dict(record.operands)
                self.values[given["layer"].value] = given["v"]

    def found(self) -> tuple[SharedInput, ...]:
        found: list[SharedInput] = []
        for record in self.records:
            given = dict(record.operands)
            if record.op == "moe":
                found += self._experts(record, given)
            elif record.op == "linear" and isinstance(given["x"], Value):
                value = given["x"].index
                users = [user for user in self.uses[value] if user.op == "linear"]
                if users[0] is record:
                    found.append(self._shared(value, users, len(self.uses[value]) == len(users)))
        return tuple(found)

    def _experts(self, record: OpRecord, given: Mapping[str, Any]) -> list[SharedInput]:
        """Gates and ups of all experts share an input; each down sees what its own expert made."""
        gates, ups, downs = (given[key].names for key in ("gate", "up", "down"))
        names = tuple(name for pair in zip(gates, ups, strict=True) for name in pair)
        x, norm = given["x"], ""
        if isinstance(x, Value) and self.uses[x.index] == [record]:
            norm = self._norm(x.index)
        router = _weight(record, "router") if norm else ""
        inner = [SharedInput((down,), rows=up) for up, down in zip(ups, downs, strict=True)]
        return [SharedInput(names, norm=norm, plain=router), *inner] if norm else [*map(_alone, names), *inner]

    def _shared(self, value: int, users: Sequence[OpRecord], alone: bool) -> SharedInput:
        names = tuple(_weight(user, "weight") for user in users)
        maker = self.makers[value]
        if not alone:
            return SharedInput(names)
        if maker.op == "gated_activation":
            return SharedInput(names, rows=self._rows(dict(maker.operands)["up"]))
        if maker.op == "attention":
            return self._behind_attention(names, maker)
        return SharedInput(names, norm=self._norm(value))

    def _norm(self, value: int) -> str:
        maker = self.makers[value]
        return _weight(maker, "weight") if maker.op == "rms_norm" and value == maker.outputs[0] else ""

    def _rows(self, operand: Any) -> str:
        """The matrix that makes a value, if nothing else uses the value and no bias is added."""
        source = self.makers[operand.index] if isinstance(operand, Value) else None
        if source is None or source.op != "linear" or _weight(source, "bias") or len(self.uses[operand.index]) > 1:
            return ""
        return _weight(source, "weight")

    def _behind_attention(self, names: tuple[str, ...], maker: OpRecord) -> SharedInput:
        given: dict[str, Any] = dict(maker.operands)
        size, values = given["head_dim"].value, self.values[given["layer"].value]
        rows = self._rows(values)
        if not rows:
            return SharedInput(names)
        widths = [
            self.makers[v.index].dims[self.makers[v.index].outputs.index(v.index)][1] for v in (given["q"], values)
        ]
        return SharedInput(names, rows=rows, heads=(widths[0] // widths[1], size))


def _alone(name: str) -> SharedInput:
    return SharedInput((name,))


def _weight(record: OpRecord, place: str) -> str:
    operand = dict(record.operands)[place]
    return operand.name if isinstance(operand, Weight) else ""
