"""From a captured forward pass to the records of the native program: what belongs together becomes one record.

    linears of one input                  one record, operands prepared once
    gate, up, gated activation            one interleaved matrix whose epilogue is the activation
    rms_norm before linears               their operands' preparation; after a linear: `x +` is the linear's epilogue
    head norms, rope, write_kv            one record
    norm, select_rows                     rows are selected first: only they are normed

Every fusion keeps each row's arithmetic; what matches no pattern becomes a record of its own, and what has none is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.backends import native_lib as lib
from octavo.backends.capture import Adapters, BatchField, Constant, OpRecord, Program, Value, Weight, Weights
from octavo.backends.native_records import Lowered, MatrixSpec, NativeOp, States, VectorSpec, WeightSpec, with_buffers
from octavo.backends.ops import RopeTable, check_sinks
from octavo.core.errors import InvalidInput

MAX_MATRICES = 4  # of one record
PANEL = 64  # columns
_TARGETS = 3  # of one record of adapters
EPILOGUES = {"silu": lib.EPI_SILU_MUL, "gelu_tanh": lib.EPI_GELU_MUL}


@dataclass(frozen=True)
class _Normed:
    """A norm that has not run: the input's value, the weight, eps."""

    value: int
    weight: VectorSpec
    eps: float


def lower(
    program: Program, format_of: Callable[[str, str], str], keep: bool = False, adapters: bool = False
) -> Lowered:
    """The native form of a program. `format_of(weight name, use)` with use linear, head, embed or router.
    `keep`: buffers are not used again. `adapters`: steps may have some.

    Raises InvalidInput naming an op that the native backend does not run in this place.
    """
    return _Lowering(program, format_of, adapters).run(keep)


class _Lowering:
    def __init__(self, program: Program, format_of: Callable[[str, str], str], adapters: bool) -> None:
        self.program, self.format_of, self.adapters = program, format_of, adapters
        self.targets: list[str] = []
        self.ops: list[NativeOp] = []
        self.shapes: list[tuple[int, int]] = []  # of native values: rows, cols
        self.made_by: dict[int, int] = {}  # native value -> op
        self.values: dict[int, int] = {}  # captured -> native
        self.norms: dict[int, _Normed] = {}  # captured -> what will be normed
        self.ropes: list[RopeTable] = []
        self.layers: set[int] = set()
        self.states: States | None = None
        self.done: set[int] = set()
        self.dims = {v: d for r in program.records for v, d in zip(r.outputs, r.dims, strict=True)}
        self.maker = {v: r for r in program.records for v in r.outputs}
        self.uses: dict[int, list[OpRecord]] = {v: [] for v in self.dims}
        for record in program.records:
            for _, operand in record.operands:
                if isinstance(operand, Value):
                    self.uses[operand.index].append(record)

    def run(self, keep: bool = False) -> Lowered:
        for record in self.program.records:
            if record.index not in self.done:
                handler = getattr(self, f"_{record.op}", None)
                if handler is None:
                    raise self._refuse(record, "has no native form")
                handler(record)
        logits = self.values[self.program.output]
        layers = max(self.layers, default=-1) + 1
        shown = self._shown() if keep else None
        lowered = with_buffers(self.ops, self.shapes, tuple(self.ropes), logits, layers, shown, self.states)
        return replace(lowered, targets=tuple(self.targets))

    def _shown(self) -> dict[int, int]:
        """Captured values that are left in the end: of those that one record makes, or changes in place, the last."""
        last = {native: captured for captured, native in sorted(self.values.items())}
        return {captured: native for native, captured in last.items()}

    # ---- helpers

    def _refuse(self, record: OpRecord, why: str) -> InvalidInput:
        return InvalidInput("model", f"op {record.index} ({record.op})", f"{why}; use backend='numpy' for this model")

    def _input(self, record: OpRecord, name: str) -> int | None:
        """The captured value of an operand, or None."""
        operand = dict(record.operands)[name]
        if isinstance(operand, Value):
            return operand.index
        if isinstance(operand, BatchField) or (isinstance(operand, Constant) and operand.value is None):
            return None
        raise self._refuse(record, f"takes {name} in an unexpected way")

    def _weight(self, record: OpRecord, name: str) -> str:
        operand = dict(record.operands)[name]
        return operand.name if isinstance(operand, Weight) else ""

    def _constant(self, record: OpRecord, name: str) -> Any:
        operand = dict(record.operands)[name]
        if not isinstance(operand, Constant):
            raise self._refuse(record, f"takes {name} in an unexpected way")
        return operand.value

    def _new(self, captured: int) -> int:
        """A native value of a captured one's shape."""
        rows, cols = self.dims[captured]
        self.shapes.append((lib.ROWS_R if rows == "R" else lib.ROWS_T, cols))
        self.values[captured] = len(self.shapes) - 1
        return len(self.shapes) - 1

    def _emit(self, op: NativeOp) -> NativeOp:
        self.made_by.update(dict.fromkeys(op.outputs, len(self.ops)))
        self.ops.append(op)
        return op

    def _plain(self, captured: int) -> int:
        """The native value of a captured one; a norm put off is made now."""
        if captured not in self.values:
            normed = self.norms[captured]
            out = self._new(captured)
            self._emit(NativeOp(lib.NORM, {0: normed.value}, [out], {0: normed.weight}, f=(normed.eps,)))
        return self.values[captured]

    def _operands(self, captured: int) -> tuple[int, dict[int, WeightSpec], float]:
        """What a product reads: value, norm weight at place 8, eps."""
        normed = self.norms.get(captured)
        if normed is None or captured in self.values:
            return self._plain(captured), {}, 0.0
        return normed.value, {8: normed.weight}, normed.eps

    def _bias(self, record: OpRecord, at: int) -> dict[int, WeightSpec]:
        name = self._weight(record, "bias")
        return {at: VectorSpec(name)} if name else {}

    # ---- rows

    def _embed(self, record: OpRecord) -> None:
        name = self._weight(record, "table")
        out = self._new(record.outputs[0])
        self._emit(NativeOp(lib.EMBED, {}, [out], {0: MatrixSpec(name, self.format_of(name, "embed"))}, f=(1.0,)))

    def _scale(self, record: OpRecord) -> None:
        x = self._input(record, "x")
        factor = float(self._constant(record, "s"))
        value = self._plain(x) if x is not None else -1
        source = self.ops[self.made_by[value]]
        if source.code == lib.EMBED and len(self.uses[x or 0]) == 1:
            source.f = (source.f[0] * factor,)
            self.values[record.outputs[0]] = value
            return
        self._emit(NativeOp(lib.SCALE, {0: value}, [self._new(record.outputs[0])], f=(factor,)))

    def _add(self, record: OpRecord) -> None:
        x, y = (self._plain(self._input(record, name) or 0) for name in ("x", "y"))
        self._emit(NativeOp(lib.ADD, {0: x, 1: y}, [self._new(record.outputs[0])]))

    def _layer_norm(self, record: OpRecord) -> None:
        weights: dict[int, WeightSpec] = {0: VectorSpec(self._weight(record, "weight"))}
        if self._weight(record, "bias"):
            weights[1] = VectorSpec(self._weight(record, "bias"))
        x = self._plain(self._input(record, "x") or 0)
        eps = self._constant(record, "eps")
        self._emit(NativeOp(lib.LAYER_NORM, {0: x}, [self._new(record.outputs[0])], weights, f=(eps,)))

    def _rms_norm(self, record: OpRecord) -> None:
        y, s = record.outputs
        x, residual = self._input(record, "x"), self._input(record, "residual")
        base = self._plain(x or 0)
        self.values[s] = base if residual is None else self._sum(record, base, residual)
        if not self.uses[y]:
            return
        weight = VectorSpec(self._weight(record, "weight"))
        self.norms[y] = _Normed(self.values[s], weight, float(self._constant(record, "eps")))
        if not all(user.op in ("linear", "moe", "select_rows") for user in self.uses[y]):
            self._plain(y)

    def _sum(self, record: OpRecord, base: int, residual: int) -> int:
        """x + residual: the epilogue of what makes the residual, where nothing else wants that."""
        value = self._plain(residual)
        source = self.ops[self.made_by[value]]
        alone = self.uses[residual] == [record] and self.made_by[base] < self.made_by[value]
        if alone and _can_add(source):
            source.inputs[1] = base
            if source.code == lib.LINEAR:
                source.i = (lib.EPI_ADD, *source.i[1:])
            return value
        out = self._new(record.outputs[1])
        self._emit(NativeOp(lib.ADD, {0: base, 1: value}, [out]))
        return out

    def _select_rows(self, record: OpRecord) -> None:
        x, y = self._input(record, "x") or 0, record.outputs[0]
        normed = self.norms.get(x)
        late = normed is not None and x not in self.values
        out = self._new(y)
        self.states = States(normed.value, normed.weight, normed.eps) if late and normed else States(self._plain(x))
        self._emit(NativeOp(lib.SELECT, {0: self.states.value}, [out]))
        if late and normed:
            del self.values[y]
            self.norms[y] = _Normed(out, normed.weight, normed.eps)

    # ---- products

    def _linear(self, record: OpRecord) -> None:
        x = self._input(record, "x") or 0
        waiting = [r for r in self.uses[x] if r.op == "linear" and r.index not in self.done]
        for gate, up, act in self._pairs(waiting):
            self._pair(x, gate, up, act)
        waiting = [r for r in waiting if r.index not in self.done]
        by_format: dict[str, list[OpRecord]] = {}
        for other in waiting:
            by_format.setdefault(self.format_of(self._weight(other, "weight"), "linear"), []).append(other)
        for kind, records in by_format.items():
            for first in range(0, len(records), MAX_MATRICES):
                self._product(x, records[first : first + MAX_MATRICES], kind)

    def _pairs(self, linears: Sequence[OpRecord]) -> list[tuple[OpRecord, OpRecord, OpRecord]]:
        """(gate, up, activation) among linears of one input whose results only the activation reads."""
        found = []
        for gate in linears:
            users = self.uses[gate.outputs[0]]
            if len(users) != 1 or users[0].op != "gated_activation":
                continue
            act = users[0]
            up = self.maker[self._input(act, "up") or 0]
            fits = up in linears and up is not gate and self.uses[up.outputs[0]] == [act]
            if fits and self._input(act, "gate") == gate.outputs[0] and self._alike(gate, up):
                found.append((gate, up, act))
        return found

    def _alike(self, gate: OpRecord, up: OpRecord) -> bool:
        """Equal formats; biases on both or on none."""
        kinds = {self.format_of(self._weight(r, "weight"), "linear") for r in (gate, up)}
        return len(kinds) == 1 and bool(self._weight(gate, "bias")) == bool(self._weight(up, "bias"))

    def _pair(self, x: int, gate: OpRecord, up: OpRecord, act: OpRecord) -> None:
        value, weights, eps = self._operands(x)
        name = self._weight(gate, "weight")
        weights[0] = MatrixSpec(name, self.format_of(name, "linear"), self._weight(up, "weight"))
        if self._bias(gate, 4):
            weights[4] = VectorSpec(self._weight(gate, "bias"), self._weight(up, "bias"))
        outs = [self._new(act.outputs[0])]
        epilogue = EPILOGUES[self._constant(act, "kind")]
        targets = self._targets((gate, up))
        if targets:
            inner = self.dims[gate.outputs[0]][1]
            self.shapes.append((lib.ROWS_T, -(-2 * inner // PANEL) * PANEL))
            outs.append(len(self.shapes) - 1)
        self._emit(NativeOp(lib.LINEAR, {0: value}, outs, weights, (epilogue, 1), (eps, 0.0)))
        if targets:
            self._adapt(value, outs[::-1], weights, eps, targets, epilogue)
        self.done |= {gate.index, up.index, act.index}

    def _targets(self, records: Sequence[OpRecord]) -> list[int]:
        """Numbers of what adapters may change, or NONE, of linears; empty where there is nothing."""
        found = [dict(record.operands).get("adapters") if record.op == "linear" else None for record in records]
        if not self.adapters or not any(isinstance(each, Adapters) for each in found):
            return []
        return [self._target(each.projection) if isinstance(each, Adapters) else lib.NONE for each in found]

    def _target(self, projection: str) -> int:
        self.targets.append(projection)
        return len(self.targets) - 1

    def _adapt(
        self,
        x: int,
        outs: Sequence[int],
        weights: dict[int, WeightSpec],
        eps: float,
        targets: Sequence[int],
        epilogue: int = lib.EPI_STORE,
    ) -> None:
        """What adapters add to a product's outputs; of a pair: to its sums, of which its output is made."""
        norm = {8: weights[8]} if 8 in weights else {}
        numbers = (*targets, *[lib.NONE] * (_TARGETS - len(targets)), epilogue)
        self._emit(NativeOp(lib.LORA, {0: x, **dict(enumerate(outs, 1))}, [], norm, numbers, (eps,)))

    def _product(self, x: int, records: Sequence[OpRecord], kind: str, soft_cap: float = 0.0) -> None:
        value, weights, eps = self._operands(x)
        for at, record in enumerate(records):
            weights[at] = MatrixSpec(self._weight(record, "weight"), kind)
            if record.op == "linear":
                weights |= self._bias(record, 4 + at)
        outs = [self._new(record.outputs[0]) for record in records]
        self._emit(NativeOp(lib.LINEAR, {0: value}, outs, weights, (lib.EPI_STORE, len(records)), (eps, soft_cap)))
        targets = self._targets(records)
        for first in range(0, len(targets), _TARGETS):
            some = slice(first, first + _TARGETS)
            self._adapt(value, outs[some], weights, eps, targets[some])
        self.done |= {record.index for record in records}

    def _logits(self, record: OpRecord) -> None:
        kind = self.format_of(self._weight(record, "weight"), "head")
        self._product(self._input(record, "x") or 0, [record], kind, float(self._constant(record, "soft_cap")))

    def _gated_activation(self, record: OpRecord) -> None:
        gate, up = (self._plain(self._input(record, name) or 0) for name in ("gate", "up"))
        kind = EPILOGUES[self._constant(record, "kind")]
        self._emit(NativeOp(lib.GATED, {0: gate, 1: up}, [self._new(record.outputs[0])], i=(kind,)))

    def _moe(self, record: OpRecord) -> None:
        x, given = self._input(record, "x") or 0, dict(record.operands)
        router, gates, ups, downs = (given[name] for name in ("router", "gate", "up", "down"))
        if not (isinstance(router, Weight) and all(isinstance(w, Weights) for w in (gates, ups, downs))):
            raise self._refuse(record, "takes its experts in an unexpected way")
        names = list(zip(gates.names, ups.names, strict=True))  # type: ignore[union-attr]
        kind = self.format_of(names[0][0], "linear")
        value, weights, eps = self._operands(x)
        self.shapes.append((lib.ROWS_T, len(names)))
        scores = len(self.shapes) - 1
        table = MatrixSpec(router.name, self.format_of(router.name, "router"))
        self._emit(NativeOp(lib.LINEAR, {0: value}, [scores], {0: table, **weights}, (lib.EPI_STORE, 1), (eps, 0.0)))
        experts = [MatrixSpec(gate, kind, up) for gate, up in names] + [MatrixSpec(n, kind) for n in downs.names]  # type: ignore[union-attr]
        top_k, normalize = self._constant(record, "top_k"), self._constant(record, "normalize")
        numbers = (0, len(names), top_k, int(normalize), EPILOGUES[self._constant(record, "kind")])
        out = self._new(record.outputs[0])
        self._emit(NativeOp(lib.MOE, {0: value, 2: scores}, [out], weights, numbers, (eps,), tuple(experts)))

    # ---- positions and pages

    def _qk_norm(self, record: OpRecord) -> None:
        x, y = self._input(record, "x") or 0, record.outputs[0]
        if [user.op for user in self.uses[y]] != ["rope"] or self.uses[x] != [record]:
            raise self._refuse(record, "is only run right before rope")
        weight = VectorSpec(self._weight(record, "weight"))
        self.norms[y] = _Normed(self._plain(x), weight, float(self._constant(record, "eps")))

    def _rope(self, record: OpRecord) -> None:
        q, k = record.outputs
        if [u.op for u in self.uses[k]] != ["write_kv"] or any(u.op != "attention" for u in self.uses[q]):
            raise self._refuse(record, "is only run between projections and pages")

    def _write_kv(self, record: OpRecord) -> None:
        rope = self.maker[self._input(record, "k") or 0]
        if rope.op != "rope":
            raise self._refuse(record, "is only run right after rope")
        weights: dict[int, WeightSpec] = {}
        inputs, eps = {}, 0.0
        for at, name in enumerate("qk"):
            captured = self._input(rope, name) or 0
            normed = self.norms.get(captured)
            if normed is not None:
                inputs[at], weights[at], eps = normed.value, normed.weight, normed.eps
            else:
                inputs[at] = self._plain(captured)
                if self.uses[captured] != [rope]:
                    raise self._refuse(rope, "turns its input in place, which something else reads")
        inputs[2] = self._plain(self._input(record, "v") or 0)
        table = self._constant(rope, "rope")
        if table not in self.ropes:
            self.ropes.append(table)
        layer = self._constant(record, "layer")
        self.layers.add(layer)
        numbers = (self.ropes.index(table), layer, self._constant(rope, "head_dim"))
        self._emit(NativeOp(lib.ROPE_KV, inputs, [], weights, numbers, (eps,)))
        self.values[rope.outputs[0]], self.values[rope.outputs[1]] = inputs[0], inputs[1]

    def _attention(self, record: OpRecord) -> None:
        q = self._input(record, "q") or 0
        if q not in self.values:
            raise self._refuse(record, "is only run on rotated queries whose keys were written")
        sinks = self._weight(record, "sinks")
        numbers = (0, *(self._constant(record, name) for name in ("layer", "head_dim", "window")), *self._kept(record))
        floats = (float(self._constant(record, "scale")), float(self._constant(record, "soft_cap")))
        weights: dict[int, WeightSpec] = {0: VectorSpec(sinks)} if sinks else {}
        self._emit(
            NativeOp(lib.ATTENTION, {0: self.values[q]}, [self._new(record.outputs[0])], weights, numbers, floats)
        )

    def _kept(self, record: OpRecord) -> tuple[int, ...]:
        """Sink tokens and their rope table, if a window leaves any in sight."""
        sink_tokens, rope = self._constant(record, "sink_tokens"), self._constant(record, "rope")
        if not sink_tokens:
            return ()
        check_sinks(sink_tokens, self._constant(record, "window"), rope, ())
        if not 0 < sink_tokens <= lib.most_sink_tokens():
            raise self._refuse(record, "finds no sink tokens in this library: build it again")
        return sink_tokens, self.ropes.index(rope)


def _can_add(op: NativeOp) -> bool:
    if 1 in op.inputs:
        return False
    return op.code in (lib.NORM, lib.MOE) or (op.code == lib.LINEAR and op.i == (lib.EPI_STORE, 1) and not op.f[1])
