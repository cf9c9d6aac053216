"""What rows look at on native, and prompts of which only some tokens stay: as numpy has it, always the same bytes."""

from __future__ import annotations

import random
from collections import Counter
from copy import copy
from typing import Any

import numpy as np
import pytest
from native_harness import CASES, ISAS, compiled, prompt, weights_of
from schedules import PAGE_SIZES, Stage
from test_native_schedules import SCRIPT, checkpoint

from octavo.backends import create_backend, native_lib
from octavo.backends.native_backend import NativeBackend
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import H2O, SnapKV, Voting
from octavo.core.kv_groups import KVGroup
from octavo.engine.eviction import forgetful
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

NAME = "llama-biases"
LOSS = {"fp32": 2e-5, "bf16": 0.02, "int8": 0.04}  # of a row's whole weight


def masses(backend: Any, model: Any, weights: Any, ids: list[int], window: int, page_size: int) -> Any:
    """[layers, kv heads, tokens] that the last ``window`` of ids look at, and whether looking changes their logits."""
    columns = -(-len(ids) // page_size)
    pool, table = backend.allocate_kv(columns, page_size, model.kv_groups()), [[list(range(columns))[::-1]]]
    whole = backend.batch(ids, range(len(ids)), [len(ids)], table, pool)
    first = np.array(model.forward(backend, weights, whole))
    start = len(ids) - window
    batch = backend.batch(ids[start:], range(start, len(ids)), [window], table, pool, no_write=[True])
    batch.mass = {}
    again = np.array(model.forward(backend, weights, batch))
    return np.stack([np.asarray(batch.mass[layer]) for layer in sorted(batch.mass)]), first, again


@pytest.mark.parametrize("name", [NAME, "three heads a group"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", LOSS)
def test_what_numpy_says_of_it_whatever_the_threads_and_pages(
    isa: str, kv_dtype: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "three heads a group", {**CASES[NAME], "num_attention_heads": 6})
    ops, plain = create_backend("numpy"), build_model(ModelConfig.from_dict(CASES[name]))
    handles = {each: ops.weight(each, plain.prepare(each, values)) for each, values in weights_of(name).items()}
    loaded = {threads: compiled(name, "fp32", kv_dtype, isa, threads) for threads in (1, 3)}
    for length, window in ((5, 1), (131, 40), (64, 64)):
        ids = prompt(f"{length}", length)
        expected, *_ = masses(ops, plain, handles, ids, window, 16)
        found = []
        for threads, page_size in ((1, 16), (3, 32)):
            made = loaded[threads]
            got, first, again = masses(made.ops, made.model, {}, ids, window, page_size)
            assert np.array_equal(first, again)  # the rows that look are those that were there
            assert np.abs(got - expected).max() <= LOSS[kv_dtype] * window
            found.append(got)
        assert np.array_equal(*found)


@pytest.mark.parametrize("kv_dtype", native_lib.KV_TYPES)
def test_what_stays_is_copied_bit_for_bit(kv_dtype: str) -> None:
    rng, size, layers, heads, dim = np.random.default_rng(1), 16, 2, 3, 12
    group = KVGroup((0, 1), num_kv_heads=heads, k_dim=dim, v_dim=dim, dtype=kv_dtype)
    pool = NativeBackend(threads=1).allocate_kv(9, size, (group,))
    sources, targets = [7, 2, 5], [0, 3]
    for place in range(48):
        shape = layers * heads * dim
        pool.write(
            sources[place // size], place % size, rng.normal(size=shape).tolist(), rng.normal(size=shape).tolist()
        )
    kept = np.sort([rng.permutation(48)[:20] for _ in range(layers * heads)], axis=1).reshape(layers, heads, 20)
    read = lambda pages, at: np.reshape(pool.read(pages[at // size], at % size), (2, layers, heads, dim))  # noqa: E731
    before = [read(sources, at) for at in range(48)]
    pool.keep(sources, targets, kept)
    for place in range(20):
        got = read(targets, place)
        for layer in range(layers):
            for head in range(heads):
                assert np.array_equal(got[:, layer, head], before[kept[layer, head, place]][:, layer, head])
    for at, was in enumerate(before):
        assert np.array_equal(read(sources, at), was)
    for wrong, reason in (
        ((sources, [0], kept), "too few places"),
        ((sources, [0, 9], kept), "page is out of range"),
        (([-1, 2, 5], targets, kept), "page is out of range"),
        ((sources[:1], targets, kept), "place is out of range"),
        ((sources, targets, kept - 48), "place is out of range"),
        ((sources, targets, kept[:1]), "2 layers"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            pool.keep(*wrong)


def test_steps_that_ask_for_what_is_not_defined_are_refused() -> None:
    made = compiled(NAME, threads=1)
    pool = made.ops.allocate_kv(8, 16, made.model.kv_groups())
    batch = made.ops.batch([1, 2], [0, 0], [1, 1], [[[0], [1]]], pool)
    batch.mass = {}
    with pytest.raises(InvalidInput, match="one sequence"):
        made.model.forward(made.ops, {}, batch)
    for shift in (-1, made.model.limits.max_positions):
        with pytest.raises(InvalidInput, match="shifted out of range"):
            made.model.forward(made.ops, {}, made.ops.batch([1], [0], [1], [[[0]]], pool, shifts=[shift]))
    windowed = compiled("gemma3", threads=1) if "gemma3" in CASES else None
    if windowed is not None:
        groups = windowed.model.kv_groups()
        pool = windowed.ops.allocate_kv(8, 16, groups)
        batch = windowed.ops.batch([1], [0], [1], [[[at]] for at in range(len(groups))], pool)
        batch.mass = {}
        with pytest.raises(InvalidInput, match="beside a window"):
            windowed.model.forward(windowed.ops, {}, batch)


@pytest.mark.parametrize("kv_dtype", LOSS)
@pytest.mark.parametrize("policy", [SnapKV(3, 2, 3), H2O(20, 9, block=16)])
def test_a_request_is_what_it_is_alone(kv_dtype: str, policy: Voting) -> None:
    """Beside others, in any chunks and pages, preempted, on more threads; nothing comes from a cache."""
    made = copy(checkpoint("llama"))
    made.config = forgetful(made.config, policy)
    parts = {threads: made.parts(made.load("bf16", "", threads), kv_dtype) for threads in (1, 2)}
    stage = Stage(SCRIPT, parts, Counter(), [size for size in PAGE_SIZES if policy.block % size == 0])
    for seed in range(6 if not policy.every else 4):  # not of a few requests: a machine's may all be too short
        stage.play(random.Random(f"{kv_dtype} {seed}"), 1 + seed % 2)
    assert all(stage.seen[what] for what in ("kicked", "chunks", "mixed", "compactions")), stage.seen
    assert not stage.seen["hits"]


def test_a_library_that_gives_no_mass_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_lib, "gives_mass", lambda: False)
    with pytest.raises(InvalidInput, match="build it again"):
        compiled(NAME, eviction=SnapKV())
