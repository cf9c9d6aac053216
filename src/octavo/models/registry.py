"""Model type, as checkpoints name it, to the class that runs it. A class is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder

__all__ = ["MODELS", "build_model", "model_class"]

MODELS: dict[str, str] = {
    "llama": "octavo.models.llama:Llama",
    "mistral": "octavo.models.llama:Mistral",
    "qwen2": "octavo.models.qwen2:Qwen2",
    "qwen3": "octavo.models.qwen3:Qwen3",
    "qwen3_moe": "octavo.models.qwen3_moe:Qwen3Moe",
    "gemma2": "octavo.models.gemma2:Gemma2",
    "gemma3_text": "octavo.models.gemma3:Gemma3",
}


def model_class(model_type: str) -> type[Decoder]:
    """The class of a model type; `InvalidInput` lists the types that there are."""
    if model_type not in MODELS:
        raise InvalidInput("config: model_type", model_type, f"supported are {', '.join(MODELS)}")
    module, _, name = MODELS[model_type].partition(":")
    found: type[Decoder] = getattr(import_module(module), name)
    return found


def build_model(config: ModelConfig) -> Decoder:
    """The model of a configuration; weights come with each call of `forward`."""
    return model_class(config.model_type)(config)
