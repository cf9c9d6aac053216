"""What every decoder-only transformer shares: the way in, the way out, and two blocks that layers are made of.

A model is a function over ops: weights are handles of the backend, passed to every call under their checkpoint names.
In this package `w` is that mapping, `x` the residual stream `[T, H]`, `delta` what the previous block adds to it:
`rms_norm` adds and normalises in one op, so that each layer takes and returns the pair `(x, delta)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.core.kv_groups import KVGroup, make_kv_groups
from octavo.models.config import ModelConfig
from octavo.models.keys import ConfigKeys
from octavo.models.rope import resolve_rope

__all__ = ["Decoder", "Weights"]

Weights = Mapping[str, Any]  # checkpoint name -> the backend's handle
Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


class Decoder(ABC):
    """A causal language model over ops. Subclasses give `layer`, `layer_shapes` and `config_fields`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        rope = resolve_rope(config.rope, config.head_dim)
        local = resolve_rope(config.rope_local, config.head_dim) if config.rope_local else rope
        self.ropes = tuple(local if window else rope for window in config.layer_windows)  # one table for each layer

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Fields of `ModelConfig` that this architecture reads in its own way from Hugging Face keys."""
        return {}

    @abstractmethod
    def layer(self, ops: Any, w: Weights, batch: Any, layer: int, x: Any, delta: Any) -> tuple[Any, Any]:
        """One layer: `(x [T, H], delta [T, H] or None)` to the same pair."""

    def layer_shapes(self, layer: int) -> Shapes:
        """Shapes of one layer's weights, by their names after `model.layers.N.`."""
        c = self.config
        return (
            attention_shapes(c)
            | mlp_shapes(c)
            | {
                "input_layernorm.weight": (c.hidden_size,),
                "post_attention_layernorm.weight": (c.hidden_size,),
            }
        )

    def weight_shapes(self) -> Shapes:
        """Every weight that `forward` uses, by checkpoint name, with its shape (linear weights are `[out, in]`)."""
        c = self.config
        shapes: Shapes = {EMBEDDING: (c.vocab_size, c.hidden_size)}
        for layer in range(c.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes(layer).items()}
        shapes[FINAL_NORM] = (c.hidden_size,)
        return shapes if c.tie_word_embeddings else shapes | {OUTPUT: (c.vocab_size, c.hidden_size)}

    def projections(self) -> Shapes:
        """What adapters may change: every `project`, by its name, with its shape `[N, K]`."""
        shapes = self.weight_shapes()
        names = [name for name in shapes if name.endswith("_proj.weight") and ".experts." not in name]
        return {name.removesuffix(".weight"): shapes[name] for name in names}

    def prepare(self, name: str, array: Any) -> Any:
        """A weight as the ops want it, done once at load: norm weights stored as weight - 1 get their one."""
        offset = self.config.norm_offset
        if not offset or not name.endswith("norm.weight"):
            return array
        return [value + offset for value in array] if isinstance(array, list) else array + array.dtype.type(offset)

    def kv_groups(self, dtype: str = "fp32") -> tuple[KVGroup, ...]:
        """The KV groups of the page tables: layers with equal windows share pages (`core.kv_groups`)."""
        c = self.config
        return make_kv_groups(c.layer_windows, c.num_kv_heads, c.head_dim, c.head_dim, dtype, c.window_sinks, c.voting)

    def hidden(self, ops: Any, w: Weights, batch: Any) -> Any:
        """Final hidden states `[T, H]`, normalised, of every token row; writes the batch's K and V on the way."""
        c = self.config
        x, delta = ops.embed(batch.token_ids, w[EMBEDDING]), None
        if c.embed_scale != 1.0:
            x = ops.scale(x, c.embed_scale)
        for layer in range(c.num_layers):
            x, delta = self.layer(ops, w, batch, layer, x, delta)
        return ops.rms_norm(x, w[FINAL_NORM], c.rms_norm_eps, residual=delta)[0]

    def head(self, ops: Any, w: Weights, h: Any) -> Any:
        """Logits `[R, V]` of normalised hidden states `[R, H]`."""
        c = self.config
        return ops.logits(h, w[EMBEDDING if c.tie_word_embeddings else OUTPUT], soft_cap=c.final_soft_cap)

    def forward(self, ops: Any, w: Weights, batch: Any) -> Any:
        """Logits `[R, V]` of the rows `batch.logit_rows`."""
        return self.head(ops, w, ops.select_rows(self.hidden(ops, w, batch), batch))

    def forward_states(self, ops: Any, w: Weights, batch: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """`forward`, and the final hidden states `[len(rows), H]` of these token rows."""
        h = self.hidden(ops, w, batch)
        return self.head(ops, w, ops.select_rows(h, batch)), ops.select_rows(h, replace(batch, logit_rows=rows))

    def attention(self, ops: Any, w: Weights, prefix: str, batch: Any, layer: int, h: Any) -> Any:
        """Causal grouped attention through the pages: `h [T, H]` to `[T, H]`. K and V are written before any read."""
        c, dim = self.config, self.config.head_dim
        q = project(ops, w, f"{prefix}self_attn.q_proj", h, c.attention_bias, batch)  # [T, heads * D]
        k = project(ops, w, f"{prefix}self_attn.k_proj", h, c.attention_bias, batch)  # [T, kv heads * D]
        v = project(ops, w, f"{prefix}self_attn.v_proj", h, c.attention_bias, batch)
        if c.qk_norm:
            q = ops.qk_norm(q, w[f"{prefix}self_attn.q_norm.weight"], c.rms_norm_eps, head_dim=dim)
            k = ops.qk_norm(k, w[f"{prefix}self_attn.k_norm.weight"], c.rms_norm_eps, head_dim=dim)
        q, k = ops.rope(q, k, batch, rope=self.ropes[layer], head_dim=dim)
        ops.write_kv(k, v, batch, layer=layer)
        sinks = {"sink_tokens": c.window_sinks, "rope": self.ropes[layer]} if c.window_sinks else {}
        window, cap = c.layer_windows[layer], c.attn_soft_cap
        seen = ops.attention(
            q, batch, layer=layer, scale=c.query_scale, window=window, soft_cap=cap, head_dim=dim, **sinks
        )
        return project(ops, w, f"{prefix}self_attn.o_proj", seen, c.output_bias, batch)

    def mlp(self, ops: Any, w: Weights, prefix: str, batch: Any, h: Any) -> Any:
        """Gated MLP: `h [T, H]` to `[T, H]` through `[T, I]`."""
        bias = self.config.mlp_bias
        gate = project(ops, w, f"{prefix}mlp.gate_proj", h, bias, batch)
        up = project(ops, w, f"{prefix}mlp.up_proj", h, bias, batch)
        inner = ops.gated_activation(gate, up, kind=self.config.activation)
        return project(ops, w, f"{prefix}mlp.down_proj", inner, bias, batch)


def project(ops: Any, w: Weights, name: str, x: Any, bias: bool, batch: Any) -> Any:
    """A linear layer under its checkpoint name, with what adapters the step has for it: `x [T, K]` to `[T, N]`."""
    offset = w[f"{name}.bias"] if bias else None
    return ops.linear(x, w[f"{name}.weight"], offset, adapters=batch.adapters.get(name))


def attention_shapes(c: ModelConfig) -> Shapes:
    """Weights of `Decoder.attention`."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries, c.hidden_size),
        "self_attn.k_proj.weight": (keys, c.hidden_size),
        "self_attn.v_proj.weight": (keys, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, queries),
    }
    if c.attention_bias:
        shapes |= {f"self_attn.{n}_proj.bias": (queries if n == "q" else keys,) for n in "qkv"}
    if c.output_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden_size,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return shapes


def mlp_shapes(c: ModelConfig) -> Shapes:
    """Weights of `Decoder.mlp`."""
    inner, hidden = c.intermediate_size, c.hidden_size
    sizes = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes: Shapes = {f"{name}.weight": size for name, size in sizes.items()}
    return shapes | ({f"{name}.bias": size[:1] for name, size in sizes.items()} if c.mlp_bias else {})
