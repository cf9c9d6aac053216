"""GGUF metadata to Hugging Face configuration keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["gguf_config"]

# GGUF architecture -> (HF model_type, HF class name).
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
}
_ROPE_BASE = {"gemma3": 1e6}
_GEMMA3_PATTERN = 6  # every sixth layer sees everything
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MAX_SIZE = (1 << 31) - 1
_MAX_LAYERS = 4096  # lists are made for every layer


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata, self.arch = metadata, arch

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def size(self, key: str, default: int | None = None, limit: int = _MAX_SIZE) -> int:
        """A positive integer up to `limit`; an array (one entry for each layer) must hold one value."""
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= limit:
            raise InvalidInput(f"{self.arch}.{key}", value, f"must be one integer from 1 to {limit}")
        return value

    def real(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"{self.arch}.{key}", value, "must be a positive finite number")
        return _short_decimal(value)


def _short_decimal(value: float) -> float:
    """A float32 as the decimal that it was written from: 9.99999997e-07 is 1e-06."""
    return float(f"{value:.7g}")


def gguf_config(
    metadata: Mapping[str, Any],
    tensor_names: Iterable[str],
    embedding_rows: int | None = None,
    rope_freqs: Sequence[float] | Any = None,
) -> dict[str, Any]:
    """The `config.json` that belongs to GGUF metadata (architectures llama, qwen2, qwen3, qwen3moe, gemma3).

    `embedding_rows` is the height of the embedding, when known (it may be padded beyond the vocabulary);
    `rope_freqs` `[head_dim / 2]` is the file's tensor of that name, which stands for Llama 3's rope scaling.
    `InvalidInput` names the key that is missing, out of range or not supported.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _MODELS:
        raise InvalidInput("general.architecture", arch, f"supported are {', '.join(_MODELS)}")
    keys, names = _Reader(metadata, arch), frozenset(tensor_names)
    config: dict[str, Any] = {"model_type": _MODELS[arch][0], "architectures": [_MODELS[arch][1]]}
    config |= {hf: keys.size(key) for hf, key in _REQUIRED.items()}
    config["num_hidden_layers"] = keys.size("block_count", limit=_MAX_LAYERS)
    config |= _attention(keys, config)
    config |= _rope(keys, config["head_dim"], rope_freqs)
    config |= {
        "vocab_size": embedding_rows or _vocab_size(metadata, keys),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "gelu_pytorch_tanh" if arch == "gemma3" else "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
    }
    config |= _moe(keys) if arch == "qwen3moe" else {"intermediate_size": keys.size("feed_forward_length")}
    config |= _gemma3(keys, config) if arch == "gemma3" else {}
    return config | _special_ids(metadata)


def _attention(keys: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = keys.size("attention.key_length", max(1, config["hidden_size"] // heads))
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise InvalidInput(f"{keys.arch}.attention.value_length", keys.get("attention.value_length"), f"use {head_dim}")
    window = keys.size("attention.sliding_window", 0) if keys.get("attention.sliding_window") else None
    return {
        "head_dim": head_dim,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "sliding_window": window,
    }


def _rope(keys: _Reader, head_dim: int, freqs: Any) -> dict[str, Any]:
    rotary = keys.size("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise InvalidInput(f"{keys.arch}.rope.dimension_count", rotary, f"only the head size ({head_dim}) is supported")
    theta = keys.real("rope.freq_base", _ROPE_BASE.get(keys.arch, 10000.0))
    scaling = _scaling(keys) if freqs is None else _llama3_scaling(list(map(float, freqs)), theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(keys: _Reader) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": keys.real("rope.scale_linear", 1.0)}
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise InvalidInput(f"{keys.arch}.rope.scaling.type", kind, "supported are none, linear and yarn")
    scaling = {"rope_type": kind, "factor": keys.real("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(freqs: list[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The Llama 3 rule behind a table of divisors: the largest is the factor, the rest must follow from it.

    The other constants are Meta's for every release: low 1, high 4, original context 8192.
    """
    factor = _short_decimal(max(freqs, default=0.0))
    if all(value == 1.0 for value in freqs):
        return None
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(len(freqs))]
    if len(freqs) != head_dim // 2 or any(abs(freqs[i] - want) > 1e-3 * want for i, want in enumerate(expected)):
        raise InvalidInput("rope_freqs.weight", freqs[:4], "is not Llama 3's rope scaling, the only one supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_divisor(inverse_freq: float, factor: float) -> float:
    """What Llama 3 divides one inverse frequency by: 1 below a wavelength of 2048, `factor` above 8192, between: a
    straight line of the inverse."""
    turns = 8192 * inverse_freq / (2 * math.pi)
    if turns > 4:
        return 1.0
    if turns < 1:
        return factor
    smooth = (turns - 1) / 3
    return 1 / ((1 - smooth) / factor + smooth)


def _vocab_size(metadata: Mapping[str, Any], keys: _Reader) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    return keys.size("vocab_size", len(tokens) or None)


def _moe(keys: _Reader) -> dict[str, Any]:
    experts, used = keys.size("expert_count"), keys.size("expert_used_count")
    if used > experts:
        raise InvalidInput(f"{keys.arch}.expert_used_count", used, f"there are {experts} experts")
    return {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size": keys.size("feed_forward_length", keys.size("expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(keys: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 fixes outside its metadata. Only the 27B scales queries by width over heads, not head size."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    pattern = keys.size("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    return {
        "layer_types": kinds,
        "sliding_window": config["sliding_window"] or 512,
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == 62 else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`eos_token_id` is a list: end of text, end of turn, end of message, without repeats."""
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return {
        "eos_token_id": list(dict.fromkeys(value for value in found if value is not None)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
