"""Pooled states: what they are, and that they are the same bytes whatever runs beside them and however they are cut."""

from __future__ import annotations

import array
import functools
import random
import struct
from typing import Any

import pytest
from engine_harness import (
    FIXTURES,
    MODELS,
    Collector,
    assert_idle,
    make_core,
    make_request,
    run_to_end,
    tiny_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.params import POOLINGS, SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.fixture import load_fixture
from octavo.engine.parts import build_core, parts_from_fixture

POOLED = {kind: SamplingParams(max_tokens=0, pooling=kind) for kind in POOLINGS}
BACKENDS = ("reference", "native", "numpy")


def oracle(prompt: tuple[int, ...], kind: str) -> list[float]:
    """One pass over the whole prompt on the reference, and the definition of each kind."""
    parts = tiny_parts("llama")
    ops = parts.backend
    pool = ops.allocate_kv(64, 4, parts.model.kv_groups())
    pages = list(range(-(-len(prompt) // 4)))
    batch = ops.batch(prompt, range(len(prompt)), [len(prompt)], [[pages]], pool)
    states = parts.model.hidden(ops, parts.weights, batch)
    if kind == "mean":
        return [sum(column) / len(prompt) for column in zip(*states, strict=True)]
    return list(states[-1] if kind == "last" else states[0])


def values(hidden: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(hidden) // 4}f", hidden))


@functools.cache
def vector(backend: str, prompt: tuple[int, ...], kind: str) -> bytes:
    """A request alone, in one step."""
    core, collector = make_core(page_size=16, prefix_cache=False, backend=backend, max_prefill_chunk=96), Collector()
    return vector_of(core, collector, prompt, kind)


def vector_of(core: Any, collector: Collector, prompt: tuple[int, ...], kind: str) -> bytes:
    core.submit(make_request("alone", prompt, POOLED[kind]), 0.0)
    run_to_end(core, collector)
    return collector.choices["alone", 0].hidden


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", POOLINGS)
def test_the_vector_is_the_pooled_final_state(backend: str, kind: str) -> None:
    rng = random.Random(kind)
    for length in (1, 2, 17, 40):
        prompt = tuple(rng.randrange(3, 50) for _ in range(length))
        exact = {"format": "fp32", "kv_dtype": "fp32"} if backend == "native" else {}
        parts = parts_from_fixture(load_fixture(FIXTURES / MODELS["llama"]), backend=backend, **exact)
        scheduling = SchedulerConfig(max_seq_len=96)
        core = build_core(parts, num_pages=8, page_size=16, scheduling=scheduling, audit=True)
        expected, got = oracle(prompt, kind), values(vector_of(core, Collector(), prompt, kind))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
        if backend == "reference":
            assert array.array("f", got) == array.array("f", expected)


PROMPTS = st.tuples(st.integers(0, 3), st.integers(1, 40))  # which beginning, and how long
ASKED = st.lists(st.tuples(PROMPTS, st.sampled_from([*POOLINGS, "tokens"]), st.integers(0, 4)), min_size=2, max_size=8)


def prompt_of(which: int, length: int) -> tuple[int, ...]:
    """Beginnings that share their first half in pairs."""
    common, own = random.Random(which // 2), random.Random(which + 10)
    return tuple((common if i < 20 else own).randrange(3, 50) for i in range(length))


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_the_same_bytes_whatever_runs_beside(backend: str) -> None:
    seen = {"hits": 0, "preemptions": 0, "failures": 0}

    @settings(max_examples=12, deadline=None)
    @given(ASKED, st.integers(1, 24), st.integers(4, 60), st.integers(0, 40), st.randoms(use_true_random=False))
    def play(asked: Any, chunk: int, budget: int, spare: int, rng: random.Random) -> None:
        size = 16 if backend == "native" else 4
        pages = -(-48 // size) + spare // size
        core = make_core(
            page_size=size, num_pages=pages, backend=backend, max_prefill_chunk=chunk, max_batched_tokens=budget
        )
        fail_sometimes(core, rng, seen)
        collector, waiting = Collector(), sorted(enumerate(asked), key=lambda pair: pair[1][2])
        step = 0
        while waiting or core.has_work:
            while waiting and waiting[0][1][2] <= step:
                number, (prompt, kind, _) = waiting.pop(0)
                params = POOLED.get(kind) or SamplingParams(max_tokens=6, temperature=0.0)
                core.submit(make_request(f"r{number}", prompt_of(*prompt), params), 0.0)
            if rng.random() < 0.2 and core.scheduler.roster.running:
                core.scheduler.roster.preempt(rng.choice(core.scheduler.roster.running), 0.0, "forced")
                seen["preemptions"] += 1
            collector.take(core.step(0.0))
            step += 1
        assert_idle(core)
        for number, (prompt, kind, _) in enumerate(asked):
            choice = collector.choices[f"r{number}", 0]
            seen["hits"] += kind == "last" and collector.cached[f"r{number}"] > 0
            if kind != "tokens":
                assert choice.tokens == [] and choice.finish_reason == "stop"
                assert choice.hidden == vector(backend, prompt_of(*prompt), kind), (number, kind)

    play()
    assert all(seen.values()), seen


def fail_sometimes(core: Any, rng: random.Random, seen: dict[str, int]) -> None:
    """Steps fail now and then, before the model has run or after it; what is retried must not count twice."""
    execute = core.executor

    def failing(decision: Any) -> Any:
        fails = rng.random() < 0.15 and len(decision.rows) > 1
        seen["failures"] += fails
        if fails and rng.random() < 0.5:
            execute(decision)
        if fails:
            raise OSError("injected")
        return execute(decision)

    core.executor = failing


def test_pooling_and_decoding_share_steps_and_pages_are_free_at_the_end() -> None:
    core, collector = make_core(max_prefill_chunk=8), Collector()
    mixed = []
    execute = core.executor

    def watching(decision: Any) -> Any:
        mixed.append({row.flags.hidden for row in decision.rows})
        return execute(decision)

    core.executor = watching
    core.submit(make_request("talk", prompt_of(0, 6), SamplingParams(max_tokens=12, temperature=0.0)), 0.0)
    collector.take(core.step(0.0))
    for kind in POOLINGS:
        core.submit(make_request(kind, prompt_of(2, 30), POOLED[kind]), 0.0)
    run_to_end(core, collector)
    assert {True, False} in mixed
    assert_idle(core)


def test_a_cached_prefix_serves_last_and_is_computed_again_for_the_others() -> None:
    core, collector = make_core(), Collector()
    for name, kind in (("first", "last"), ("again", "last"), ("mean", "mean"), ("cls", "cls")):
        core.submit(make_request(name, prompt_of(0, 30), POOLED[kind]), 0.0)
        run_to_end(core, collector)
    assert collector.cached == {"first": 0, "again": 29, "mean": 0, "cls": 0}
    assert collector.choices["again", 0] == collector.choices["first", 0]


def test_a_row_without_a_finite_state_fails_alone() -> None:
    core, collector = make_core(), Collector()
    parts = tiny_parts("llama")
    broken = dict(parts.weights)
    rows = [list(row) for row in broken["model.embed_tokens.weight"]]
    rows[7] = [float("nan")] * len(rows[7])
    broken["model.embed_tokens.weight"] = rows
    core.executor.__self__.weights = broken
    core.submit(make_request("bad", (7, 9), POOLED["mean"]), 0.0)
    core.submit(make_request("good", (8, 9), POOLED["mean"]), 0.0)
    run_to_end(core, collector)
    assert "finite hidden state" in (collector.choices["bad", 0].error or "")
    assert collector.choices["good", 0].hidden


def test_an_error_of_a_row_ends_its_request() -> None:
    core, collector = make_core(), Collector()
    execute = core.executor

    def silent(decision: Any) -> Any:
        result = execute(decision)
        for row in result.rows:
            row.hidden = b""
        return result

    core.executor = silent
    core.submit(make_request("r", (8, 9), POOLED["last"]), 0.0)
    run_to_end(core, collector)
    assert "no pooled state" in (collector.choices["r", 0].error or "")


@pytest.mark.parametrize(("field", "value"), [("pooling", "max"), ("max_tokens", 3), ("n", 2), ("prompt_logprobs", 1)])
def test_what_cannot_be_pooled_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**{"max_tokens": 0, "pooling": "last", field: value})
    assert caught.value.field == field
