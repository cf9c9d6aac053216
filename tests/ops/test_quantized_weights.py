"""int8 and int4: round trip within half a scale, exact zeros, extremes, packing, refusals, products."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend
from octavo.backends.quantization import FLOAT32_MAX, QuantConfig, QuantizedTensor, dequantize, quantize, report
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

CONFIGS = [QuantConfig(bits, size, symmetric) for bits in (8, 4) for size in (16, 64) for symmetric in (True, False)]
values = st.floats(-FLOAT32_MAX, FLOAT32_MAX, allow_nan=False, width=32) | st.floats(-3, 3, width=32)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=3)))
def test_round_trip_within_half_a_scale(weights: list[list[float]]) -> None:
    for config in CONFIGS:
        tensor = quantize(weights, config)
        for index, (row, back) in enumerate(zip(weights, dequantize(tensor), strict=True)):
            for column, (a, b) in enumerate(zip(row, back, strict=True)):
                scale = tensor.scales[index][column // config.group_size]
                assert abs(a - b) <= scale / 2 * (1 + 1e-9), config
                assert a != 0.0 or b == 0.0, config


def test_a_balanced_range_stays_within_half_a_scale() -> None:
    """Both ends fall between two codes: a scale that was rounded down would be overstepped."""
    rng = random.Random(5)
    for config in CONFIGS:
        for value in (rng.uniform(0.1, 9.0) for _ in range(30)):
            tensor = quantize([[value, -value]], config)
            for a, b in zip((value, -value), tensor.row(0), strict=True):
                assert abs(a - b) <= tensor.scales[0][0] / 2 * (1 + 1e-9)


@pytest.mark.parametrize("config", CONFIGS)
def test_constants_zeros_and_extremes(config: QuantConfig) -> None:
    assert dequantize(quantize([[0.0] * 20], config)) == [[0.0] * 20]
    for constant in (1.0, -1.0, 3.25, 1e-30, 1e-45, FLOAT32_MAX, -FLOAT32_MAX):
        (row,) = dequantize(quantize([[constant] * 20], config))
        assert row == pytest.approx([constant] * 20, rel=1e-6, abs=1e-45)
    (row,) = dequantize(quantize([[FLOAT32_MAX, -FLOAT32_MAX, 0.0]], config))
    assert row[0] > 0.9 * FLOAT32_MAX and row[1] < -0.9 * FLOAT32_MAX and row[2] == 0.0


def test_int4_is_packed_two_to_a_byte_and_bytes_are_what_is_held() -> None:
    weights = matrix(random.Random(1), 6, 33)
    small, large = quantize(weights, QuantConfig(4, 32, False)), quantize(weights, QuantConfig(8, 32, True))
    assert [len(row) for row in small.codes] == [17] * 6
    assert small.num_bytes == 6 * (17 + 2 * 4 + 2)
    assert large.num_bytes == 6 * (33 + 2 * 4)


def test_report_measures_error_and_bytes() -> None:
    weights = matrix(random.Random(2), 8, 64)
    reports = {bits: report(weights, quantize(weights, QuantConfig(bits, 32))) for bits in (8, 4)}
    assert 0 < reports[8]["mean_error"] < reports[8]["max_error"] <= reports[8]["max_scale"] / 2 * 1.000001
    assert reports[4]["mean_error"] > 5 * reports[8]["mean_error"]
    assert reports[8]["bytes_before"] == 8 * 64 * 4
    assert reports[4]["ratio"] == pytest.approx((32 + 8) / 256)
    assert json.loads(json.dumps(reports[4]))["group_size"] == 32


@pytest.mark.parametrize("config", CONFIGS)
def test_json_round_trip_and_metadata(config: QuantConfig) -> None:
    tensor = quantize(matrix(random.Random(3), 3, 37), config)
    value = json.loads(json.dumps(tensor.to_dict()))
    assert QuantizedTensor.from_dict(value) == tensor
    size, row = config.group_size, tensor.row(1)
    zeros = value["zero_points"][1] or [1 << (config.bits - 1)] * len(value["scales"][1])
    codes = tensor.codes[1] if config.bits == 8 else [c for byte in tensor.codes[1] for c in (byte & 15, byte >> 4)]
    assert row == [value["scales"][1][i // size] * (codes[i] - zeros[i // size]) for i in range(37)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", BACKENDS)
def test_products_equal_those_of_the_dequantized_matrix(name: str, config: QuantConfig) -> None:
    rng = random.Random(4)
    tensor, x = quantize(matrix(rng, 300, 40), config), matrix(rng, 3, 40)
    backend = create_backend(name)
    got = backend.to_lists(backend.linear(backend.weight("x", x), backend.weight("w", tensor)))
    plain = backend.to_lists(backend.linear(backend.weight("x", x), backend.weight("w", dequantize(tensor))))
    for a, b in zip(got, plain, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 5, 16, -8, 8.0, True, "8", None])
def test_unsupported_bits_are_refused(bits: object) -> None:
    with pytest.raises(InvalidInput, match=r"bits = .*supported: 8 and 4"):
        QuantConfig(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 8, 17, 256, -32, 32.0, None])
def test_unsupported_group_sizes_are_refused(size: object) -> None:
    with pytest.raises(InvalidInput, match=r"group_size = .*supported: 16, 32, 64, 128"):
        QuantConfig(8, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [[], [[]], [[1.0, 2.0], [1.0]], [[float("nan")]], [[float("inf")]], [[1e39]]])
def test_matrices_that_cannot_be_quantized_are_refused(weights: list[list[float]]) -> None:
    with pytest.raises(InvalidInput, match="matrix"):
        quantize(weights, QuantConfig())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_tiny_model_runs_quantized_near_the_exact_one(bits: int) -> None:
    fixture = json.loads((Path(__file__).parents[2] / "fixtures" / "tiny_model.json").read_text())
    model = build_model(ModelConfig.from_dict(fixture["model"]))
    stored = fixture["weights"]
    exact = {n: unflatten(t["units"], t["shape"], stored["unit"]) for n, t in stored["tensors"].items()}
    quantized = {
        n: quantize(w, QuantConfig(bits, 16, False)) if isinstance(w[0], list) else w for n, w in exact.items()
    }
    logits = [run(model, name, weights) for weights in (exact, quantized) for name in BACKENDS]
    errors = [max(map(abs, np.subtract(logits[0], other).ravel().tolist())) for other in logits]
    assert errors[1] < 1e-5 and abs(errors[2] - errors[3]) < 1e-5
    spread = float(np.ptp(logits[0]))
    assert 0.0 < errors[2] / spread < {8: 0.03, 4: 0.2}[bits]


def unflatten(units: list[int], shape: list[int], unit: float) -> list[Any]:
    values = [u * unit for u in units]
    return values if len(shape) == 1 else [values[i : i + shape[1]] for i in range(0, len(values), shape[1])]


def run(model: Any, name: str, weights: dict[str, Any]) -> list[list[float]]:
    """Logits of a six-token prompt."""
    backend = create_backend(name)
    handles = {n: backend.weight(n, w) for n, w in weights.items()}
    pool = backend.allocate_kv(2, 4, model.kv_groups())
    batch = backend.batch([1, 5, 9, 30, 7, 44], range(6), [6], [[[0, 1]]], pool, logit_rows=range(6))
    result: list[list[float]] = backend.to_lists(model.forward(backend, handles, batch))
    return result
