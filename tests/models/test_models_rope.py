"""Rotary tables against `transformers`, and what must hold of every table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_harness import DATA

from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.rope import resolve_rope

ROPES: dict[str, Any] = json.loads((DATA / "tiny.json").read_text())["ropes"]


def base_config(rope: dict[str, Any], head_dim: int, context: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": context,
        **rope,
    }


@pytest.mark.parametrize("name", ROPES)
def test_tables_equal_transformers(name: str) -> None:
    """In both spellings of the configuration; frequencies to the last digits of float32."""
    golden = ROPES[name]
    rope = golden["rope_parameters"]
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    for spelling in ({"rope_parameters": rope}, old):
        keys = base_config(spelling, golden["head_dim"], golden["max_position_embeddings"])
        table = resolve_rope(ModelConfig.from_dict(keys).rope, golden["head_dim"])
        np.testing.assert_allclose(table.inv_freq, golden["inv_freq"], rtol=1e-6)
        assert table.rotary_dim == golden["head_dim"]
        assert table.attention_factor == pytest.approx(golden["attention_factor"], rel=1e-12)


ropes = st.builds(
    RopeConfig,
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    theta=st.floats(1.01, 1e15),
    factor=st.floats(1.0, 1e6),
    original_max_position_embeddings=st.integers(1, 1 << 27),
    low_freq_factor=st.floats(0.1, 3.9),
    beta_fast=st.floats(1e-3, 1e6),
    beta_slow=st.floats(1e-3, 1e6),
    mscale=st.floats(0.0, 2.0),
    mscale_all_dim=st.floats(0.0, 2.0),
    truncate=st.booleans(),
)


@given(ropes, st.integers(1, 128))
def test_scaling_only_slows_and_at_most_by_the_factor(rope: RopeConfig, pairs: int) -> None:
    table = resolve_rope(rope, 2 * pairs)
    plain = resolve_rope(RopeConfig(theta=rope.theta), 2 * pairs)
    for scaled, frequency in zip(table.inv_freq, plain.inv_freq, strict=True):
        assert frequency / rope.factor * (1 - 1e-6) <= scaled <= frequency * (1 + 1e-6)
        assert scaled == np.float32(scaled)
    assert np.isfinite(table.attention_factor) and table.attention_factor > 0


@given(ropes)
def test_a_factor_of_one_changes_nothing(rope: RopeConfig) -> None:
    same = RopeConfig(**vars(rope) | {"factor": 1.0})
    plain = resolve_rope(RopeConfig(theta=rope.theta), 64)
    np.testing.assert_allclose(resolve_rope(same, 64).inv_freq, plain.inv_freq, rtol=1e-6)
