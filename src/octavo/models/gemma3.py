"""Gemma 3, text: windowed layers with a rope of their own, every sixth layer global; norms before and after each block.

    x = x + norm(attention(norm(x)))
    x = x + norm(mlp(norm(x)))

Norm weights are stored less one (`norm_offset`); embeddings are multiplied by the root of the width and tied to the
output. Source: Gemma Team, "Gemma 3 Technical Report", 2025. Weights carry the names of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    RopeConfig,
    read_activation,
    read_rope,
    read_windows,
)
from octavo.models.decoder import Decoder, Weights, attention_shapes, mlp_shapes
from octavo.models.keys import ConfigKeys

__all__ = ["Gemma3", "alternating_windows"]

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3(Decoder):
    """Two KV groups or more: windowed layers give their pages back, global ones keep them."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Windows, the two ropes, norms on q and k; defaults are those of Gemma 3."""
        if keys.get("attn_logit_softcapping") is not None:
            raise keys.error("attn_logit_softcapping", "Gemma 3 caps no attention scores: give null")
        return cls.shared_fields(keys) | {
            "qk_norm": True,
            "layer_windows": alternating_windows(keys, keys.size("sliding_window_pattern", MAX_LAYERS, 6)),
            "rope": read_rope(keys, "full_attention", 1e6),
            "rope_local": _local_rope(keys),
        }

    @classmethod
    def shared_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """What Gemma 2 and 3 read alike."""
        bias = keys.flag("attention_bias", False)
        return {
            "head_dim": keys.size("head_dim", MAX_HEAD_DIM, 256),
            "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
            "attention_bias": bias,
            "output_bias": bias,
            "norm_offset": 1.0,
            "embed_scale": float(keys.get("hidden_size")) ** 0.5,
            "query_scale": keys.real("query_pre_attn_scalar", 256.0) ** -0.5,
            "activation": read_activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
            "final_soft_cap": keys.real("final_logit_softcapping", 0.0),
        }

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Attention, MLP and four norms."""
        c = self.config
        return attention_shapes(c) | mlp_shapes(c) | {f"{norm}.weight": (c.hidden_size,) for norm in _NORMS}

    def layer(self, ops: Any, w: Weights, batch: Any, layer: int, x: Any, delta: Any) -> tuple[Any, Any]:
        """One layer: `(x [T, H], delta [T, H] or None)` to the same pair."""
        prefix, eps = f"model.layers.{layer}.", self.config.rms_norm_eps
        before, after, before_mlp, after_mlp = (w[f"{prefix}{norm}.weight"] for norm in _NORMS)
        h, x = ops.rms_norm(x, before, eps, residual=delta)
        delta, _ = ops.rms_norm(self.attention(ops, w, prefix, batch, layer, h), after, eps)
        h, x = ops.rms_norm(x, before_mlp, eps, residual=delta)
        delta, _ = ops.rms_norm(self.mlp(ops, w, prefix, batch, h), after_mlp, eps)
        return x, delta


def alternating_windows(keys: ConfigKeys, pattern: int) -> tuple[int, ...]:
    """By `layer_types`, or every `pattern`-th layer global."""
    window = keys.size("sliding_window", MAX_POSITIONS, 4096)
    default = tuple(window if (i + 1) % pattern else 0 for i in range(keys.get("num_hidden_layers")))
    return read_windows(keys, window, default)


def _local_rope(keys: ConfigKeys) -> RopeConfig:
    """Rope of windowed layers: never scaled in the old spelling, its own entry in the new one."""
    theta = keys.real("rope_local_base_freq", 10000.0)
    nested = keys.group("rope_parameters")
    if nested is not None and nested.get("sliding_attention") is not None:
        local = ConfigKeys(
            {"rope_parameters": nested.values, "max_position_embeddings": keys.get("max_position_embeddings")}
        )
        return read_rope(local, "sliding_attention", theta)
    return RopeConfig(theta=theta)
