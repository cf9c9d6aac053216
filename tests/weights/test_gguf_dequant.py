"""Every GGUF type decodes to the bits that the format's own package decodes to."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.weights import gguf_dequant
from octavo.weights.gguf_dequant import GGUF_TYPES, dequantize

FLOATING = [code for code, kind in GGUF_TYPES.items() if kind.name[0] != "I" and kind.name != "F64"]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal bit for bit; a NaN equals a NaN (which one is left open by IEEE arithmetic)."""
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return bool(np.all((ours.view(np.uint32) == theirs.view(np.uint32)) | both_nan))


def expected(raw: np.ndarray, code: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return oracle(raw.reshape(1, -1), GGMLQuantizationType(code)).reshape(-1)


@pytest.mark.parametrize("code", FLOATING, ids=lambda code: GGUF_TYPES[code].name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 9))
def test_random_blocks_decode_to_the_oracles_bits(code: int, seed: int, blocks: int) -> None:
    size = GGUF_TYPES[code].size * blocks
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert same_bits(dequantize(raw, GGUF_TYPES[code]), expected(raw, code))


@pytest.mark.parametrize("code", FLOATING, ids=lambda code: GGUF_TYPES[code].name)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_constant_blocks_decode_to_the_oracles_bits(code: int, byte: int) -> None:
    raw = np.full(GGUF_TYPES[code].size * 3, byte, np.uint8)
    assert same_bits(dequantize(raw, GGUF_TYPES[code]), expected(raw, code))


def test_every_type_of_the_issue_is_covered() -> None:
    wanted = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert wanted == {GGUF_TYPES[code].name for code in FLOATING}


def test_chunks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(3).integers(0, 256, 34 * 11, dtype=np.uint8)
    whole = dequantize(raw, GGUF_TYPES[8])
    monkeypatch.setattr(gguf_dequant, "_CHUNK_VALUES", 96)
    assert same_bits(dequantize(raw, GGUF_TYPES[8]), whole)


def test_integers_and_doubles_become_float32() -> None:
    for code, dtype in ((24, "i1"), (25, "<i2"), (26, "<i4"), (27, "<i8"), (28, "<f8")):
        stored = np.array([-3, 0, 100], dtype)
        assert dequantize(stored.view(np.uint8), GGUF_TYPES[code]).tolist() == [-3.0, 0.0, 100.0]
