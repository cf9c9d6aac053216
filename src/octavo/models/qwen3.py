"""Qwen3: Llama with a norm on every head of q and k before rope, and a head size of its own.

Source: Yang et al., "Qwen3 Technical Report", 2025. Weights carry the names of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import MAX_HEAD_DIM
from octavo.models.keys import ConfigKeys
from octavo.models.llama import Llama
from octavo.models.qwen2 import upper_windows

__all__ = ["Qwen3"]


class Qwen3(Llama):
    """The head size is 128 unless the configuration says otherwise, not hidden size over heads."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """Norms, optional biases, windows."""
        bias = keys.flag("attention_bias", False)
        return {
            "attention_bias": bias,
            "output_bias": bias,
            "qk_norm": True,
            "head_dim": keys.size("head_dim", MAX_HEAD_DIM, 128),
            "layer_windows": upper_windows(keys),
        }
