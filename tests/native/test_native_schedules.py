"""Promise 1 through the engine on `native`, on models of two layers: see schedules.py.

`OCTAVO_SCHEDULES` for the default format on the best instruction set, as many for the model of one KV group as for that
of two; a twentieth of them for every other format, KV type and instruction set that this machine has.
"""

from __future__ import annotations

import functools
import os
import random
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from native_harness import ISAS
from schedules import PAGE_SIZES, THREADS, WHAT_HAPPENS, Checkpoint, Script, Stage
from test_same_bytes import PARAMS

from octavo.backends.native_formats import resolve_kv_dtype
from octavo.backends.native_lib import FORMATS, KV_TYPES
from octavo.backends.operand_types import OPERANDS
from octavo.core.params import SamplingParams
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "200"))
EVERY = max(2, SCHEDULES // 20)
VOCAB = 300
DEFAULT = "bf16"  # what `--format auto` is for a checkpoint of floats
# inner widths and heads are no multiples of what kernels step by; several panels of outputs for several threads
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 40,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "gemma3": _SIZES
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
        "rope_local_base_freq": 50.0,
    },
}
_rng = random.Random(9)
_BASE = [_rng.randrange(4, VOCAB) for _ in range(110)]
PROMPTS = [tuple(_BASE[:n]) for n in (1, 15, 16, 33, 64, 65, 100)]
PROMPTS += [tuple(_BASE[:n] + _BASE[-m:]) for n, m in ((40, 30), (62, 5), (16, 1))]
LONG = SamplingParams(temperature=0.9, max_tokens=20, seed=4, ignore_eos=True, logprobs=0)  # grows out of its pages
SCRIPT = Script(PROMPTS, [*PARAMS, LONG], max_seq_len=120)


def draw(name: str, shape: tuple[int, ...]) -> Any:
    """A weight of random numbers that keeps activations about one."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1, 1, shape)
    return noise * 0.5 + 0.8 if len(shape) == 1 else noise * (3 / shape[1]) ** 0.5


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    shapes = build_model(ModelConfig.from_dict(CONFIGS[name])).weight_shapes()
    return Checkpoint(name, CONFIGS[name], lambda weight: draw(weight, tuple(shapes[weight])))


@functools.lru_cache(maxsize=len(CONFIGS) * 4)  # of one format: KV types come one after another
def packed(name: str, kind: str, isa: str, threads: int) -> Any:
    return checkpoint(name).load(kind, isa, threads)


def stage(name: str, kind: str, kv_dtype: str, isa: str, seen: Counter[str]) -> Stage:
    made = checkpoint(name)
    parts = {threads: made.parts(packed(name, kind, isa, threads), kv_dtype) for threads in sorted(set(THREADS))}
    return Stage(SCRIPT, parts, seen)


def test_default_format_on_the_best_instruction_set() -> None:
    """Every page size on every number of threads, and all that can happen to a request, many times over."""
    seen: Counter[str] = Counter()
    for name in CONFIGS:
        there = stage(name, DEFAULT, resolve_kv_dtype("auto", DEFAULT), ISAS[0], seen)
        for number in range(SCHEDULES // 2):
            there.play(random.Random(f"{name} {number}"), THREADS[number % len(THREADS)])
    assert min(seen[what] for what in WHAT_HAPPENS) > SCHEDULES / 20, seen
    if SCHEDULES >= 200:
        assert seen["squeezed"] > SCHEDULES / 50, seen
        assert all(seen[f"{size}x{threads}"] for size in PAGE_SIZES for threads in THREADS), seen


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_format_and_kv_type_on_every_instruction_set(isa: str, kind: str, kv_dtype: str) -> None:
    seen: Counter[str] = Counter()
    names = sorted(CONFIGS)
    there = {name: stage(name, kind, kv_dtype, isa, seen) for name in names}
    for number in range(2 * EVERY):  # as many more where something has not happened yet
        if number < EVERY or (EVERY >= 10 and not all(seen[what] for what in WHAT_HAPPENS)):
            rng = random.Random(f"{isa} {kind} {kv_dtype} {number}")
            there[names[number // 2 % 2]].play(rng, THREADS[number % len(THREADS)], few=8)
    assert seen["schedules"] >= EVERY
    assert EVERY < 10 or all(seen[what] for what in WHAT_HAPPENS), seen


def test_nothing_is_left_out() -> None:
    """What can be named can be run: a format that only the table of operands knows would be played by nobody."""
    assert set(FORMATS) == set(OPERANDS)
    assert {resolve_kv_dtype("auto", kind) for kind in FORMATS} <= set(KV_TYPES)
