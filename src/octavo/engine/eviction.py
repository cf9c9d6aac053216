"""A model that forgets: what the engine's eviction policy makes of its configuration."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Eviction, StreamingLLM
from octavo.models.config import ModelConfig
from octavo.models.rope import resolve_rope

__all__ = ["forgetful"]


def forgetful(config: ModelConfig, policy: Eviction | None) -> ModelConfig:
    """The configuration with a window on every layer, and sinks before it; or with what stays of all.

    Raises ``InvalidInput`` for models that have windows of their own and, with sinks, for those that turn by YaRN or
    never saw so long a cache.
    """
    if policy is None:
        return config
    if any(config.layer_windows):
        raise InvalidInput("kv_eviction", policy, "leave it empty: this model has windows of its own")
    if not isinstance(policy, StreamingLLM):
        return replace(config, voting=policy)
    if resolve_rope(config.rope, config.head_dim).attention_factor != 1.0:
        raise InvalidInput("kv_eviction", policy, "leave it empty: keys that YaRN has scaled cannot be turned again")
    cached, limit = policy.sinks + policy.window, config.max_position_embeddings
    if cached > limit:
        remedy = f"give at most {limit - policy.sinks}: with the sinks that is the model's context"
        raise InvalidInput("kv_eviction: window", policy.window, remedy)
    return replace(config, layer_windows=(policy.window,) * config.num_layers, window_sinks=policy.sinks)
