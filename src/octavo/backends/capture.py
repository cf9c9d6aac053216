"""Run a forward pass once on symbols, keep it as a list of op records, and replay the list on any backend.

Dimensions of a symbolic value are integers or T (token rows), S (sequences), R (rows that need logits): one program
serves every step. A forward pass that looks at data (`if x`, `len(x)`, a loop over rows) is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.backends.ops import OPS, OpSpec
from octavo.backends.reference import ReferenceBackend
from octavo.core.errors import InvalidInput

Dims = tuple[Any, ...]  # of int, or "T", "S", "R"

BATCH_FIELDS: dict[str, Dims] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "seq_lens": ("S",),
    "logit_rows": ("R",),
}


@dataclass(frozen=True)
class Value:
    """Output number `index` of the program so far."""

    index: int


@dataclass(frozen=True)
class Weight:
    """A weight, by name."""

    name: str


@dataclass(frozen=True)
class Weights:
    """A list of weights (the experts of a mixture), by name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class BatchField:
    """A field of the batch; the whole batch with an empty name."""

    name: str = ""


@dataclass(frozen=True)
class Adapters:
    """What the batch has for a projection, if anything."""

    projection: str


@dataclass(frozen=True)
class Constant:
    """An attribute, by value."""

    value: Any


Operand = Value | Weight | Weights | BatchField | Adapters | Constant


@dataclass(frozen=True)
class OpRecord:
    """One call of an op: operands in the order of the method's parameters, and the values it makes."""

    index: int
    op: str
    operands: tuple[tuple[str, Operand], ...]
    outputs: tuple[int, ...]
    dims: tuple[Dims, ...]  # of the outputs
    frees: tuple[int, ...] = ()  # values not used after this record

    def weights(self) -> tuple[str, ...]:
        """Names of the weights that the record reads."""
        names: list[str] = []
        for _, operand in self.operands:
            names += [operand.name] if isinstance(operand, Weight) else []
            names += operand.names if isinstance(operand, Weights) else ()
        return tuple(names)


class Symbol:
    """A value that does not exist yet: its dimensions, and the operand that will give it."""

    def __init__(self, operand: Operand, dims: Dims, origin: str) -> None:
        self.operand, self.dims, self.origin = operand, dims, origin

    @property
    def shape(self) -> Dims:
        """The dimensions; T, S and R are names."""
        return self.dims

    def _refuse(self, *_: Any) -> NoReturn:
        what = f"symbolic [{', '.join(map(str, self.dims))}] of {self.origin}"
        raise InvalidInput(
            "forward", what, "a captured forward pass must not depend on data: use an op of backends/ops.py"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


class SymbolicAdapters:
    """Stands for `ForwardBatch.adapters`."""

    def get(self, projection: str) -> Symbol:
        """What a step has for a projection: perhaps nothing."""
        return Symbol(Adapters(projection), (), f"adapters of {projection}")


class SymbolicBatch:
    """Stands for the `ForwardBatch` of any step."""

    def __init__(self) -> None:
        self.adapters = SymbolicAdapters()
        self.token_ids, self.positions, self.seq_lens, self.logit_rows = (
            Symbol(BatchField(name), dims, f"batch.{name}") for name, dims in BATCH_FIELDS.items()
        )


class SymbolicBackend:
    """Has every op of the table that belongs to a program; each call appends a record."""

    name = "symbolic"

    def __init__(self) -> None:
        self.records: list[OpRecord] = []
        self._values = 0

    def weight(self, name: str, shape: Sequence[int]) -> Symbol:
        """A symbolic weight."""
        return Symbol(Weight(name), tuple(shape), f"weight {name}")

    def __getattr__(self, op: str) -> Callable[..., Any]:
        spec = OPS.get(op)
        if spec is None or not spec.tensor or not spec.used:
            raise AttributeError(f"no op {op!r} can be captured")
        return lambda *args, **kwargs: self._record(spec, args, kwargs)

    def _record(self, spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(getattr(ReferenceBackend, spec.name))
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        origin = f"op {len(self.records)} ({spec.name})"
        inputs = {tensor.name for tensor in spec.inputs}
        operands = tuple((name, _operand(origin, name, value, name in inputs)) for name, value in given.items())
        dims = infer(spec, origin, given)
        outputs = tuple(range(self._values, self._values + len(dims)))
        self._values += len(dims)
        self.records.append(OpRecord(len(self.records), spec.name, operands, outputs, dims))
        made = tuple(Symbol(Value(i), d, origin) for i, d in zip(outputs, dims, strict=True))
        return made[0] if len(made) == 1 else made or None


def _operand(origin: str, name: str, value: Any, is_input: bool) -> Operand:
    if isinstance(value, Symbol):
        return value.operand
    if isinstance(value, SymbolicBatch):
        return BatchField()
    if is_input and isinstance(value, (list, tuple)):
        names = [v.operand.name for v in value if isinstance(v, Symbol) and isinstance(v.operand, Weight)]
        if len(names) == len(value):
            return Weights(tuple(names))
    if is_input and value is not None:
        raise InvalidInput(f"{origin} {name}", value, "an input is a symbolic value, a weight or the batch")
    try:
        hash(value)
    except TypeError:
        raise InvalidInput(f"{origin} {name}", value, "an attribute is kept by value: give an immutable one") from None
    return Constant(value)


def infer(spec: OpSpec, origin: str, given: Mapping[str, Any]) -> tuple[Dims, ...]:
    """Dimensions of the outputs: names of the spec take the dimensions of the inputs, others stay (T, S, R).

    Raises InvalidInput where two inputs disagree.
    """
    sizes: dict[str, Any] = {}
    for tensor in spec.inputs:
        dims = _dims_of(given.get(tensor.name))
        if dims is None:
            continue
        if len(dims) != len(tensor.dims):
            raise InvalidInput(f"{origin} {tensor.name}", dims, f"expected [{', '.join(tensor.dims)}]")
        for name, size in zip(tensor.dims, dims, strict=True):
            if sizes.setdefault(name, size) != size:
                raise InvalidInput(f"{origin} {tensor.name}", dims, f"expected {name} = {sizes[name]}")
    return tuple(tuple(sizes.get(name, name) for name in tensor.dims) for tensor in spec.outputs)


def _dims_of(value: Any) -> Dims | None:
    if isinstance(value, Symbol):
        return value.dims
    if isinstance(value, (list, tuple)) and value:
        return (len(value), *value[0].dims)
    return None


@dataclass(frozen=True)
class Program:
    """A captured forward pass."""

    records: tuple[OpRecord, ...]
    output: int  # the value that `replay` returns

    def weights(self) -> tuple[str, ...]:
        """Names of all weights, in the order of their first use."""
        return tuple(dict.fromkeys(name for record in self.records for name in record.weights()))

    def steps(self, backend: Any, weights: Mapping[str, Any], batch: Any) -> Iterator[tuple[OpRecord, tuple[Any, ...]]]:
        """Run record by record; yields each with its outputs. Values are dropped after their last use.

        Raises InvalidInput for a missing weight before anything runs.
        """
        missing = [name for name in self.weights() if name not in weights]
        if missing:
            raise InvalidInput("weights", missing[0], "the program reads this weight: load it")
        values: dict[int, Any] = {}
        for record in self.records:
            arguments = {name: _resolve(operand, values, weights, batch) for name, operand in record.operands}
            result = getattr(backend, record.op)(**arguments)
            outputs = result if len(record.outputs) > 1 else (result,)[: len(record.outputs)]
            values.update(zip(record.outputs, outputs, strict=True))
            yield record, outputs
            for index in record.frees:
                del values[index]

    def replay(self, backend: Any, weights: Mapping[str, Any], batch: Any) -> Any:
        """The forward pass on a backend: the same calls as when it runs eagerly, so the same bits."""
        result = None
        for record, outputs in self.steps(backend, weights, batch):
            if self.output in record.outputs:
                result = outputs[record.outputs.index(self.output)]
        return result

    def describe(self) -> str:
        """The program as a table: number, op, inputs and attributes, outputs with dimensions, values freed."""
        lines = [_describe(record) for record in self.records]
        return "\n".join([*lines, f"result: %{self.output}"])


def _resolve(operand: Operand, values: Mapping[int, Any], weights: Mapping[str, Any], batch: Any) -> Any:
    if isinstance(operand, Value):
        return values[operand.index]
    if isinstance(operand, Weight):
        return weights[operand.name]
    if isinstance(operand, Weights):
        return [weights[name] for name in operand.names]
    if isinstance(operand, BatchField):
        return getattr(batch, operand.name) if operand.name else batch
    if isinstance(operand, Adapters):
        return batch.adapters.get(operand.projection)
    return operand.value


def _describe(record: OpRecord) -> str:
    shown = []
    for name, operand in record.operands:
        if isinstance(operand, Value):
            shown.append(f"%{operand.index}")
        elif isinstance(operand, Weight):
            shown.append(operand.name)
        elif isinstance(operand, Weights):
            shown.append(f"{name}=[{len(operand.names)} weights]")
        elif isinstance(operand, BatchField):
            shown.append(f"batch.{operand.name}" if operand.name else "batch")
        elif isinstance(operand, Constant) and isinstance(operand.value, (int, float, str)):
            shown.append(f"{name}={operand.value}")
    outputs = ", ".join(
        f"%{i} [{', '.join(map(str, dims))}]" for i, dims in zip(record.outputs, record.dims, strict=True)
    )
    frees = f"  free {' '.join(f'%{i}' for i in record.frees)}" if record.frees else ""
    return f"{record.index:5d}  {record.op}({', '.join(shown)})" + (f" -> {outputs}" if outputs else "") + frees


def capture(
    forward: Callable[[Any, Mapping[str, Any], Any], Any], weight_shapes: Mapping[str, Sequence[int]]
) -> Program:
    """Run `forward(ops, weights, batch)` on symbols. Raises InvalidInput when it depends on data or shapes disagree."""
    ops = SymbolicBackend()
    weights = {name: ops.weight(name, shape) for name, shape in weight_shapes.items()}
    result = forward(ops, weights, SymbolicBatch())
    if not isinstance(result, Symbol) or not isinstance(result.operand, Value):
        raise InvalidInput("forward", result, "return the value of an op")
    return Program(_with_lifetimes(ops.records, result.operand.index), result.operand.index)


def _with_lifetimes(records: Sequence[OpRecord], output: int) -> tuple[OpRecord, ...]:
    last_use: dict[int, int] = {}
    for record in records:
        used = [operand.index for _, operand in record.operands if isinstance(operand, Value)]
        last_use.update((index, record.index) for index in (*record.outputs, *used))
    last_use[output] = len(records)
    frees: dict[int, list[int]] = {}
    for index, where in last_use.items():
        frees.setdefault(where, []).append(index)
    return tuple(OpRecord(r.index, r.op, r.operands, r.outputs, r.dims, tuple(frees.get(r.index, ()))) for r in records)


@dataclass(frozen=True)
class Difference:
    """The first record whose outputs differ between two backends."""

    index: int
    op: str
    error: float  # largest |a - b| / (1 + |a|); inf where only one is finite
    weights: tuple[str, ...]

    def __str__(self) -> str:
        reads = f" reading {', '.join(self.weights)}" if self.weights else ""
        return f"op {self.index} ({self.op}){reads} differs by {self.error:.3g}"


Side = tuple[Any, Mapping[str, Any], Any]  # backend, its weights, its batch
NATIVE_TOLERANCE = 3e-4  # of native fp32 ops: other sums and exponentials; real models differ by at most 6e-5


def first_difference(program: Program, a: Side, b: Side, tolerance: float = 1e-4) -> Difference | None:
    """Replay on two backends side by side; the first record whose outputs differ by more than the tolerance, or None.

    Each side has its own KV pool, with equal contents before the step.
    """
    for (record, left), (_, right) in zip(program.steps(*a), program.steps(*b), strict=True):
        errors = [_error(a[0].to_lists(x), b[0].to_lists(y)) for x, y in zip(left, right, strict=True)]
        if errors and max(errors) > tolerance:
            return Difference(record.index, record.op, max(errors), record.weights())
    return None


def difference_from(
    program: Program, known: Mapping[int, Any], side: Side, tolerance: float = NATIVE_TOLERANCE
) -> Difference | None:
    """Replay on one backend beside the values that a whole program left, by number: the first record of which a value
    differs by more than the tolerance, relative to its row, or None. An op that was fused into a later one is judged
    there."""
    for record, outputs in program.steps(*side):
        pairs = [(known[at], side[0].to_lists(y)) for at, y in zip(record.outputs, outputs, strict=True) if at in known]
        error = max((_row_error(x, y) for xs, ys in pairs for x, y in zip(xs, ys, strict=True)), default=0.0)
        if error > tolerance:
            return Difference(record.index, record.op, error, record.weights())
    return None


def _row_error(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of two rows, over 1 and the root mean square of the first."""
    size = 1.0 + math.sqrt(sum(x * x for x in a) / len(a))
    error = max(abs(x - y) for x, y in zip(a, b, strict=True)) / size
    return error if math.isfinite(error) else (0.0 if a == b else math.inf)


def _error(a: Any, b: Any) -> float:
    if isinstance(a, (list, tuple)):
        return max((_error(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if a == b or (a != a and b != b):
        return 0.0
    error = abs(a - b) / (1.0 + abs(a))
    return error if error == error else float("inf")
