"""Tiny checkpoints of every architecture: configurations with Hugging Face keys, and weights from a frozen generator.

Nothing here needs torch: `scripts/golden_tiny.py` gives the same weights to `transformers` and stores what it answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

VOCAB = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
_MOE = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _case(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """`_BASE` with changes; a change to None removes the key."""
    config = _BASE | {"model_type": model_type, "architectures": [architecture], "dtype": "float32"} | changes
    return {key: value for key, value in config.items() if value is not None}


def _llama(**changes: Any) -> dict[str, Any]:
    return _case("llama", "LlamaForCausalLM", **changes)


def _gemma(**changes: Any) -> dict[str, Any]:
    return _case("gemma3_text", "Gemma3ForCausalLM", **{"hidden_act": None} | _GEMMA | changes)


CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(num_key_value_heads=4),
    "llama-tied-one-kv-head": _llama(num_key_value_heads=1, tie_word_embeddings=True, rope_theta=500.0),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True, head_dim=12),
    "llama3-rope": _llama(head_dim=16, rope_scaling=_LLAMA3),
    "linear-rope": _llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "yarn-rope": _llama(head_dim=16, rope_scaling=_YARN),
    "yarn-rope-new-spelling": _llama(
        head_dim=16,
        rope_theta=None,
        rope_parameters=_YARN | {"rope_theta": 5000.0, "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    "mistral-window": _case("mistral", "MistralForCausalLM", sliding_window=8, head_dim=16),
    "mistral-null-window": _case("mistral", "MistralForCausalLM") | {"sliding_window": None},
    "qwen2": _case("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-upper-window": _case(
        "qwen2", "Qwen2ForCausalLM", num_hidden_layers=3, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": _case("qwen3", "Qwen3ForCausalLM", head_dim=16),
    "qwen3-moe": _case("qwen3_moe", "Qwen3MoeForCausalLM", **_MOE),
    "qwen3-moe-some-dense": _case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": False},
    ),
    "gemma3": _gemma(rope_local_base_freq=50.0, rope_theta=100000.0),
    "gemma3-final-cap": _gemma(final_logit_softcapping=3.0, num_key_value_heads=1),
    "gemma2": _case(
        "gemma2",
        "Gemma2ForCausalLM",
        **_GEMMA | {"layer_types": None, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "gemma3-scaled-rope": _gemma(
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3-long": _gemma(num_hidden_layers=3, sliding_window=70, layer_types=None, sliding_window_pattern=2),
}
NUM_POSITIONS = {name: 150 if name.endswith("long") else 24 for name in CASES}


def prompt(name: str) -> list[int]:
    """The case's token ids."""
    return [int(i) for i in np.random.RandomState(zlib.crc32(name.encode())).randint(0, VOCAB, NUM_POSITIONS[name])]


def make_weights(name: str) -> Iterator[tuple[str, Array]]:
    """Checkpoint names and values of a case. Uniform numbers of the frozen legacy generator: the same everywhere."""
    from octavo.models.config import ModelConfig
    from octavo.models.registry import build_model

    model = build_model(ModelConfig.from_dict(CASES[name]))
    for weight, shape in model.weight_shapes().items():
        noise = np.random.RandomState(zlib.crc32(f"{name}:{weight}".encode())).uniform(-1, 1, shape)
        if weight.endswith("norm.weight"):
            noise = noise * 0.5 + (1 - model.config.norm_offset)
        elif len(shape) == 2 and "embed" not in weight:
            noise = noise * (3 / shape[1]) ** 0.5
        yield weight, noise.astype(np.float32)


def digest(weights: dict[str, Array]) -> int:
    """CRC of all values in order: says at once that a mismatch is one of weights, not of arithmetic."""
    crc = 0
    for name, values in weights.items():
        crc = zlib.crc32(values.astype("<f4").tobytes(), zlib.crc32(name.encode(), crc))
    return crc
