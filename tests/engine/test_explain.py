"""What a request's causes add up to is what the engine's own clock says of it."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine_harness import make_request, tiny_parts

from octavo.core.explain import explain
from octavo.core.history import history_of
from octavo.core.params import SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.loader import LoadedEngine
from octavo.engine.parts import build_core


class Ticking:
    """A clock that goes on by a millisecond with every reading; ``soon`` is what the next one will be."""

    soon = 0.001

    def __call__(self) -> float:
        reading, self.soon = self.soon, self.soon + 0.001
        return reading


def make(clock, **scheduling):
    config = SchedulerConfig(max_seq_len=96, **scheduling)
    return build_core(tiny_parts("llama"), num_pages=40, page_size=4, scheduling=config, clock=clock)


def test_causes_add_up_to_what_the_metrics_measured():
    clock = Ticking()
    core = make(clock, max_running_requests=3, max_prefill_chunk=5)
    for i in range(9):
        params = SamplingParams(temperature=0.0, max_tokens=5 + i)
        now = clock()
        core.submit(make_request(f"r{i}", [1, *range(5, 9 + 2 * i)], params, arrival=now), now)
        for _ in range(i % 3):
            core.step(clock.soon)
            core.delivered(clock())
    while core.has_work:
        core.step(clock.soon)
        core.delivered(clock())
    history = history_of(core.scheduler.timeline)
    assert len(history.lives) == 9
    for name, life in history.lives.items():
        times = core.metrics.requests[name]
        total = explain(history, name).total
        assert total == pytest.approx(life.wall, abs=1e-6)
        text_of_last = life.end - times.finished  # the metrics end with the step, a life with its text
        assert 0 < text_of_last < 0.01
        assert total - text_of_last == pytest.approx(times.finished - times.submitted, rel=0.01)
        assert life.first_token - life.arrival == pytest.approx(times.ttft, rel=0.01)
        assert life.outputs == times.num_output_tokens


def test_a_reader_who_takes_his_time_is_a_cause():
    async def body():
        core = make(time.monotonic)
        parts = tiny_parts("llama")
        async with AsyncEngine(LoadedEngine(None, parts, None, core, 96, 96)) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=3)
            async for delta in engine.generate([1, 5, 6], params, request_id="slow"):
                if delta.last:
                    await asyncio.sleep(0.05)
        life = history_of(core.scheduler.timeline).lives["slow"]
        assert life.sums["client"] > 0.04
        assert sum(life.sums.values()) == pytest.approx(life.wall)

    asyncio.run(body())


def test_who_is_turned_away_at_the_door_is_in_the_timeline():
    async def body():
        core = make(time.monotonic)
        async with AsyncEngine(LoadedEngine(None, tiny_parts("llama"), None, core, 96, 96)) as engine:
            engine.note_refusal("late", "the server is full", 429, 2.0)
            async for _ in engine.generate([1, 5], SamplingParams(temperature=0.0, max_tokens=1)):
                pass
        [refused] = history_of(core.scheduler.timeline).refused
        assert (refused["request"], refused["status"], refused["retry_after"]) == ("late", 429, 2.0)

    asyncio.run(body())
