"""What a step has to read and multiply, counted from the captured program: the other half of every share of a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from octavo.backends import native_lib as lib
from octavo.backends.native_records import MatrixSpec, NativeOp

__all__ = ["PEAK_OF", "attention_cost", "kv_bytes_per_token", "matrix_cost", "op_label", "weight_bytes_per_step"]

_INT8 = ("w8g64", "w8pc", "w4g32", "w4g64", "w4g128")
_WIDE = ("bf16", "w4a16g32", "w4a16g64", "w4a16g128")
# format of weights or of keys and values -> the dot that its products are made of
PEAK_OF = {"fp32": "fp32", "int8": "int8", **dict.fromkeys(_INT8, "int8"), **dict.fromkeys(_WIDE, "bf16")}
_OTHER = {
    lib.EMBED: "embedding", lib.NORM: "norm", lib.LAYER_NORM: "norm", lib.ADD: "add", lib.SCALE: "scale",
    lib.GATED: "gate", lib.SELECT: "select rows", lib.ROPE_KV: "rope, KV write", lib.ATTENTION: "attention",
    lib.MOE: "experts",
}  # fmt: skip


def op_label(op: NativeOp) -> str:
    """What a record is called, the same in every layer: its matrices, or its kind."""
    if op.code != lib.LINEAR:
        return _OTHER[op.code]
    names = [name for spec in matrices(op) for name in (spec.name, spec.up) if name]
    return "+".join(_short(name) for name in names)


def _short(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return "lm_head" if parts[-1] in ("lm_head", "embed_tokens") else parts[-1]


def matrices(op: NativeOp) -> list[MatrixSpec]:
    """The matrices that a product record multiplies by."""
    return [spec for at, spec in sorted(op.weights.items()) if at < 4 and isinstance(spec, MatrixSpec)]


def matrix_cost(model: Any, op: NativeOp, rows: int) -> tuple[int, int]:
    """(bytes of packed weights, operations) of a product record on `rows` rows."""
    specs = matrices(op)
    size = sum(model._spec_bytes(spec) for spec in specs)
    values = sum(math.prod(model.shapes[spec.name]) * (2 if spec.up else 1) for spec in specs)
    return size, 2 * rows * values


def attention_cost(model: Any, pool: Any, op: NativeOp, queries: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(bytes of keys and values, operations) of one attention record for (first position, tokens) of each sequence.

    Each sequence's keys and values are counted as read once, as far as the record's window reaches back.
    """
    window, width = op.i[3] if len(op.i) > 3 else 0, model.lowered.buffers[op.inputs[0]][1]
    per_token = pool_token_bytes(model, pool)
    read = done = 0
    for first, tokens in queries:
        seen = [min(position + 1, window) if window else position + 1 for position in range(first, first + tokens)]
        read += per_token * min(first + tokens, seen[0] + tokens - 1)
        done += 4 * width * sum(seen)
    return read, done


def pool_token_bytes(model: Any, pool: Any) -> int:
    """Bytes of one token's keys and values in one layer, scales included."""
    return int(model.page_bytes(pool.page_size)) // pool.page_size // int(pool.depth)


def kv_bytes_per_token(model: Any, page_size: int) -> int:
    """Bytes of one token's keys and values in all layers that attend."""
    groups = model.kv_groups()
    depth = max(len(group.layers) + group.padded_layers for group in groups)
    layers = sum(len(group.layers) for group in groups)
    return int(model.page_bytes(page_size)) // page_size // depth * layers


def weight_bytes_per_step(model: Any) -> int:
    """Bytes of packed matrices that a step with one token reads: of a mixture its chosen experts only."""
    total = 0.0
    for op in model.lowered.ops:
        if op.code == lib.LINEAR:
            total += matrix_cost(model, op, 1)[0]
        elif op.code == lib.MOE:
            total += sum(model._spec_bytes(spec) for spec in op.extra) * op.i[2] / op.i[1]
    return int(total)
