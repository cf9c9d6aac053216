"""Matrices packed from a file's bytes are those packed from their values, or from codes that a format keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.native_backend import NativeEngine
from octavo.backends.native_codes import PACKED_TYPES, keeps_codes
from octavo.backends.native_lib import library
from octavo.backends.native_records import MatrixSpec
from octavo.backends.operand_types import OPERANDS
from octavo.core.errors import InvalidInput
from octavo.weights.gguf_dequant import GGUF_TYPES, dequantize
from octavo.weights.names import undo_rope_permutation
from octavo.weights.quant.gguf_codes import gguf_codes
from octavo.weights.tensors import FileRows, TensorInfo

QUICK = settings(max_examples=120, deadline=None)
TYPES = sorted(PACKED_TYPES)
ISAS = ("", *library().octavo_isas().decode().split())
_SCALES = {
    2: (0,),
    3: (0, 2),
    6: (0,),
    7: (0, 2),
    8: (0,),
    10: (80, 82),
    11: (108,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
}


def random_rows(seed: int, number: int, rows: int, columns: int, heads: int = 0) -> FileRows:
    """Random bytes whose halves are of the size that scales and weights have."""
    kind, rng = GGUF_TYPES[number], np.random.RandomState(seed)
    count = rows * columns // kind.block
    blocks = rng.randint(0, 256, (count, kind.size)).astype(np.uint8)
    if kind.decode is None:
        values = rng.standard_normal(count).astype(np.float32)
        blocks = (values.view(np.uint16)[1::2].copy() if number == 30 else values.astype(kind.plain)).view(np.uint8)
    for at in _SCALES.get(number, ()):
        blocks[:, at : at + 2] = rng.uniform(-0.1, 0.1, count).astype("<f2")[:, None].view(np.uint8)
    return FileRows((rows, columns), number, blocks.reshape(-1).copy(), heads, mapped=False)


def values_of(stored: FileRows) -> Any:
    values = dequantize(stored.data, GGUF_TYPES[stored.type]).reshape(stored.shape)
    return undo_rope_permutation(values, stored.heads) if stored.heads else values


def codes_of(stored: FileRows) -> Any:
    found = gguf_codes(stored.data, TensorInfo("", stored.shape, GGUF_TYPES[stored.type].name))
    return found.reordered(lambda rows: undo_rope_permutation(rows, stored.heads)) if found and stored.heads else found


def packed(engine: NativeEngine, kind: str, halves: dict[str, FileRows], in_file: bool) -> Any:
    """All rows, from bytes; or from codes that the format keeps, else from values."""
    spec = MatrixSpec("gate", kind, "up" if len(halves) > 1 else "")
    codes = {name: codes_of(half) for name, half in halves.items()}
    kept = all(code is not None and keeps_codes(kind, code) for code in codes.values())
    read = lambda name: values_of(halves[name])  # noqa: E731
    weight = engine.add(spec, read, codes.get if kept else None, halves.get if in_file else None)
    rows, columns = halves["gate"].shape
    return np.stack([engine.row(weight, row, columns) for row in range(rows * len(halves))])


@QUICK
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(TYPES),
    st.sampled_from(tuple(OPERANDS)),
    st.sampled_from(ISAS),
    st.integers(1, 80),
    st.integers(1, 80),
    st.booleans(),
)
def test_bytes_of_a_file(seed: int, number: int, kind: str, isa: str, rows: int, blocks: int, pair: bool) -> None:
    block = GGUF_TYPES[number].block
    columns = 8 * blocks if block == 1 else block * (1 + blocks % (768 // block))
    names = ("gate", "up") if pair else ("gate",)
    halves = {name: random_rows(seed ^ at, number, rows, columns) for at, name in enumerate(names)}
    engine = NativeEngine(isa, 2)
    np.testing.assert_array_equal(packed(engine, kind, halves, True), packed(engine, kind, halves, False))


@QUICK
@given(st.integers(0, 2**32 - 1), st.sampled_from((3, 12, 30)), st.integers(1, 5), st.sampled_from((2, 16, 64, 128)))
def test_rows_of_heads_are_put_back(seed: int, number: int, heads: int, size: int) -> None:
    stored = random_rows(seed, number, heads * size, 256, heads)
    engine = NativeEngine("", 2)
    for kind in ("w4g32", "bf16"):
        found, expected = (packed(engine, kind, {"gate": stored}, in_file) for in_file in (True, False))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_scale_that_float16_does_not_hold(number: int, half: int) -> None:
    """The panels without it are unharmed; in its own panel every other row keeps finite values near its own."""
    stored = random_rows(3, number, 130, 64)
    bad = stored.data.reshape(130, 2, -1)
    bad[5, 0, :2] = np.array([half], "<u2").view(np.uint8)
    engine = NativeEngine("", 1)
    found, codes = packed(engine, "w4g32", {"gate": stored}, True), values_of(stored)
    np.testing.assert_array_equal(found[64:], codes[64:])
    others = [row for row in range(64) if row != 5]
    assert np.abs(found[others] - codes[others]).max() < 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", 9),
        ("type", -1),
        ("heads", 3),
        ("heads", -2),
        ("short", 1),
        ("shape", (4, 48)),
        ("shape", (1 << 40, 32)),
    ],
)
def test_what_cannot_be_is_refused(field: str, value: Any) -> None:
    given_ = {"shape": (8, 64), "type": 3, "data": random_rows(1, 3, 8, 64).data, "heads": 0, "mapped": False}
    if field == "short":
        given_["data"] = given_["data"][:-value]
    else:
        given_[field] = value
    with pytest.raises(InvalidInput):
        NativeEngine("", 1)._add_stored(MatrixSpec("gate", "w8g64"), [FileRows(**given_)])
