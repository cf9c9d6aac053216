"""Reading configurations: what is honoured, what is refused and by which name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import CASES

import octavo.models
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.registry import MODELS, build_model, model_class

LLAMA, GEMMA, QWEN2, MOE = CASES["llama"], CASES["gemma3"], CASES["qwen2"], CASES["qwen3-moe"]


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | changes)


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (LLAMA, {"model_type": "llamma"}, "model_type"),
        (LLAMA, {"model_type": 7}, "model_type"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act"),
        (GEMMA, {"hidden_activation": "quick_gelu"}, "hidden_activation"),
        (LLAMA, {"hidden_size": 0}, "hidden_size"),
        (LLAMA, {"hidden_size": -64}, "hidden_size"),
        (LLAMA, {"hidden_size": 1 << 40}, "hidden_size"),
        (LLAMA, {"hidden_size": True}, "hidden_size"),
        (LLAMA, {"hidden_size": 32.0}, "hidden_size"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"vocab_size": 1 << 63}, "vocab_size"),
        (LLAMA, {"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        (LLAMA, {"num_key_value_heads": 3}, "num_kv_heads"),
        (LLAMA, {"num_attention_heads": 64}, "head_dim"),
        (LLAMA, {"head_dim": 7}, "head_dim"),
        (LLAMA, {"intermediate_size": 0}, "intermediate_size"),
        (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"rope_theta": 0.0}, "rope_theta"),
        (LLAMA, {"rope_theta": float("inf")}, "rope_theta"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA, {"rope_scaling": CASES["llama3-rope"]["rope_scaling"] | {"high_freq_factor": 1}}, "high_freq_factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA, {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (GEMMA, {"sliding_window": -1}, "sliding_window"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        (MOE, {"num_experts_per_tok": 7}, "experts_per_token"),
        (MOE, {"num_experts": 1 << 30}, "num_experts"),
        (MOE, {"num_experts": 4096, "num_hidden_layers": 1024}, "num_experts"),
        (MOE, {"mlp_only_layers": [2]}, "mlp_only_layers"),
        (LLAMA, {"eos_token_id": 96}, "eos_token_id"),
        (LLAMA, {"eos_token_id": [2, -1]}, "eos_token_id"),
        (LLAMA, {"bos_token_id": "1"}, "bos_token_id"),
    ],
)
def test_refused_by_name(base: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read(base, **changes)
    assert error.value.field.endswith(field)


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), st.floats() | st.text(max_size=9)),
)  # fmt: skip


@given(st.sampled_from(list(CASES)), st.data())
def test_any_value_in_any_key_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Never another error, never a model that cannot be described."""
    config = CASES[name]
    key = data.draw(st.sampled_from([*config, "rope_scaling", "layer_types", "sliding_window", "head_dim"]))
    try:
        model = build_model(ModelConfig.from_dict(config | {key: data.draw(junk)}))
    except InvalidInput as error:
        assert error.remedy
        return
    assert all(min(shape) >= 1 for shape in model.weight_shapes().values())


@pytest.mark.parametrize("name", CASES)
def test_a_missing_key_is_named_or_has_its_default(name: str) -> None:
    for key in CASES[name]:
        without = {other: value for other, value in CASES[name].items() if other != key}
        try:
            ModelConfig.from_dict(without)
        except InvalidInput as error:
            assert key in error.field


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "dynamic"}, "rope_type"),
        ({"kind": "yarn"}, "original_max_position_embeddings"),
        ({"theta": 1.0}, "rope_theta"),
        ({"kind": "linear", "factor": 0.0}, "factor"),
    ],
)
def test_a_rope_made_by_hand_is_checked_too(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RopeConfig(**fields)
    assert error.value.field == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"layer_windows": (0,)}, "layer_windows"),
        ({"layer_windows": (0, -1)}, "layer_windows"),
        ({"activation": "relu"}, "activation"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_too(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as error:
        replace(ModelConfig.from_dict(LLAMA), **fields)
    assert error.value.field == named


def test_eos_ids_one_several_or_none() -> None:
    assert read(LLAMA, eos_token_id=5).eos_token_ids == (5,)
    assert read(LLAMA, eos_token_id=[9, 5, 9]).eos_token_ids == (9, 5)
    assert read(LLAMA, eos_token_id=None).eos_token_ids == ()


def test_defaults_of_the_architectures() -> None:
    """What transformers assumes when a key is absent."""
    bare = {key: value for key, value in LLAMA.items() if key not in ("hidden_act", "rope_theta")}
    mistral = ModelConfig.from_dict(bare | {"model_type": "mistral"})
    assert mistral.layer_windows == (4096, 4096)
    assert ModelConfig.from_dict(bare | {"model_type": "mistral", "sliding_window": None}).layer_windows == (0, 0)
    assert ModelConfig.from_dict(bare | {"model_type": "qwen3"}).head_dim == 128
    gemma = ModelConfig.from_dict(
        bare | {"model_type": "gemma3_text", "num_hidden_layers": 7, "tie_word_embeddings": None}
    )
    assert gemma.layer_windows == (4096,) * 5 + (0, 4096)
    assert (gemma.head_dim, gemma.query_scale, gemma.activation) == (256, 1 / 16, "gelu_tanh")
    assert gemma.tie_word_embeddings and gemma.norm_offset == 1.0
    gemma2 = ModelConfig.from_dict(bare | {"model_type": "gemma2"})
    assert (gemma2.attn_soft_cap, gemma2.final_soft_cap, gemma2.layer_windows) == (50.0, 30.0, (4096, 0))
    assert gemma2.rope.theta == 1e4 and not gemma2.qk_norm
    assert gemma.rope.theta == 1e6 and gemma.rope_local and gemma.rope_local.theta == 1e4


def test_windows_make_groups_of_equal_pages() -> None:
    """Gemma 3 270M: fifteen windowed and three global layers."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    groups = build_model(read(GEMMA, num_hidden_layers=18, layer_types=kinds, sliding_window=512)).kv_groups()
    assert [len(group.layers) for group in groups] == [3] * 6
    assert sorted(group.window for group in groups) == [0] + [512] * 5
    assert len({group.page_bytes(16) for group in groups}) == 1


def test_norm_weights_get_their_one_and_nothing_else_changes() -> None:
    gemma, llama = build_model(ModelConfig.from_dict(GEMMA)), build_model(ModelConfig.from_dict(LLAMA))
    assert gemma.prepare("model.layers.0.input_layernorm.weight", [0.5, -1.0]) == [1.5, 0.0]
    assert gemma.prepare("model.layers.0.self_attn.q_norm.weight", [0.5]) == [1.5]
    assert gemma.prepare("model.embed_tokens.weight", [[0.5]]) == [[0.5]]
    assert llama.prepare("model.norm.weight", [0.5]) == [0.5]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_is_one_short_file(model_type: str) -> None:
    found = model_class(model_type)
    assert len(Path(inspect.getfile(found)).read_text().splitlines()) < 120
    assert inspect.getdoc(found)


def test_every_model_file_is_registered() -> None:
    shared = {"__init__", "config", "keys", "pooling", "rope", "decoder", "registry"}
    files = {path.stem for path in Path(str(octavo.models.__file__)).parent.glob("*.py")}
    assert files - shared == {place.partition(":")[0].rpartition(".")[2] for place in MODELS.values()}
