"""Goldens of tiny random checkpoints and of rotary tables, by `transformers`.

Each checkpoint is written twice, as one safetensors file and as three, and read by `from_pretrained`: a weight that
is missing, left over or of another shape is an error, and both must give the same logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "models"))
from tiny_checkpoints import CASES, digest, make_weights, prompt

NUM_SHARDS = 3

# head size, context and rope of published checkpoints, and corners of the rules.
ROPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "smollm2": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    "gemma3 local": (256, 32768, {"rope_type": "default", "rope_theta": 10000.0}),
    "gemma3 4b global": (256, 131072, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}),
    "llama 3.1 8b": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama 3.2 1b": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2.5 yarn": (
        128,
        131072,
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn two scales": (
        64,
        163840,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn whole factor": (
        64,
        4096,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.5,
            "attention_factor": 1.25,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    ),
    "yarn short context": (
        32,
        64,
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4},
    ),
}


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], shards: int) -> None:
    """A checkpoint as the hub has it: config.json, one file or an index and several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    names, places = list(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@torch.no_grad()
def logits(folder: Path, ids: list[int]) -> np.ndarray:
    """`[positions, V]` from one pass; `ValueError` unless every weight found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise ValueError(f"{folder.name}: {wrong}")
    return model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def golden(name: str, folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """One case: what the JSON file says of it, and its logits."""
    weights, ids = dict(make_weights(name)), prompt(name)
    write_folder(folder / "single", CASES[name], weights, 1)
    write_folder(folder / "sharded", CASES[name], weights, NUM_SHARDS)
    single, sharded = logits(folder / "single", ids), logits(folder / "sharded", ids)
    if not np.array_equal(single, sharded):
        raise ValueError(f"{name}: single and sharded differ")
    print(
        f"{name}: logits of {single.shape}, standard deviation {single.std():.2f}, largest {np.abs(single).max():.2f}"
    )
    return {"config": CASES[name], "token_ids": ids, "weights_crc": digest(weights)}, single


def rope_table(head_dim: int, context: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Frequencies and attention factor."""
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=context, rope_parameters=dict(rope)
    )
    rotary = LlamaRotaryEmbedding(config)
    table = {"head_dim": head_dim, "max_position_embeddings": context, "rope_parameters": rope}
    return table | {"inv_freq": rotary.inv_freq.tolist(), "attention_factor": float(rotary.attention_scaling)}


def write_tiny(target: Path) -> None:
    """`target`.json (configurations, ids, rotary tables) and `target`.npz (logits of all positions)."""
    cases, arrays = {}, {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            cases[name], arrays[name] = golden(name, Path(folder))
    np.savez_compressed(target.with_suffix(".npz"), **arrays)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    ropes = {name: rope_table(*rope) for name, rope in ROPES.items()}
    body = {"made_with": made_with, "cases": cases, "ropes": ropes}
    target.with_suffix(".json").write_text(json.dumps(body, separators=(",", ":")).replace('},"', '},\n"') + "\n")
