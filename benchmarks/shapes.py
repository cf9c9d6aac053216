"""Models of known shapes with random weights, at full depth: they say nothing of quality, only of speed.

    python benchmarks/shapes.py     write all of them into the cache, beside the fetched models

A folder has bf16 safetensors drawn from a seed, and a tokenizer of bytes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.store import default_cache_dir

__all__ = ["SHAPES", "shape_folder"]

SEED = 1
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_act": "silu"}
SHAPES: dict[str, Mapping[str, Any]] = {
    "qwen3-0.6b-shape": {
        **_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "rope_theta": 1000000.0,
    },
    "llama-1b-shape": {
        **_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip


def shape_folder(name: str, say: Callable[[str], None], cache: Path | None = None) -> Path:
    """The folder of a shape, written at the first call."""
    folder = (cache or default_cache_dir().parent / "shapes") / name
    if not (folder / "model.safetensors").exists():
        say(f"{name}: drawing random weights into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(SHAPES[name]), indent=1), encoding="utf-8")
        (folder / "tokenizer.json").write_text(json.dumps(_bytes_tokenizer()), encoding="utf-8")
        _write_weights(folder, build_model(ModelConfig.from_dict(SHAPES[name])).weight_shapes())
    return folder


def _write_weights(folder: Path, shapes: Mapping[str, Any]) -> None:
    """One tensor after the other, so that memory holds one. The file gets its name when it is whole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rng, part = np.random.default_rng(SEED), folder / "model.safetensors.part"
    with open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = rng.standard_normal(math.prod(shape), dtype=np.float32)
            values = 1 + 0.02 * values if len(shape) == 1 else 0.02 * values
            file.write((values.view(np.uint32) + np.uint32(0x8000) >> np.uint32(16)).astype("<u2").tobytes())
    os.replace(part, folder / "model.safetensors")


def _bytes_tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: every byte a token, written as the printable characters that stand for bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": kind,
        "post_processor": None,
        "decoder": kind,
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []},
    }


if __name__ == "__main__":
    for wanted in SHAPES:
        print(shape_folder(wanted, lambda line: print(line, file=sys.stderr)))
