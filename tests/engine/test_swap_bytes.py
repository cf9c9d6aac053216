"""Preemption by swap on real arithmetic: the same tokens and logprobs bit for bit; bad memory never reaches one."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import Collector, alone, assert_idle, make_core, make_request, pages_for, run_to_end, tiny_parts

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.parts import measure_swaps

PROMPTS = {f"r{i}": (1, 9 + i, 31, 44, 12, 7 + i, 50, 23) for i in range(4)}
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=2)


def crowd(model: str = "llama", *, backend: str = "reference", host_pages: int = 60, **scheduling: Any) -> Any:
    """Four requests in a pool for one and a half of them, run to their ends."""
    core, collector = make_core(
        model, backend=backend, num_pages=pages_for(model, 4, 36), host_pages=host_pages, max_preemptions=50,
        max_seq_len=32, **scheduling,
    ), Collector()  # fmt: skip
    for name, prompt in PROMPTS.items():
        core.submit(make_request(name, prompt, PARAMS, model), 0.0)
    decisions = spy(core)
    run_to_end(core, collector)
    assert_idle(core)
    return core, collector, decisions


def spy(core: Any) -> list[Any]:
    """The decisions that the engine executes from now on."""
    execute, seen = core.executor, []

    def run(decision: Any) -> Any:
        seen.append(decision)
        return execute(decision)

    core.executor = run
    return seen


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_those_that_come_back_say_the_same_as_alone(model: str, preemption: str) -> None:
    _, collector, decisions = crowd(model, preemption=preemption)
    for name, prompt in PROMPTS.items():
        assert [collector.choices[name, 0]] == alone(model, prompt, PARAMS)
    lost = [one.kind for decision in decisions for one in decision.preemptions]
    assert lost and set(lost) == {preemption}
    comes_back = preemption == "swap" and model == "llama"  # a column that a window has passed is not kept
    assert any(decision.swap_ins for decision in decisions) >= comes_back


def test_numpy_pages_come_back_as_they_were() -> None:
    _, with_host, decisions = crowd(backend="numpy", preemption="swap")
    _, without, _ = crowd(backend="numpy", host_pages=0)
    assert any(decision.swap_ins for decision in decisions)
    assert with_host.choices == without.choices


def test_memory_that_went_bad_costs_a_step_and_nothing_else() -> None:
    flipped = []
    core, collector = make_core(num_pages=9, host_pages=60, max_preemptions=50, max_seq_len=32), Collector()
    execute = core.executor

    def run(decision: Any) -> Any:
        if decision.swap_ins and len(flipped) < 2:
            page = decision.swap_ins[0].source
            execute.__self__.tiers.host.view(page)[0] ^= 1
            flipped.append(page)
        return execute(decision)

    core.executor = run
    for name, prompt in PROMPTS.items():
        core.submit(make_request(name, prompt, PARAMS), 0.0)
    run_to_end(core, collector)
    assert len(flipped) == 2
    for name, prompt in PROMPTS.items():
        assert [collector.choices[name, 0]] == alone("llama", prompt, PARAMS)
    failed = [event for event in core.scheduler.timeline if event["kind"] == "rollback"]
    assert [event["corrupt"][0] for event in failed] == flipped
    assert "do not hold what was written" in failed[0]["error"]


def test_a_decision_that_is_sent_again_does_not_save_what_took_the_place() -> None:
    core = make_core(num_pages=9, host_pages=60, max_preemptions=50, max_seq_len=32)
    execute, again = core.executor, []

    def run(decision: Any) -> Any:
        result = execute(decision)
        if not decision.swap_outs:
            return result
        again.append(decision)
        return execute(decision)

    core.executor = run
    collector = Collector()
    for name, prompt in PROMPTS.items():
        core.submit(make_request(name, prompt, PARAMS), 0.0)
    run_to_end(core, collector)
    assert again
    for name, prompt in PROMPTS.items():
        assert [collector.choices[name, 0]] == alone("llama", prompt, PARAMS)


def test_the_rate_of_swaps_is_measured() -> None:
    core = make_core(host_pages=4, page_size=4)
    assert core.scheduler.config.host_mb_per_s >= 1
    runner = core.executor.__self__
    assert measure_swaps(tiny_parts("llama").backend, runner.kv_pool, runner.tiers.host, 10**9) > 1


def test_the_setting_is_checked() -> None:
    assert EngineConfig(host_kv_memory="2MiB").host_kv_bytes == 2 << 20 and EngineConfig().host_kv_bytes == 0
    for bad in ({"host_kv_memory": "much"}, {"preemption": "maybe"}, {"host_kv_memory": "1MB", "prefix_cache": False}):
        with pytest.raises(InvalidInput):
            EngineConfig(**bad)
