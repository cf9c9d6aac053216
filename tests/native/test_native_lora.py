"""Adapters in the native program: merged weights are the oracle, in every format, instruction set and mix of rows."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_harness import Loaded, batches, forward
from native_harness import ISAS, prompt, weights_of
from tiny_checkpoints import CASES

from octavo.backends import native_lib as lib
from octavo.backends.adapters import AdapterRoom
from octavo.backends.native_backend import NativeBackend
from octavo.backends.native_program import StepLimits
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

ROOM = AdapterRoom(4, 24)
DENSE = sorted(name for name in CASES if "moe" not in name)


def compiled(name, kind="fp32", isa="", threads=1, weights=None, room=ROOM):
    backend = NativeBackend(isa, threads)
    model = build_model(ModelConfig.from_dict(CASES[name]))
    native = backend.compile(model, format=kind, kv_dtype="fp32", adapters=room)
    native.limits = StepLimits(max_tokens=512)
    given_weights = weights or weights_of(name)
    native.load(lambda weight: native.prepare(weight, given_weights[weight]))
    return Loaded(backend, native, {})


@functools.cache
def factors_of(name, seed, rank, ends):
    """Projection -> A, B, scale, from a seed."""
    rng = np.random.default_rng(seed)
    shapes = build_model(ModelConfig.from_dict(CASES[name])).projections()
    return {
        projection: (
            (rng.normal(size=(rank, k)) * 0.15).astype(np.float32),
            (rng.normal(size=(n, rank)) * 0.15).astype(np.float32),
            0.7,
        )
        for projection, (n, k) in shapes.items()
        if projection.endswith(ends)
    }


KINDS = ((1, 3, ("_proj",)), (2, 16, ("q_proj", "v_proj")), (3, 24, ("gate_proj", "down_proj")), (4, 1, ("up_proj",)))


def put_all(loaded, name, order=range(4)):
    places = loaded.model.adapter_places()
    for place, number in enumerate(order):
        places.put(place, places.pack(factors_of(name, *KINDS[number])))
    return places


def logits_of(loaded, sequences, adapters, chunk=64):
    """Logits of all positions of each sequence; adapters: places."""
    places, rows = loaded.model.adapter_places(), [[] for _ in sequences]
    chunks = [[min(chunk, len(ids) - at) for at in range(0, len(ids), chunk)] for ids in sequences]
    for step, (batch, owners) in enumerate(batches(loaded, sequences, chunks, 16)):
        live = [place for place, sizes in zip(adapters, chunks, strict=True) if step < len(sizes)]
        places.attach(batch, live)
        for owner, row in zip(owners, np.array(forward(loaded, batch)), strict=True):
            rows[owner].append(row)
    return [np.stack(each) for each in rows]


def merged_weights(name, kind):
    """The checkpoint of a case with an adapter in it."""
    weights = dict(weights_of(name))
    for projection, (a, b, scale) in factors_of(name, *kind).items():
        whole = weights[f"{projection}.weight"].astype(np.float64) + scale * b.astype(np.float64) @ a
        weights[f"{projection}.weight"] = whole.astype(np.float32)
    return weights


@pytest.mark.parametrize(
    ("name", "isa"), [*((name, ISAS[0]) for name in DENSE), *((DENSE[0], isa) for isa in ISAS[1:])]
)
def test_merged_weights_are_the_oracle(name, isa):
    """fp32: within 2e-4 of the merged model, relative to the logits' size, for each adapter; base rows beside them are
    those of the base model alone."""
    loaded = compiled(name, isa=isa)
    put_all(loaded, name)
    ids = prompt(name, 19)
    found = logits_of(loaded, [ids] * 5, [0, 1, 2, 3, -1])
    base = logits_of(compiled(name, isa=isa), [ids], [-1])[0]
    assert np.array_equal(found[4], base)
    for place, kind in enumerate(KINDS):
        merged = logits_of(compiled(name, isa=isa, weights=merged_weights(name, kind)), [ids], [-1])[0]
        size = 1 + np.sqrt(np.square(merged).mean())
        assert np.abs(found[place] - merged).max() / size < 2e-4
        assert np.abs(base - merged).max() / size > 1e-2


@pytest.mark.parametrize("isa", ISAS)
def test_factors_in_bf16_are_as_near_to_merged_weights_as_the_model_is_to_its_own(isa, monkeypatch):
    """In bf16, with ranks of all kinds and more inputs than are made operands at a time."""
    monkeypatch.setitem(CASES, "wide", {**CASES["llama"], "intermediate_size": 2090, "num_hidden_layers": 1})
    ids, kinds = prompt("wide", 19), [(rank, rank, ("_proj",)) for rank in (1, 3, 16, 40)]
    loaded = compiled("wide", "bf16", isa, room=AdapterRoom(4, 40))
    places = loaded.model.adapter_places()
    for place, kind in enumerate(kinds):
        places.put(place, places.pack(factors_of("wide", *kind)))
    found = logits_of(loaded, [ids] * 5, [0, 1, 2, 3, -1])
    base = logits_of(compiled("wide"), [ids], [-1])[0]
    rounding = np.sqrt(np.square(found[4] - base).mean())
    for place, kind in enumerate(kinds):
        merged = logits_of(compiled("wide", weights=merged_weights("wide", kind)), [ids], [-1])[0]
        error, effect = (np.sqrt(np.square(each - merged).mean()) for each in (found[place], base))
        assert error < 1.2 * rounding + 0.03 * effect, (kind[1], rounding, error, effect)


@pytest.mark.parametrize(("kind", "threads"), [("fp32", 1), ("fp32", 2), ("bf16", 2), ("w8g64", 2), ("w4g32", 2)])
def test_a_row_does_not_depend_on_the_mix(kind, threads):
    """Each sequence is, bit for bit, what it is alone: whatever adapters stand beside it, however it is cut."""
    name = DENSE[0]
    loaded, apart = compiled(name, kind, threads=threads), compiled(name, kind)
    put_all(loaded, name)
    put_all(apart, name)
    sequences = [prompt(f"{name} {i}", length) for i, length in enumerate((1, 5, 17, 40))]
    known = {}

    def alone(sequence, place):
        if (sequence, place) not in known:
            known[sequence, place] = logits_of(apart, [sequences[sequence]], [place])[0]
        return known[sequence, place]

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=24), st.sampled_from([1, 7, 64])
    )
    @settings(max_examples=8)
    def check(mix, chunk):
        found = logits_of(loaded, [sequences[s] for s, _ in mix], [place for _, place in mix], chunk)
        for (sequence, place), rows in zip(mix, found, strict=True):
            assert np.array_equal(rows, alone(sequence, place)), (sequence, place)

    check()


@pytest.mark.parametrize(("kind", "threads"), [("bf16", 2), ("w8g64", 2)])
def test_rows_that_are_put_in_order_are_given_back_in_theirs(kind, threads):
    """From 32 rows a thread on, a step of one token a sequence goes by adapters: each row is what it is alone."""
    name = DENSE[0]
    loaded, apart = compiled(name, kind, threads=threads), compiled(name, kind)
    put_all(loaded, name)
    put_all(apart, name)
    rng = np.random.default_rng(5)
    places = [int(place) for place in rng.choice([-1, -1, 0, 0, 0, 1, 2, 3], size=64)]
    prompts = [prompt(f"{name} {i}", 3) for i in range(7)]
    which = [int(i) for i in rng.integers(7, size=64)]
    alone = {
        (i, place): logits_of(apart, [prompts[i]], [place])[0] for i, place in set(zip(which, places, strict=True))
    }
    found = logits_of(loaded, [prompts[i] for i in which], places, chunk=1)
    for i, place, rows in zip(which, places, found, strict=True):
        assert np.array_equal(rows, alone[i, place]), (i, place)


def test_a_cleared_place_adds_nothing_and_another_place_is_the_same():
    name = DENSE[0]
    loaded = compiled(name)
    places = put_all(loaded, name)
    ids = prompt(name, 9)
    before = logits_of(loaded, [ids] * 5, [0, 1, 2, 3, -1])
    put_all(loaded, name, (3, 2, 1, 0))
    after = logits_of(loaded, [ids] * 4, [3, 2, 1, 0])
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=False))
    places.clear(2)
    assert np.array_equal(logits_of(loaded, [ids], [2])[0], before[4])


def test_what_the_library_refuses():
    loaded = compiled(DENSE[0])
    places = put_all(loaded, DENSE[0])
    library, handle = lib.library(), places.handle
    floats = np.zeros(1 << 16, np.float32).ctypes.data
    for place, target, rank in ((4, 0, 1), (-1, 0, 1), (0, 999, 1), (0, -1, 1), (0, 0, 0), (0, 0, 25)):
        assert library.octavo_adapters_set(handle, place, target, rank, floats, floats) < 0
    assert library.octavo_adapters_set(handle, 0, 0, 1, None, floats) < 0
    assert library.octavo_adapters_clear(handle, 4) < 0
    for place in (4, 1 << 20):
        with pytest.raises(InvalidInput, match="adapter"):
            logits_of(loaded, [[1, 2]], [place])
    target = lib.Target(8, 8)
    for count, rank, size in ((0, 4, 1), (1, 0, 1), (1, 513, 1), (1, 4, 0), (1 << 20, 4, 1)):
        assert not library.octavo_adapters_open(count, rank, target, size, 0)
