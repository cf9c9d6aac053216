"""Llama 2 and 3, SmolLM2, and Mistral with its sliding window.

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

Sources: Touvron et al., "LLaMA", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024 (rope scaling); Jiang et al.,
"Mistral 7B", 2023 (window). Weights carry the names of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import MAX_POSITIONS
from octavo.models.decoder import Decoder, Weights
from octavo.models.keys import ConfigKeys

__all__ = ["Llama", "Mistral"]


class Llama(Decoder):
    """Two norms, grouped attention with rope, a gated MLP."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Optional biases, and a window on every layer where the configuration sets one."""
        bias = keys.flag("attention_bias", False)
        window = keys.size("sliding_window", MAX_POSITIONS, 0)
        return {
            "attention_bias": bias,
            "output_bias": bias,
            "mlp_bias": keys.flag("mlp_bias", False),
            "layer_windows": (window,) * keys.get("num_hidden_layers"),
        }

    def layer(self, ops: Any, w: Weights, batch: Any, layer: int, x: Any, delta: Any) -> tuple[Any, Any]:
        """One layer: `(x [T, H], delta [T, H] or None)` to the same pair."""
        prefix, eps = f"model.layers.{layer}.", self.config.rms_norm_eps
        h, x = ops.rms_norm(x, w[f"{prefix}input_layernorm.weight"], eps, residual=delta)
        delta = self.attention(ops, w, prefix, batch, layer, h)
        h, x = ops.rms_norm(x, w[f"{prefix}post_attention_layernorm.weight"], eps, residual=delta)
        return x, self.feed_forward(ops, w, prefix, batch, layer, h)

    def feed_forward(self, ops: Any, w: Weights, prefix: str, batch: Any, layer: int, h: Any) -> Any:
        """`h [T, H]` to `[T, H]`; a mixture model replaces it."""
        return self.mlp(ops, w, prefix, batch, h)


class Mistral(Llama):
    """Llama with a window on every layer: 4096 tokens unless the configuration says otherwise (null: none)."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """No biases; the window's default is Mistral's."""
        window = keys.size("sliding_window", MAX_POSITIONS, 0 if keys.has("sliding_window") else 4096)
        return {"attention_bias": False, "layer_windows": (window,) * keys.get("num_hidden_layers")}
