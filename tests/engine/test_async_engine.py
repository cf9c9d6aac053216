"""AsyncEngine: many readers, one engine thread; nothing mixes, nothing hangs, pages come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from engine_harness import FIXTURES, assert_idle

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.engine.async_engine import AsyncEngine, EngineStopped
from octavo.engine.config import EngineConfig
from octavo.engine.output import OutputDelta

TINY = str(FIXTURES / "tiny_model.json")
DATA = json.loads((FIXTURES / "tiny_model.json").read_text(encoding="utf-8"))
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def make(**options: Any) -> AsyncEngine:
    config = EngineConfig(TINY, backend="reference", page_size=4, audit=True, **options)
    return AsyncEngine.load(config, say=lambda line: None)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


async def read(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, params, **options)]


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing to do, then check that every page is back."""
    while engine.loaded.core.has_work:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.shutdown)
    assert_idle(engine.loaded.core)


def test_many_readers_each_get_their_own_tokens() -> None:
    async def body() -> None:
        engine = make(max_running_requests=5)
        requests = [r for r in DATA["scenario"]["requests"] if r["id"] != "cancelled"] * 4
        jobs = [
            read(engine, r["prompt_token_ids"], SamplingParams(temperature=0.0, max_tokens=r["max_tokens"]))
            for r in requests
        ]
        for request, deltas in zip(requests, await asyncio.gather(*jobs), strict=True):
            golden = DATA["golden"]["requests"][request["id"]]
            assert tokens(deltas) == golden["token_ids"]
            assert deltas[-1].finish_reason == golden["finish_reason"]
            assert [delta.last for delta in deltas].count(True) == 1
        await idle(engine)

    run(body())


def test_text_prompts_choices_and_stop_strings() -> None:
    async def body() -> None:
        async with make() as engine:
            params = SamplingParams(temperature=0.0, max_tokens=24, stop="9", n=2)
            deltas = await read(engine, "the quick brown fox jumps over", params)
            for choice in range(2):
                mine = [delta for delta in deltas if delta.choice == choice]
                assert "".join(delta.text for delta in mine) == "mpp0s"
                assert (mine[-1].finish_reason, mine[-1].stop_reason) == ("stop", "9")

    run(body())


def stand_still(monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine, after: int) -> Callable[[], None]:
    """Steps do nothing after so many: no answer that takes more of them ends before what is given back is called."""
    core, count = engine.loaded.core, 0
    step = core.step

    def few(now: float) -> Any:
        nonlocal count
        count += 1
        if count <= after:
            return step(now)
        core.idle = True
        return ()

    monkeypatch.setattr(core, "step", few)
    return lambda: monkeypatch.setattr(core, "step", step)


def test_closing_the_iterator_cancels_and_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine = make()
        go_on = stand_still(monkeypatch, engine, 20)
        stream = engine.generate([1, 5, 6, 7], LONG, request_id="gone")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        go_on()
        assert len(tokens(await read(engine, [1, 5], SamplingParams(temperature=0.0, max_tokens=3)))) == 3
        await idle(engine)
        assert engine.loaded.core.metrics.finished["cancelled"] == 1

    run(body())


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_cancelled_task_frees_its_request(turns: int) -> None:
    async def body() -> None:
        engine = make()
        task = asyncio.create_task(read(engine, [1, 5, 6, 7], LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        await idle(engine)

    run(body())


def test_refusals_reach_their_caller_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with make() as engine:
            other = asyncio.create_task(read(engine, [1, 9], SamplingParams(temperature=0.0, max_tokens=8)))
            for prompt in ([], [1, 999], [5] * 200):
                with pytest.raises(InvalidInput):
                    await read(engine, prompt, LONG)
            with pytest.raises(InvalidInput, match="cache_salt"):
                await read(engine, [1, 5], LONG, cache_salt=5)
            assert len(tokens(await other)) == 8
            go_on = stand_still(monkeypatch, engine, 20)
            stream = engine.generate([1, 5], LONG, request_id="same")
            first = await anext(stream)
            with pytest.raises(InvalidInput, match="same"):
                await read(engine, [1, 5], LONG, request_id="same")
            go_on()
            assert len(tokens([first, *[delta async for delta in stream]])) == 60  # it was not disturbed

    run(body())


@pytest.mark.parametrize("kind", [MemoryError, BaseException])
def test_an_error_in_the_loop_reaches_every_reader(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    async def body() -> None:
        engine = make()
        step, count = engine.loaded.core.step, 0

        def failing(now: float) -> Any:
            nonlocal count
            count += 1
            if count == 4:
                raise kind("injected")
            return step(now)

        monkeypatch.setattr(engine.loaded.core, "step", failing)
        results = await asyncio.gather(*(read(engine, [1, 5 + i], LONG) for i in range(3)), return_exceptions=True)
        assert all(isinstance(result, EngineStopped) and "injected" in str(result) for result in results)
        with pytest.raises(EngineStopped):
            await read(engine, [1, 5], LONG)
        assert "injected" in (engine.health_problem() or "")
        engine.shutdown()

    run(body())


def test_steps_do_not_wait_for_readers_and_nothing_overtakes_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine, gate = make(), threading.Event()
        engine._outbox.put(gate.wait)
        whole = asyncio.create_task(read(engine, [1, 5, 6], LONG))
        while not engine.stats()["steps"] or engine.loaded.core.has_work:
            await asyncio.sleep(0.001)
        assert not whole.done()
        gate.set()
        assert len(tokens(await whole)) == 60

        gate.clear()
        step, count = engine.loaded.core.step, 0

        def failing(now: float) -> Any:
            nonlocal count
            count += 1
            if count == 4:
                raise MemoryError("injected")
            return step(now)

        monkeypatch.setattr(engine.loaded.core, "step", failing)
        engine._outbox.put(gate.wait)
        stream, seen = engine.generate([1, 5, 6], LONG), []

        async def follow() -> None:
            async for delta in stream:
                seen.append(delta)

        follower = asyncio.create_task(follow())
        while engine.health_problem() is None:
            await asyncio.sleep(0.001)
        gate.set()
        with pytest.raises(EngineStopped):
            await follower
        assert len(tokens(seen)) == 3
        engine.shutdown()

    run(body())


def test_work_without_progress_is_no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with make() as engine:
            core, now, calls = engine.loaded.core, [engine.clock()], 0
            step = core.step
            monkeypatch.setattr(engine, "clock", lambda: now[0])

            def nothing_runs(_: float) -> Any:
                nonlocal calls
                core.idle, calls = True, calls + 1
                return ()

            async def pass_time(seconds: float) -> None:
                now[0] += seconds
                until = calls + 3
                while calls < until:
                    await asyncio.sleep(0.001)

            monkeypatch.setattr(core, "step", nothing_runs)
            waiting = asyncio.create_task(
                read(engine, [1, 5], SamplingParams(max_tokens=2, ignore_eos=True), request_id="stuck")
            )
            await pass_time(0)
            await pass_time(119)
            assert engine.health_problem() is None
            await pass_time(2)
            assert "stuck" in (engine.health_problem() or "")
            monkeypatch.setattr(core, "step", step)
            assert len(tokens(await waiting)) == 2
            now[0] += 1000
            while core.has_work:
                await asyncio.sleep(0.001)
            assert engine.health_problem() is None

    run(body())


def test_an_error_in_the_model_ends_its_request_alone() -> None:
    async def body() -> None:
        engine = make()
        execute = engine.loaded.core.executor

        def failing(decision: Any) -> Any:
            if any(row.request_id == "bad" for row in decision.rows):
                raise ValueError("injected")
            return execute(decision)

        engine.loaded.core.executor = failing
        good = asyncio.create_task(read(engine, [1, 9], SamplingParams(temperature=0.0, max_tokens=8)))
        bad = await read(engine, [1, 5], LONG, request_id="bad")
        assert bad[-1].finish_reason == "error"
        assert "injected" in (bad[-1].error or "")
        assert len(tokens(await good)) == 8
        assert engine.health_problem() is None
        await idle(engine)

    run(body())


def test_shutdown_ends_readers_and_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine = make()
        stand_still(monkeypatch, engine, 20)
        stream = engine.generate([1, 5, 6], LONG)
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStopped):
            while True:
                await anext(stream)
        engine.shutdown()
        assert_idle(engine.loaded.core)
        with pytest.raises(EngineStopped):
            await read(engine, [1, 5], LONG)
        assert "shut down" in (engine.health_problem() or "")

    run(body())


def test_a_reader_that_never_reads_holds_up_nobody() -> None:
    async def body() -> None:
        engine = make()
        slow = engine.generate([1, 5, 6], LONG)
        first = await anext(slow)
        for _ in range(3):
            assert len(tokens(await read(engine, [1, 9], SamplingParams(temperature=0.0, max_tokens=30)))) > 0
        while engine.loaded.core.has_work:
            await asyncio.sleep(0.001)
        rest = [delta async for delta in slow]
        assert len(tokens([first, *rest])) == 60
        assert len(rest) <= 2  # what was not read was merged
        await idle(engine)

    run(body())


def test_two_event_loops_at_once() -> None:
    engine = make()
    answers: dict[int, list[int]] = {}

    def client(index: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        answers[index] = tokens(asyncio.run(read(engine, DATA["scenario"]["requests"][0]["prompt_token_ids"], params)))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == dict.fromkeys(range(2), DATA["golden"]["requests"]["short"]["token_ids"])
    engine.shutdown()


def test_a_reader_whose_loop_is_gone_is_cancelled() -> None:
    engine = make()

    async def abandon() -> None:
        stream = engine.generate([1, 5, 6], LONG)
        await anext(stream)
        loop = asyncio.get_running_loop()
        loop.set_asyncgen_hooks = None  # type: ignore[assignment, method-assign]

    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()  # the generator was never closed
    run(idle(engine))


def test_stats_are_numbers() -> None:
    async def body() -> None:
        async with make() as engine:
            before = engine.stats()
            await read(engine, [1, 5, 6], SamplingParams(temperature=0.0, max_tokens=4))
            after = engine.stats()
            assert after["output_tokens"] == before["output_tokens"] + 4
            assert after["steps"] > before["steps"]
            assert after["pages_total"] == after["pages_free"] + after["pages_cached"]
            assert all(isinstance(value, (int, float)) for value in after.values())
            assert (engine.model_name, engine.vocab_size, engine.max_seq_len) == ("tiny-llama", 56, 128)
            assert engine.health_problem() is None

    run(body())
