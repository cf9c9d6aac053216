"""Checkpoints of others: every layout against plain loops, bit by bit, and every inconsistency refused by name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_checkpoints import (
    MODULE,
    Matrix,
    awq_tensors,
    compressed_config,
    gptq_tensors,
    packed_tensors,
    random_matrix,
    write_folder,
)

from octavo.core.errors import InvalidInput
from octavo.weights.names import open_weights
from octavo.weights.quant.folder import QuantizedFolder
from octavo.weights.quant.gguf_codes import gguf_codes
from octavo.weights.quant.integer import pack_words, unpack_words
from octavo.weights.safetensors import write_safetensors
from octavo.weights.tensors import CorruptFile, TensorInfo

NAME = f"{MODULE}.weight"
quick = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@contextmanager
def opened(tensors: dict[str, Any], config: dict[str, Any]) -> Iterator[QuantizedFolder]:
    folder = Path(tempfile.mkdtemp())
    try:
        with open_weights(write_folder(folder, tensors, config)) as source:
            assert isinstance(source, QuantizedFolder)
            yield source
    finally:
        shutil.rmtree(folder)


def check(source: QuantizedFolder, m: Matrix, *, lossless: bool) -> None:
    """Values exactly as defined; codes for packing where it has such, of the same values."""
    expected = np.array(m.values(), np.float32)
    assert source.names() == [NAME] and source.info(NAME).shape == m.shape
    np.testing.assert_array_equal(source.read(NAME), expected)
    codes = source.codes(NAME)
    assert (codes is not None) == lossless
    if codes is not None:
        assert codes.group_size * codes.scales.shape[1] == m.shape[1]
        np.testing.assert_array_equal(codes.dequantize(), expected)


def gptq_config(m: Matrix, size: int, form: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": m.bits, "group_size": size, "desc_act": True, "checkpoint_format": form}


def lossless_zeros(m: Matrix, symmetric: bool) -> Matrix:
    """The matrix with the one zero that symmetric codes have."""
    middle = [[1 << (m.bits - 1)] * len(row) for row in m.zeros]
    return Matrix(m.bits, m.codes, middle if symmetric else m.zeros, m.scales, m.groups)


@quick
@given(seeds, st.sampled_from([4, 8]), st.sampled_from(["gptq", "gptq_v2"]), st.booleans(), st.booleans())
def test_gptq(seed: int, bits: int, form: str, symmetric: bool, shuffled: bool) -> None:
    m = lossless_zeros(random_matrix(seed, bits, 16, 32, 8, shuffled=shuffled), symmetric)
    tensors = gptq_tensors(m, shift=1 if form == "gptq" else 0, with_index=shuffled)
    with opened(tensors, gptq_config(m, 8, form)) as source:
        check(source, m, lossless=(symmetric or bits == 4) and not shuffled)


def test_gptq_one_group_and_a_first_version_zero_of_nothing() -> None:
    m = random_matrix(1, 4, 8, 16, 16)
    m = Matrix(4, m.codes, [[0]] * 8, m.scales, m.groups)  # stored as 15
    with opened(gptq_tensors(m, shift=1, with_index=False), gptq_config(m, -1, "gptq")) as source:
        check(source, m, lossless=True)


@quick
@given(seeds, st.booleans())
def test_awq(seed: int, symmetric: bool) -> None:
    m = lossless_zeros(random_matrix(seed, 4, 16, 32, 16), symmetric)
    with opened(awq_tensors(m), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}) as source:
        check(source, m, lossless=True)


@quick
@given(seeds, st.sampled_from([4, 8]), st.booleans(), st.booleans(), st.sampled_from([3, 8, 13]))
def test_packed(seed: int, bits: int, symmetric: bool, shuffled: bool, rows: int) -> None:
    m = lossless_zeros(random_matrix(seed, bits, rows, 24, 6, shuffled=shuffled), symmetric)
    config = compressed_config("pack-quantized", num_bits=bits, symmetric=symmetric, strategy="group", group_size=6)
    with opened(packed_tensors(m, symmetric=symmetric, with_index=shuffled), config) as source:
        check(source, m, lossless=(symmetric or bits == 4) and not shuffled)


@quick
@given(seeds, st.sampled_from([(), (1,), (5,), (5, 1)]), st.booleans())
def test_plain_int8(seed: int, scale_shape: tuple[int, ...], symmetric: bool) -> None:
    rng = np.random.RandomState(seed)
    codes = rng.randint(-128, 128, (5, 7)).astype(np.int8)
    scales = rng.uniform(0.1, 2, scale_shape).astype(np.float32)
    zeros = np.zeros(scale_shape, np.int8) if symmetric else rng.randint(-128, 128, scale_shape).astype(np.int8)
    strategy = "channel" if scales.size == 5 else "tensor"
    config = compressed_config("int-quantized", num_bits=8, symmetric=symmetric, strategy=strategy)
    tensors = {"weight": codes, "weight_scale": scales} | ({} if symmetric else {"weight_zero_point": zeros})
    rows = [(scales.ravel()[n % scales.size], zeros.ravel()[n % scales.size]) for n in range(5)]
    expected = [[np.float32(s) * np.float32(int(c) - int(z)) for c in codes[n]] for n, (s, z) in enumerate(rows)]
    with opened(tensors, config) as source:
        np.testing.assert_array_equal(source.read(NAME), np.array(expected, np.float32))
        held = source.codes(NAME)
        assert (held is not None) == bool((zeros == 0).all())
        if held is not None:
            np.testing.assert_array_equal(held.codes, codes)


# code -> value, by hand: sign, 4 bits of exponent less 7, 3 of fraction
FP8 = {
    0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x40: 2.0, 0x7E: 448.0,
    0xC4: -3.0,
}  # fmt: skip


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_fp8_in_blocks(method: str, tmp_path: Path) -> None:
    codes = np.resize(np.array(list(FP8), np.uint8), (5, 6))
    scales = np.arange(1, 7, dtype=np.float32).reshape(3, 2) / 4  # blocks of 2 rows, 4 columns; the last are cut
    name = "weight_scale" if method == "compressed-tensors" else "weight_scale_inv"
    write_folder(tmp_path, {"weight": codes, name: scales}, {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"F8_E4M3"', 1))
    _repair_header(path)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [2, 4]}
    fp8 = {"quant_method": "fp8", "weight_block_size": [2, 4]}
    config = compressed_config("float-quantized", **weights) if method == "compressed-tensors" else fp8
    (tmp_path / "config.json").write_text(_config_text(config))
    expected = [[FP8[int(code)] * float(scales[n // 2, k // 4]) for k, code in enumerate(row)] for n, row in enumerate(codes)]  # fmt: skip  # noqa: E501
    with open_weights(tmp_path) as source:
        np.testing.assert_array_equal(source.read(NAME), np.array(expected, np.float32))
        assert source.codes(NAME) is None


def _repair_header(path: Path) -> None:
    """The header grew: give it its new length."""
    raw = path.read_bytes()
    end = raw.rindex(b"}}", 0, 600) + 2
    header = raw[8:end]
    header += b" " * (-len(header) % 8)
    data = raw[-(30 + 24) :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _config_text(quantization: dict[str, Any]) -> str:
    import json

    return json.dumps({"model_type": "llama", "quantization_config": quantization})


@quick
@given(seeds, st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]))
def test_gguf_blocks_are_groups(seed: int, kind: str) -> None:
    from octavo.weights.gguf_dequant import GGUF_TYPES, dequantize

    stored = next(t for t in GGUF_TYPES.values() if t.name == kind)
    rng = np.random.RandomState(seed)
    blocks = rng.randint(0, 256, (6, stored.size)).astype(np.uint8)
    tables = stored.size % 16  # bytes of halves before the codes
    blocks[:, :tables] = rng.uniform(-2, 2, (6, tables // 2)).astype("<f2").view(np.uint8)
    raw = blocks.reshape(-1)
    found = gguf_codes(raw, TensorInfo("x", (3, 64), kind))
    assert found is not None and found.group_size == 32
    np.testing.assert_array_equal(found.dequantize(), dequantize(raw, stored).reshape(3, 64))


@quick
@given(seeds, st.sampled_from([4, 8]), st.integers(1, 20))
def test_words_hold_codes(seed: int, bits: int, columns: int) -> None:
    codes = np.random.RandomState(seed).randint(0, 1 << bits, (3, columns)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_words(pack_words(codes, bits), bits)[:, :columns], codes)


# ---- refusals


def _good() -> tuple[dict[str, Any], dict[str, Any]]:
    m = random_matrix(3, 4, 16, 32, 8)
    return gptq_tensors(m, shift=1, with_index=True), gptq_config(m, 8, "gptq")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qzeros", lambda t: t[:, :-1]),
        ("qzeros", lambda t: t[:-1]),
        ("scales", lambda t: t[:, :-1]),
        ("scales", lambda t: t.astype(np.int32)),
        ("qweight", lambda t: t[:3]),
        ("qweight", lambda t: t[:, :9]),
        ("qweight", lambda t: t.astype(np.float32)),
        ("g_idx", lambda t: t[:-1]),
        ("g_idx", lambda t: t + 1),
        ("g_idx", lambda t: t - 1),
        ("qzeros", None),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, change: Any) -> None:
    tensors, config = _good()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    with pytest.raises(CorruptFile, match=MODULE), opened(tensors, config) as source:
        source.read(NAME)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_shape", np.array([8, 1 << 40], np.int64)),
        ("weight_shape", np.array([-8, 24], np.int64)),
        ("weight_shape", np.array([8, 0], np.int64)),
        ("weight_packed", np.zeros((8, 2), np.int32)),
        ("weight_scale", np.zeros((8, 3), np.float16)),
        ("weight_scale", np.zeros((7, 4), np.float16)),
        ("weight_zero_point", np.zeros((2, 4), np.int32)),
    ],
)
def test_packed_shapes_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    tensors = packed_tensors(random_matrix(5, 4, 8, 24, 6), symmetric=False) | {name: value}
    config = compressed_config("pack-quantized", num_bits=4, symmetric=False, group_size=6)
    with pytest.raises(CorruptFile, match=f"{MODULE}.weight"), opened(tensors, config):
        pass


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bits": 3}, "bits"),
        ({"bits": True}, "bits"),
        ({"group_size": -2}, "group_size"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"dynamic": {"-:lm_head": {}}}, "dynamic"),
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "awq", "version": "gemv"}, "version"),
        ({"quant_method": "awq", "bits": 8}, "bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({**compressed_config("pack-quantized", num_bits=2)}, "config_groups.group_0.weights.num_bits"),
        ({**compressed_config("pack-quantized", num_bits=4, strategy="x")}, "config_groups.group_0.weights.strategy"),
        ({**compressed_config("pack-quantized", num_bits=4), "sparsity_config": {"format": "2:4"}}, "sparsity_config"),
    ],
)
def test_settings_that_are_not_supported_are_named(change: dict[str, Any], field: str) -> None:
    tensors, config = _good()
    with pytest.raises(InvalidInput, match=f"quantization_config.{field}"), opened(tensors, config | change):
        pass


def test_codes_without_scales_are_refused() -> None:
    _, config = _good()
    with pytest.raises(CorruptFile, match="no scales"), opened({"qw": np.zeros((2, 2), np.int32)}, config):
        pass


def test_a_folder_that_is_not_quantized_has_no_codes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(tmp_path / "model.safetensors", {"x": np.ones((2, 3), np.float16)})
    with open_weights(tmp_path) as source:
        assert source.codes("x") is None and source.stored_bytes("x") == 12
