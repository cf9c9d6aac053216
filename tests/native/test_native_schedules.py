"""Promise 1 through the engine on `native`: tokens and logprobs depend on no batch, chunk, page, hit or preemption.

Each schedule draws requests, arrivals, budgets, page size and threads; every request is compared, bit for bit, with
itself alone on one thread. `OCTAVO_SCHEDULES` sets how many the default format gets.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter

import pytest
from engine_harness import FIXTURES, MODELS, Choice, Collector, assert_idle, run_to_end
from native_harness import ISAS, PAIRS
from test_same_bytes import PARAMS

from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.fixture import load_fixture
from octavo.engine.parts import ModelParts, build_core, parts_from_fixture

SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "25"))
MAX_SEQ_LEN = 120
_rng = random.Random(9)
_BASE = [_rng.randrange(4, 56) for _ in range(110)]
PROMPTS = [tuple(_BASE[:n]) for n in (1, 15, 16, 33, 64, 65, 100)]
PROMPTS += [tuple(_BASE[:n] + _BASE[-m:]) for n, m in ((40, 30), (62, 5), (16, 1))]
Setup = tuple[str, str, str, str]  # model, format, KV type, instruction set


@functools.cache
def parts(setup: Setup, threads: int) -> ModelParts:
    model, kind, kv_dtype, isa = setup
    fixture = load_fixture(FIXTURES / MODELS[model])
    return parts_from_fixture(fixture, backend="native", format=kind, kv_dtype=kv_dtype, isa=isa, threads=threads)


def make_core(setup: Setup, threads: int, page_size: int, num_pages: int, cache: bool, **scheduling: int) -> EngineCore:
    config = SchedulerConfig(max_seq_len=MAX_SEQ_LEN, **scheduling)
    made = parts(setup, threads)
    options = {"num_pages": num_pages, "page_size": page_size, "prefix_cache": cache}
    return build_core(made, scheduling=config, clock=lambda: 0.0, audit=True, **options)


def request(setup: Setup, name: str, prompt: int, params: int) -> Request:
    made = parts(setup, 1)
    eos = made.config.eos_token_ids
    return Request(name, PROMPTS[prompt], PARAMS[params], namespace=made.namespace(), eos_token_ids=eos)


@functools.cache
def alone(setup: Setup, prompt: int, params: int) -> list[Choice]:
    core, collector = make_core(setup, 1, 16, 200, False, max_batched_tokens=256, max_prefill_chunk=256), Collector()
    core.submit(request(setup, "alone", prompt, params), 0.0)
    run_to_end(core, collector)
    return [collector.choices["alone", choice] for choice in range(PARAMS[params].n)]


def play(setup: Setup, rng: random.Random, seen: Counter[str]) -> None:
    """One schedule: some requests arrive late, some lose their pages, the pool may be too small for all."""
    page_size, threads = rng.choice([16, 32, 64]), rng.choice([1, 2, 3, 4])
    one = len(parts(setup, 1).model.kv_groups()) * -(-MAX_SEQ_LEN // page_size)
    core = make_core(
        setup,
        threads,
        page_size,
        one + rng.choice([one // 2 + 2, 100]),
        rng.random() < 0.8,
        max_batched_tokens=rng.choice([16, 70, 256]),
        max_prefill_chunk=rng.choice([3, 7, 64, 256]),
        max_running_requests=rng.choice([2, 8]),
    )
    asked = [(rng.randrange(len(PROMPTS)), rng.randrange(len(PARAMS))) for _ in range(rng.randint(3, 8))]
    collector, waiting, kicks = Collector(), list(enumerate(asked)), 3
    while waiting or core.has_work:
        while waiting and rng.random() < 0.5:
            index, (prompt, params) = waiting.pop(0)
            core.submit(request(setup, f"r{index}", prompt, params), 0.0)
        running = core.scheduler._roster.running
        if kicks and running and rng.random() < 0.1:
            kicks -= 1
            core.scheduler._roster.preempt(rng.choice(list(running)), 0.0, "forced")
            seen["preempted"] += 1
        collector.take(core.step(0.0))
    assert_idle(core)
    seen["hits"] += sum(count > 0 for count in collector.cached.values())
    for index, (prompt, params) in enumerate(asked):
        for choice, expected in enumerate(alone(setup, prompt, params)):
            assert collector.choices[f"r{index}", choice] == expected, (index, prompt, params, page_size, threads)


def test_default_format_on_the_best_instruction_set() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        model = sorted(MODELS)[seed % 2]
        play((model, "auto", "auto", ""), random.Random(seed), seen)
    assert min(seen["preempted"], seen["hits"]) > 0, seen


@pytest.mark.parametrize(("kind", "kv_dtype"), PAIRS)
def test_every_pair_of_formats(kind: str, kv_dtype: str) -> None:
    """On a different instruction set each: all of them are covered by the logits in test_native_same_bytes.py."""
    isa = ISAS[PAIRS.index((kind, kv_dtype)) % len(ISAS)]
    for seed in range(max(2, SCHEDULES // 20)):
        play((sorted(MODELS)[seed % 2], kind, kv_dtype, isa), random.Random(f"{kind} {kv_dtype} {seed}"), Counter())
