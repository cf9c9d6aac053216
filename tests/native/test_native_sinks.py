"""Sink tokens beside a window on native: what numpy gives, and the same bytes however a sequence is cut."""

from __future__ import annotations

import random
from collections import Counter
from copy import copy

import numpy as np
import pytest
from model_harness import Loaded, all_logits
from native_harness import CASES, ISAS, compiled, prompt, run, weights_of
from schedules import Stage
from test_native_same_bytes import cut
from test_native_schedules import SCRIPT, checkpoint

from octavo.backends import create_backend, native_lib
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import StreamingLLM
from octavo.engine.eviction import forgetful
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

NAME = "llama-biases"
POLICIES = (StreamingLLM(4, 20), StreamingLLM(1, 1), StreamingLLM(64, 90), StreamingLLM(17, 150))
LOSS = {"fp32": 2e-5, "bf16": 0.03, "int8": 0.06}  # of the largest logit


def on_numpy(policy: StreamingLLM) -> Loaded:
    ops, model = create_backend("numpy"), build_model(forgetful(ModelConfig.from_dict(CASES[NAME]), policy))
    weights = {name: ops.weight(name, model.prepare(name, values)) for name, values in weights_of(NAME).items()}
    return Loaded(ops, model, weights)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", LOSS)
def test_what_numpy_gives_and_the_same_bytes_however_it_is_cut(isa: str, kv_dtype: str) -> None:
    rng = random.Random(f"{isa} {kv_dtype}")
    for policy in rng.sample(POLICIES, 2):
        prompts = [prompt(f"{policy} {i}", length) for i, length in enumerate((rng.randint(150, 230), 70, 3))]
        alone = compiled(NAME, "fp32", kv_dtype, isa, eviction=policy)
        expected = [run(alone, [ids], [[len(ids)]])[0] for ids in prompts]
        for found, want in zip(expected, all_logits(on_numpy(policy), prompts), strict=True):
            assert np.abs(found - want).max() <= LOSS[kv_dtype] * np.abs(want).max(), policy
        threads, page_size = rng.choice([1, 2, 3]), rng.choice([16, 32, 64])
        loaded = compiled(NAME, "fp32", kv_dtype, isa, threads, policy)
        got = run(loaded, prompts, [cut(rng, len(ids)) for ids in prompts], page_size)
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert np.array_equal(a, b), (policy, threads, page_size, index)


@pytest.mark.parametrize("kv_dtype", LOSS)
def test_a_request_is_what_it_is_alone(kv_dtype: str) -> None:
    """Beside others, in any chunks and pages, preempted, on more threads; nothing comes from a cache."""
    made = copy(checkpoint("llama"))
    made.config = forgetful(made.config, StreamingLLM(5, 23))
    parts = {threads: made.parts(made.load("bf16", "", threads), kv_dtype) for threads in (1, 2)}
    stage = Stage(SCRIPT, parts, Counter())
    for seed in range(6):
        stage.play(random.Random(f"{kv_dtype} {seed}"), 1 + seed % 2, few=12)
    assert all(stage.seen[what] for what in ("kicked", "chunks", "mixed")) and not stage.seen["hits"], stage.seen


def test_a_library_that_knows_no_sinks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_lib, "most_sink_tokens", lambda: 0)
    with pytest.raises(InvalidInput, match="build it again"):
        compiled(NAME, eviction=POLICIES[0])
