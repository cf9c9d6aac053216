"""Models of known shapes with random weights: they say nothing of quality, only of speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.backends import create_backend
from octavo.engine.config import EngineConfig
from octavo.engine.identity import model_digest
from octavo.engine.loader import LoadedEngine, plan_for, scheduling_for
from octavo.engine.parts import ModelParts, build_core
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

__all__ = ["SHAPES", "load_shape"]

_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_act": "silu"}
SHAPES: dict[str, Mapping[str, Any]] = {
    "qwen3-0.6b-shape": {
        **_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "rope_theta": 1000000.0,
    },
    "llama-1b-shape": {
        **_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip


def load_shape(name: str, config: EngineConfig) -> LoadedEngine:
    """An engine over random weights of a shape, in the format that `config` names."""
    shape = SHAPES[name]
    model_config = ModelConfig.from_dict(shape)
    plain = build_model(model_config)
    backend = create_backend(config.backend, threads=config.threads)
    model = backend.compile(plain, format=config.format, kv_dtype=config.kv_dtype)
    max_seq_len = config.max_seq_len or 8192
    plan = plan_for(config, model, backend.name, max_seq_len)
    shapes, rng = plain.weight_shapes(), np.random.default_rng(1)

    def read(weight: str) -> Any:
        values = rng.standard_normal(tuple(shapes[weight]), dtype=np.float32)
        return 1 + 0.02 * values if values.ndim == 1 else 0.02 * values

    model.load(read)
    digest = model_digest(dict(shape), {"weights": "random"})
    size = model.weight_bytes()
    parts = ModelParts(
        name, model_config, model, backend, {}, None, digest, weight_format=model.weight_format, weight_bytes=size
    )
    scheduling = scheduling_for(config, max_seq_len)
    core = build_core(
        parts,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        scheduling=scheduling,
        prefix_cache=config.prefix_cache,
    )
    return LoadedEngine(config, parts, plan, core, max_seq_len, model_config.max_position_embeddings)
