"""Gemma 2: the layers of Gemma 3 without norms on q and k, soft caps on scores and logits, every other layer windowed.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024. Weights carry the names of the
Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import read_rope
from octavo.models.gemma3 import Gemma3, alternating_windows
from octavo.models.keys import ConfigKeys

__all__ = ["Gemma2"]


class Gemma2(Gemma3):
    """One rope for all layers; caps of 50 and 30 unless the configuration says otherwise (null: none)."""

    @classmethod
    def config_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """What differs from Gemma 3."""
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        attention, final = (keys.real(key, 0.0 if keys.has(key) else default) for key, default in caps.items())
        return cls.shared_fields(keys) | {
            "attn_soft_cap": attention,
            "final_soft_cap": final,
            "layer_windows": alternating_windows(keys, pattern=2),
            "rope": read_rope(keys, "full_attention"),
        }
