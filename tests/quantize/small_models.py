"""Tiny model folders with weights that quantization hurts: a few input channels are far larger than the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.safetensors import write_safetensors

VOCAB = 80
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of float32 weights, the same for the same configuration."""
    model, rng = build_model(ModelConfig.from_dict(config)), np.random.RandomState(7)
    tensors: dict[str, NDArray[Any]] = {}
    for name, shape in model.weight_shapes().items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
            if len(values) == 64 and name != "model.norm.weight":
                values[::13] *= 20  # loud channels
            values -= model.config.norm_offset
        else:
            values *= shape[1] ** -0.5
        tensors[name] = values.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def texts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = np.random.RandomState(seed)
    return rng.randint(0, VOCAB, (count, length)).tolist()
