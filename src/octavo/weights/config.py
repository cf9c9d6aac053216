"""A model's configuration as a dict with Hugging Face keys, from `config.json` or from GGUF metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octavo.weights.gguf_config import gguf_config
from octavo.weights.jsonfile import read_json
from octavo.weights.tensors import CorruptFile

__all__ = ["gguf_config", "load_config_dict"]

_MAX_CONFIG = 1 << 20


def load_config_dict(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`config.json` of a model folder, at most 1 MiB, with the stop tokens of `generation_config.json` added.

    `InvalidInput` when it cannot be read, `CorruptFile` when it is not a JSON object. Nothing in it is executed.
    """
    config = read_json(Path(folder) / "config.json", _MAX_CONFIG)
    generation_path = Path(folder) / "generation_config.json"
    generation = read_json(generation_path, _MAX_CONFIG) if generation_path.exists() else {}
    ids = _ids(config.get("eos_token_id"), folder) + _ids(generation.get("eos_token_id"), folder)
    if ids:
        config["eos_token_id"] = list(dict.fromkeys(ids))
    return config


def _ids(value: Any, folder: str | os.PathLike[str]) -> list[int]:
    """None, one id or a list of ids, as a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in ids):
        raise CorruptFile(Path(folder) / "config.json", "eos_token_id", value, "must be an id or a list of ids")
    return ids
