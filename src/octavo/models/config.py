"""`ModelConfig`: everything that a forward pass needs to know about a checkpoint, checked once.

`ModelConfig.from_dict` reads Hugging Face keys, old and new spellings. What it cannot honour it refuses by name: an
unknown rope type, activation or layer type would otherwise give fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Voting
from octavo.models.keys import ConfigKeys

__all__ = ["ModelConfig", "RopeConfig", "common_fields", "read_activation", "read_rope", "read_windows"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
LAYER_TYPES = ("full_attention", "sliding_attention")

MAX_VOCAB = 1 << 22
MAX_WIDTH = 1 << 20  # hidden and intermediate size
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 4096
MAX_EXPERT_LAYERS = 1 << 16  # experts of all layers: each has three weights with names
MAX_POSITIONS = 1 << 27
MIN_FACTOR = 1e-3  # of rope scaling: frequencies stay far from overflow

# Features of other checkpoints: a value that is set changes the arithmetic, so it is refused.
_UNSUPPORTED = (
    "quantization_config",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "attention_chunk_size",
    "q_lora_rank",
    "n_shared_experts",
)
_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding as configured; `rope.resolve_rope` turns it into frequencies."""

    kind: str = "default"  # one of ROPE_KINDS
    theta: float = 10000.0
    factor: float = 1.0  # how much longer than the original context
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3: turns within the original context, below: divided by factor
    high_freq_factor: float = 4.0  # llama3: above: kept
    beta_fast: float = 32.0  # yarn: turns, above: kept
    beta_slow: float = 1.0  # yarn: below: divided by factor
    attention_factor: float | None = None  # yarn; None: from factor and the two mscales
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise InvalidInput("rope_type", self.kind, f"supported are {', '.join(ROPE_KINDS)}")
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            name = "original_max_position_embeddings"
            raise InvalidInput(name, self.original_max_position_embeddings, f"rope type {self.kind} needs it")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InvalidInput("high_freq_factor", self.high_freq_factor, "must be larger than low_freq_factor")
        if self.theta <= 1:
            raise InvalidInput("rope_theta", self.theta, "must be larger than 1")
        if self.factor < MIN_FACTOR:
            raise InvalidInput("factor", self.factor, f"must be at least {MIN_FACTOR}")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only checkpoint. Sizes are counts of elements; a window counts tokens, the current one included."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None  # windowed layers; None: as the others
    layer_windows: tuple[int, ...] = ()  # tokens that a layer sees; 0: all. Empty: all, on every layer
    window_sinks: int = 0  # of the first tokens, that windowed layers see as well: lossy eviction, of no checkpoint
    voting: Voting | None = None  # what stays of all, by what is looked at: lossy eviction, of no checkpoint
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on the projection after attention
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_soft_cap: float = 0.0  # 0: none
    final_soft_cap: float = 0.0
    query_scale: float = 0.0  # 0: head_dim ** -0.5
    activation: str = "silu"  # silu or gelu_tanh
    embed_scale: float = 1.0
    norm_offset: float = 0.0  # added to every norm weight at load: 1 where checkpoints store weight - 1
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()  # layers of a mixture model that have one plain MLP
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"  # of the checkpoint, for information

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "must be at least 1")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (0,) * self.num_layers)
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)
        self._check()

    def _check(self) -> None:
        """What must hold between fields."""
        rules = (
            ("num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"must divide num_heads ({self.num_heads})"),
            ("head_dim", self.head_dim % 2 == 0, "must be even: rotary embedding turns pairs"),
            ("layer_windows", len(self.layer_windows) == self.num_layers, "needs one window for each layer"),
            ("layer_windows", min(self.layer_windows) >= 0, "a window is 0 (all) or a number of tokens"),
            ("experts_per_token", self.experts_per_token <= self.num_experts, "must not exceed num_experts"),
            ("num_experts", self.num_experts * self.num_layers <= MAX_EXPERT_LAYERS, "too many for so many layers"),
            ("activation", self.activation in ACTIVATIONS.values(), "supported are silu and gelu_tanh"),
        )
        for name, holds, remedy in rules:
            if not holds:
                raise InvalidInput(name, getattr(self, name), remedy)

    @property
    def forgets(self) -> bool:
        """True if what a token sees depends on what was forgotten before it."""
        return bool(self.window_sinks or self.voting)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From a dict with Hugging Face keys. `InvalidInput` names the key that is missing, wrong or not supported."""
        from octavo.models.registry import model_class

        keys = ConfigKeys(config)
        model_type = keys.text("model_type", "")
        own_fields = model_class(model_type).config_fields
        for key in _UNSUPPORTED:
            if keys.get(key):
                raise keys.error(key, "checkpoints with this feature are not supported yet")
        return cls(**{"model_type": model_type} | common_fields(keys) | own_fields(keys))


def common_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields that all decoders spell alike. A model's own `config_fields` adds to them or replaces them."""
    vocab, hidden = keys.size("vocab_size", MAX_VOCAB), keys.size("hidden_size", MAX_WIDTH)
    heads, layers = keys.size("num_attention_heads", MAX_HEADS), keys.size("num_hidden_layers", MAX_LAYERS)
    bos = keys.ids("bos_token_id", vocab)
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.size("num_key_value_heads", MAX_HEADS, heads),
        "head_dim": keys.size("head_dim", MAX_HEAD_DIM, hidden // heads),
        "intermediate_size": keys.size("intermediate_size", MAX_WIDTH),
        "max_position_embeddings": keys.size("max_position_embeddings", MAX_POSITIONS),
        "rms_norm_eps": keys.real("rms_norm_eps", 1e-6, high=1.0),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", False),
        "attention_bias": keys.flag("attention_bias", False),
        "rope": read_rope(keys, "full_attention"),
        "activation": read_activation(keys, "hidden_act"),
        "eos_token_ids": keys.ids("eos_token_id", vocab),
        "bos_token_id": bos[0] if bos else None,
        "dtype": keys.text("dtype", keys.text("torch_dtype", "float32")),
    }


def read_activation(keys: ConfigKeys, key: str, default: str = "silu") -> str:
    """`silu` or `gelu_tanh`."""
    name = keys.text(key, default)
    if name not in ACTIVATIONS:
        raise keys.error(key, f"supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_windows(keys: ConfigKeys, window: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """One window for each layer from `layer_types`, where the checkpoint lists them."""
    kinds = keys.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, (list, tuple)) or len(kinds) != len(default) or not all(k in LAYER_TYPES for k in kinds):
        raise keys.error("layer_types", f"give one of {', '.join(LAYER_TYPES)} for each of {len(default)} layers")
    if window == 0 and "sliding_attention" in kinds:
        raise keys.error("sliding_window", "layers of type sliding_attention need a window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_rope(keys: ConfigKeys, layer_type: str, default_theta: float = 10000.0) -> RopeConfig:
    """Rope of one layer type: `rope_parameters` (flat, or nested by layer type), or `rope_theta` and `rope_scaling`."""
    rope = keys.group("rope_parameters") or keys.group("rope_scaling") or ConfigKeys({}, "rope_parameters.")
    if any(kind in rope.values for kind in LAYER_TYPES):
        rope = rope.group(layer_type) or ConfigKeys({}, rope.prefix)
    unknown = sorted(str(key) for key in rope.values if key not in _ROPE_KEYS)
    if unknown:
        raise rope.error(unknown[0], f"not a known setting of rope types {', '.join(ROPE_KINDS)}")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise rope.error("rope_type" if rope.has("rope_type") else "type", f"supported are {', '.join(ROPE_KINDS)}")
    for place in (keys, rope):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise place.error("partial_rotary_factor", "only 1 is supported: every dimension of a head is rotated")
    theta = rope.real("rope_theta", keys.real("rope_theta", default_theta, low=1.0, high=1e15), low=1.0, high=1e15)
    return RopeConfig(kind, theta, **_scaling(keys, rope, kind))


def _scaling(keys: ConfigKeys, rope: ConfigKeys, kind: str) -> dict[str, Any]:
    """The numbers that each kind of rope scaling needs."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": rope.real("factor", low=MIN_FACTOR)}
    context = keys.size("max_position_embeddings", MAX_POSITIONS)
    original = rope.size("original_max_position_embeddings", MAX_POSITIONS, context)
    original = keys.size("original_max_position_embeddings", MAX_POSITIONS, original)
    if kind == "llama3":
        given = {key: rope.real(key) for key in ("low_freq_factor", "high_freq_factor")}
        return given | {"factor": rope.real("factor", low=MIN_FACTOR), "original_max_position_embeddings": original}
    return {
        "factor": rope.real("factor", max(context / original, 1.0), low=MIN_FACTOR),
        "original_max_position_embeddings": original,
        "beta_fast": rope.real("beta_fast", 32.0),
        "beta_slow": rope.real("beta_slow", 1.0),
        "attention_factor": rope.real("attention_factor") if rope.get("attention_factor") is not None else None,
        "mscale": rope.real("mscale", 0.0),
        "mscale_all_dim": rope.real("mscale_all_dim", 0.0),
        "truncate": rope.flag("truncate", True),
    }
