"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on the upper layers where it is switched on.

Source: Yang et al., "Qwen2 Technical Report", 2024. Weights carry the names of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import MAX_LAYERS, MAX_POSITIONS, read_windows
from octavo.models.keys import ConfigKeys
from octavo.models.llama import Llama

__all__ = ["Qwen2", "upper_windows"]


class Qwen2(Llama):
    """The bias is part of the architecture, whatever the configuration says."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Biases and windows."""
        return {"attention_bias": True, "layer_windows": upper_windows(keys)}


def upper_windows(keys: ConfigKeys) -> tuple[int, ...]:
    """No window, unless `use_sliding_window`: then by `layer_types`, or on the layers from `max_window_layers` on."""
    layers = keys.get("num_hidden_layers")
    window = keys.size("sliding_window", MAX_POSITIONS, 4096) if keys.flag("use_sliding_window", False) else 0
    first = keys.size("max_window_layers", MAX_LAYERS, 28, least=0)
    return read_windows(keys, window, tuple(window if layer >= first else 0 for layer in range(layers)))
