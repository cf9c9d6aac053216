"""Qwen3 mixture of experts: Qwen3 with most MLPs replaced by a router and many small experts.

    scores = softmax(router(h)); the top k experts answer, weighted by their scores

Source: Yang et al., "Qwen3 Technical Report", 2025. Weights carry the names of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH
from octavo.models.decoder import Weights
from octavo.models.keys import ConfigKeys
from octavo.models.qwen3 import Qwen3

__all__ = ["Qwen3Moe"]


class Qwen3Moe(Qwen3):
    """A layer is dense when it is listed in `mlp_only_layers` or is not a multiple of `decoder_sparse_step`."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Experts, and which layers have none; a window that is switched on holds on every layer."""
        layers = keys.get("num_hidden_layers")
        window = keys.size("sliding_window", MAX_POSITIONS, 4096) if keys.flag("use_sliding_window", False) else 0
        experts = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
        step = keys.size("decoder_sparse_step", MAX_LAYERS, 1)
        plain = keys.ids("mlp_only_layers", layers)
        return super().config_fields(keys) | {
            "head_dim": keys.size("head_dim", MAX_HEAD_DIM, keys.get("hidden_size") // keys.get("num_attention_heads")),
            "layer_windows": (window,) * layers,
            "num_experts": keys.size(experts, MAX_EXPERTS),
            "experts_per_token": keys.size("num_experts_per_tok", MAX_EXPERTS),
            "moe_intermediate_size": keys.size("moe_intermediate_size", MAX_WIDTH),
            "norm_topk_prob": keys.flag("norm_topk_prob", False),
            "dense_layers": tuple(i for i in range(layers) if i in plain or (i + 1) % step),
        }

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Attention and norms as Qwen3; then one MLP, or a router and its experts."""
        c = self.config
        if layer in c.dense_layers:
            return super().layer_shapes(layer)
        shapes = {name: shape for name, shape in super().layer_shapes(layer).items() if not name.startswith("mlp.")}
        shapes["mlp.gate.weight"] = (c.num_experts, c.hidden_size)
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        for expert in range(c.num_experts):
            shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (inner, hidden)
            shapes[f"mlp.experts.{expert}.up_proj.weight"] = (inner, hidden)
            shapes[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
        return shapes

    def feed_forward(self, ops: Any, w: Weights, prefix: str, batch: Any, layer: int, h: Any) -> Any:
        """`h [T, H]` to `[T, H]`."""
        c = self.config
        if layer in c.dense_layers:
            return self.mlp(ops, w, prefix, batch, h)
        gate, up, down = (
            [w[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] for expert in range(c.num_experts)]
            for name in ("gate", "up", "down")
        )
        router, k = w[f"{prefix}mlp.gate.weight"], c.experts_per_token
        return ops.moe(h, router, gate, up, down, top_k=k, normalize=c.norm_topk_prob, kind=c.activation)
