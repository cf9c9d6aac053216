"""What `operand_types` says of each format, held against the library: packed bytes, and what is really multiplied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_harness import ISAS

from octavo.backends.native_backend import NativeBackend, NativeEngine, NativeModel
from octavo.backends.native_formats import FormatPlan
from octavo.backends.native_lib import FORMATS
from octavo.backends.operand_types import OPERANDS, packed_bytes
from octavo.core.kv_groups import make_kv_groups

ROWS, INPUTS, OUTPUTS = 5, 200, 48


def test_every_format_is_described() -> None:
    assert set(OPERANDS) == set(FORMATS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ISAS), st.sampled_from(sorted(FORMATS)), st.integers(1, 700), st.integers(1, 700), st.booleans())
def test_packed_bytes(isa: str, kind: str, outputs: int, inputs: int, pair: bool) -> None:
    whole = (2 * outputs if pair else outputs, inputs)
    assert packed_bytes(whole, kind) == NativeEngine(isa, 1).matrix_bytes((outputs, inputs), kind, pair)


class OneProduct:
    """A model that is a table of inputs and one matrix."""

    config = SimpleNamespace(vocab_size=OUTPUTS)

    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        return {"inputs": (OUTPUTS, INPUTS), "matrix": (OUTPUTS, INPUTS)}

    def kv_groups(self, dtype: str = "fp32") -> Any:
        return make_kv_groups((0,), 1, 16, 16, dtype)

    def forward(self, ops: Any, w: Any, batch: Any) -> Any:
        return ops.logits(ops.select_rows(ops.embed(batch.token_ids, w["inputs"]), batch), w["matrix"])


def product(isa: str, kind: str, x: Any, matrix: Any) -> tuple[Any, Any]:
    """x times the matrix on the native backend, and the matrix as its kernels see it."""
    backend = NativeBackend(isa, 1)
    model = NativeModel(backend, OneProduct(), FormatPlan(kind, {"inputs": "fp32", "matrix": kind}), "fp32")
    model.load({"inputs": x, "matrix": matrix}.__getitem__)
    kv = backend.allocate_kv(1, 16, model.kv_groups())
    rows = list(range(ROWS))
    batch = backend.batch(rows, rows, [ROWS], [[[0]]], kv, logit_rows=rows)
    found = np.array(model.forward(backend, {}, batch))
    return found, np.stack([model.packed_row("matrix", row) for row in range(OUTPUTS)]).astype(np.float64)


def as_operand(x: Any, kind: str, group: int) -> Any:
    """Activations as the multiplier gets them."""
    if kind == "int8":
        out = np.empty(x.shape)
        for start in range(0, x.shape[1], group or x.shape[1]):
            part = x[:, start : start + (group or x.shape[1])]
            step = np.abs(part).max(axis=1, keepdims=True) / 127.0
            out[:, start : start + part.shape[1]] = np.rint(part / step) * step
        return out
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return (rounded if kind == "bf16" else x).astype(np.float64)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_multiplied(isa: str, kind: str) -> None:
    """The product of these operands and of no others: other activations would be a hundred times as far."""
    rng = np.random.RandomState(11)
    x = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    matrix = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    found, weights = product(isa, kind, x, matrix)
    operands, distance = OPERANDS[kind], {}
    for activations in ("fp32", "bf16", "int8"):
        exact = as_operand(x[:ROWS], activations, operands.group) @ weights.T
        distance[activations] = np.abs(found - exact).max() / np.abs(exact).max()
    own = distance.pop(operands.activations)
    assert own < 3e-5 and min(distance.values()) > 20 * own, (own, distance)
