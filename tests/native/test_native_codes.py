"""Stored codes: in panels as they are where the format keeps them, else the bytes of packing their values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_harness import Loaded
from native_harness import run
from small_models import LLAMA, MOE, texts, write_model

from octavo.backends.native_backend import NativeBackend, NativeEngine
from octavo.backends.native_codes import CodeArrays, keeps_codes
from octavo.backends.native_program import StepLimits
from octavo.backends.native_records import MatrixSpec
from octavo.backends.operand_types import OPERANDS
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.names import open_weights
from octavo.weights.quant.integer import GroupCodes
from octavo.weights.quant.job import Plan, QuantizeJob
from octavo.weights.quant.targets import find_target
from octavo.weights.store import ModelStore

QUICK = settings(max_examples=25, deadline=None)
KINDS = tuple(OPERANDS)


def random_codes(seed: int, bits: int, group: int, rows: int, columns: int, half: bool) -> GroupCodes:
    rng = np.random.RandomState(seed)
    shape = (rows, -(-columns // group))
    codes = rng.randint(0, 16, (rows, columns)) if bits == 4 else rng.randint(-128, 128, (rows, columns))
    scales, offsets = rng.uniform(0.01, 2, shape), rng.uniform(-9, 9, shape) * (bits == 4)
    kind = np.float16 if half else np.float32
    tables = (part.astype(kind).astype(np.float32) for part in (scales, offsets))
    return GroupCodes(bits, min(group, columns), codes.astype(np.uint8 if bits == 4 else np.int8), *tables)


def as_packed(kind: str, stored: GroupCodes) -> Any:
    """The values, with offsets as groups hold them."""
    held = stored.offsets.astype(np.float16).astype(np.float32) if OPERANDS[kind].group else stored.offsets
    return replace(stored, offsets=held).dequantize()


def packed(engine: NativeEngine, spec: MatrixSpec, halves: dict[str, GroupCodes], as_codes: bool) -> Any:
    """All rows of a matrix, or of both halves of a pair, as the kernels see them."""
    read = lambda name: halves[name].dequantize()  # noqa: E731
    weight = engine.add(spec, read, halves.get if as_codes else None)
    rows, columns = halves[spec.name].codes.shape
    return np.stack([engine.row(weight, row, columns) for row in range(rows * len(halves))])


def bf16(values: Any) -> Any:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@QUICK
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(KINDS),
    st.sampled_from([(4, 32), (4, 64), (4, 128), (4, 1000), (8, 32), (8, 64), (8, 128), (8, 1000), (4, 48)]),
    st.tuples(st.integers(1, 80), st.integers(1, 40).map(lambda n: 8 * n)),
    st.booleans(),
    st.booleans(),
)
def test_codes(seed: int, kind: str, stored: tuple[int, int], shape: tuple[int, int], half: bool, pair: bool) -> None:
    names = ("gate", "up") if pair else ("gate",)
    halves = {name: random_codes(seed + i, *stored, *shape, half) for i, name in enumerate(names)}
    spec, engine = MatrixSpec("gate", kind, "up" if pair else ""), NativeEngine("", 2)
    found = packed(engine, spec, halves, as_codes=True)
    if all(keeps_codes(kind, each) for each in halves.values()):
        expected = np.concatenate([as_packed(kind, each) for each in halves.values()])
        np.testing.assert_array_equal(found, bf16(expected) if kind.startswith("w4a16") else expected)
    else:
        np.testing.assert_array_equal(found, packed(engine, spec, halves, as_codes=False))


@pytest.mark.parametrize(
    ("kind", "bits", "group", "half", "keeps"),
    [
        *[("w4g32", 4, size, True, size % 32 == 0) for size in (16, 32, 48, 64, 128)],
        *[("w4a16g64", 4, size, True, size % 64 == 0) for size in (32, 64, 128)],
        *[("w8g64", 8, size, True, size % 64 == 0) for size in (32, 64, 128)],
        *[("w8pc", 8, size, half, size == 256) for size in (64, 256) for half in (True, False)],
        *[(kind, 4, 256, half, half) for kind in ("w4g32", "w4g128") for half in (True, False)],
        *[("w8g64", 8, 256, False, False), ("w8g64", 4, 64, True, False), ("bf16", 8, 64, True, False)],
    ],
)
def test_which_formats_keep_which_codes(kind: str, bits: int, group: int, half: bool, keeps: bool) -> None:
    assert keeps_codes(kind, random_codes(5, bits, group, 3, 256, half)) == keeps


def test_scales_beyond_float16_are_not_kept() -> None:
    codes = random_codes(5, 4, 32, 2, 64, True)
    assert keeps_codes("w4g32", codes)
    codes.scales[1, 1] = np.inf
    assert not keeps_codes("w4g32", codes)
    codes.scales[1, 1], codes.offsets[1, 1] = 1, 70000
    assert not keeps_codes("w4g32", codes)


@pytest.mark.parametrize(
    ("kind", "group"), [("w4g32", -1), ("w4g32", 65), ("w4g32", 1 << 62), ("bf16", 0), ("fp32", 0)]
)
def test_groups_that_the_library_cannot_have_are_refused(kind: str, group: int) -> None:
    codes, tables = np.zeros((2, 64), np.int8), np.zeros((2, 64), np.float32)
    with pytest.raises(InvalidInput):
        NativeEngine("", 1)._add_codes(MatrixSpec("a", kind), CodeArrays(codes, tables, tables, group))


# ---- checkpoints


def compiled(source: Any, kind: str, kv_dtype: str = "fp32") -> Loaded:
    backend = NativeBackend("", 2)
    model = backend.compile(build_model(ModelConfig.from_dict(source.config)), format=kind, kv_dtype=kv_dtype)
    model.limits = StepLimits(max_tokens=512)
    model.load(lambda name: model.prepare(name, source.read(name)), source.codes)
    return Loaded(backend, model, {})


def check_rows(loaded: Loaded, source: Any, rows: int, near: bool = False, every: int = 1) -> int:
    """Rows of 4 bits in each `every`-th layer are the source's, exactly or to 1/128 of a step; of how many matrices."""
    seen = 0
    for spec in loaded.model.lowered.weights():
        if not isinstance(spec, MatrixSpec) or OPERANDS[spec.format].code_bits != 4:
            continue
        if int(spec.name.split(".")[2]) % every:
            continue
        for name in filter(None, (spec.name, spec.up)):
            values = source.read(name)
            stored = source.codes(name)
            assert keeps_codes(spec.format, stored)
            step = np.abs(stored.scales).max() if near else 0
            for row in {*range(0, len(values), max(1, len(values) // rows)), len(values) - 1}:
                assert np.abs(loaded.model.packed_row(name, row) - values[row]).max() <= step / 128, name
            seen += 1
    return seen


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "moe"])
def test_a_quantized_folder_runs_on_its_own_codes(tmp_path: Path, config: dict[str, Any]) -> None:
    with open_weights(write_model(tmp_path / "source", config)) as source:
        QuantizeJob(source, Plan(find_target("w4g32"), "rtn"), tmp_path / "w4").run(texts(1, 1, 32))
    with open_weights(tmp_path / "w4") as source:
        assert check_rows(compiled(source, "w4g32"), source, rows=100, near=True) == 2 * (
            7 if config is LLAMA else 4 + 4 * 3
        )


@pytest.mark.weights
def test_smollm2_runs_on_its_own_codes() -> None:
    with open_weights(ModelStore().resolve("smollm2-135m-instruct").path) as source:
        assert check_rows(compiled(source, "w4g32"), source, rows=5, every=6) == 5 * 7
        ids = np.random.RandomState(3).randint(0, 49152, (1, 24)).tolist()
        exact, close = (run(compiled(source, kind), ids, [[24]])[0] for kind in ("fp32", "w4a16g32"))
    error = np.abs(close - exact).max(axis=1) / np.abs(exact).max(axis=1)
    assert error.max() < 0.03 and divergence(exact, close) < 0.001


def divergence(exact: Any, close: Any) -> float:
    """KL of the next token in nats, the mean over rows."""
    p, q = (x - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True) for x in (exact, close))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())
