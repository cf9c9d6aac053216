"""The records of a native program before they are bytes, and their buffers.

Values get buffers by liveness: a buffer is used again once its value is dead, at once where an op may write over its
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.backends import native_lib as lib
from octavo.backends.ops import RopeTable

# records that may write over an input which dies there: each thread reads an element before it writes it
_IN_PLACE = (lib.NORM, lib.ADD, lib.SCALE, lib.GATED, lib.LAYER_NORM)


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of the checkpoint; with `up`, the pair (name, up) interleaved."""

    name: str
    format: str
    up: str = ""


@dataclass(frozen=True)
class VectorSpec:
    """A vector of the checkpoint; with `up`, the biases of a pair in packed order."""

    name: str
    up: str = ""


WeightSpec = MatrixSpec | VectorSpec


@dataclass
class NativeOp:
    """A record of the program over values; `weights` by place as octavo_native.h says."""

    code: int
    inputs: dict[int, int]  # place -> value
    outputs: list[int]
    weights: dict[int, WeightSpec] = field(default_factory=dict)
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    extra: tuple[WeightSpec, ...] = ()


@dataclass(frozen=True)
class States:
    """Where a step leaves the hidden states of all its tokens: a value or buffer, and the norm that they lack."""

    value: int
    norm: VectorSpec | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Lowered:
    """Records over buffers: `ops[n].inputs` and `outputs` are indices into `buffers` [(rows, cols)]."""

    ops: tuple[NativeOp, ...]
    buffers: tuple[tuple[int, int], ...]
    ropes: tuple[RopeTable, ...]
    logits: int
    num_layers: int
    shown: dict[int, int] = field(default_factory=dict)  # captured value -> the buffer that has it in the end
    states: States | None = None  # None: no rows are selected before the logits
    targets: tuple[str, ...] = ()  # projections that adapters may change, by number

    def weights(self) -> tuple[WeightSpec, ...]:
        """Every weight once, in the order of first use."""
        specs = [spec for op in self.ops for spec in (*(op.weights[at] for at in sorted(op.weights)), *op.extra)]
        return tuple(dict.fromkeys(specs))


def with_buffers(
    ops: Sequence[NativeOp],
    shapes: Sequence[tuple[int, int]],
    ropes: tuple[RopeTable, ...],
    logits: int,
    layers: int,
    shown: dict[int, int] | None = None,
    states: States | None = None,
) -> Lowered:
    """The records over buffers instead of values; a step leaves `logits` and `states` to be read. With `shown`
    (captured value -> value) every value has a buffer of its own, so that all of them can be read after a step."""
    if shown is not None:
        return Lowered(tuple(ops), tuple(shapes), ropes, logits, layers, shown, states)
    last = {value: at for at, op in enumerate(ops) for value in (*op.outputs, *op.inputs.values())}
    last[logits] = len(ops)
    if states is not None:
        last[states.value] = len(ops)
    buffers: list[tuple[int, int]] = []
    free: list[int] = []
    where: dict[int, int] = {}

    def take(shape: tuple[int, int]) -> int:
        for buffer in reversed(free):
            if buffers[buffer] == shape:
                free.remove(buffer)
                return buffer
        buffers.append(shape)
        return len(buffers) - 1

    planned = []
    for at, op in enumerate(ops):
        dying = dict.fromkeys(value for value in op.inputs.values() if last[value] == at)
        early = [value for value in dying if _overwritable(op, value)]
        free += [where[value] for value in early]
        for value in op.outputs:
            where[value] = take(shapes[value])
        free += [where[value] for value in dying if value not in early]
        free += [where[value] for value in op.outputs if last[value] == at]
        inputs = {place: where[value] for place, value in op.inputs.items()}
        outputs = [where[value] for value in op.outputs]
        planned.append(NativeOp(op.code, inputs, outputs, op.weights, op.i, op.f, op.extra))
    left = None if states is None else replace(states, value=where[states.value])
    return Lowered(tuple(planned), tuple(buffers), ropes, where[logits], layers, states=left)


def _overwritable(op: NativeOp, value: int) -> bool:
    """Whether an output may lie where this input lay."""
    if op.code in _IN_PLACE:
        return True
    places = [place for place, read in op.inputs.items() if read == value]
    return op.code in (lib.LINEAR, lib.MOE) and places == [1]
