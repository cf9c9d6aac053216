"""When a front end calls its engine stuck: it has work, and says nothing for so long as this loop was awake."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from link_world import FACTS

from octavo.core.params import SamplingParams
from octavo.serve.roles.remote import RemoteEngine

PATIENCE = 120.0


class Front:
    """A front end whose engine serves and says no word; its clock passes second by second, the loop going round."""

    def __init__(self) -> None:
        self.engine = RemoteEngine(
            FACTS, None, "api", send=lambda message: None, draw_seed=lambda: 1, patience=PATIENCE, apart=True
        )
        self.now = self.engine.clock()
        self.engine.clock = lambda: self.now
        self.engine.engine_up(1)
        self.tasks: list[asyncio.Task[None]] = []

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            self.engine.awake()

    async def ask(self) -> None:
        self.tasks.append(asyncio.ensure_future(self._read(str(len(self.tasks)))))
        await asyncio.sleep(0)
        assert self.engine.side.num_open

    async def give_up(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not self.engine.side.num_open

    async def _read(self, name: str) -> None:
        async for _ in self.engine.generate([1, 2], SamplingParams(max_tokens=2), request_id=name):
            pass


def run(play: Callable[[Front], Awaitable[None]]) -> None:
    async def whole() -> None:
        front = Front()
        await play(front)
        await front.give_up()

    asyncio.run(whole())


@pytest.mark.parametrize("idle", [1.0, PATIENCE + 10, 100 * PATIENCE])
def test_an_engine_without_work_may_be_silent_and_then_has_all_its_time(idle: float) -> None:
    """However long nobody asked: of requests at once, all but the first were refused until it had a token."""

    async def play(front: Front) -> None:
        for _ in range(2):
            front.wait(idle)
            assert front.engine.health_problem() is None
            await front.ask()
            assert front.engine.health_problem() is None
            front.wait(PATIENCE - 1)
            assert front.engine.health_problem() is None
            await front.give_up()
            front.tasks.clear()

    run(play)


def test_one_with_work_that_says_nothing_is_stuck_however_many_ask() -> None:
    async def play(front: Front) -> None:
        for _ in range(4):
            assert front.engine.health_problem() is None
            await front.ask()
            front.wait(PATIENCE / 4 + 1)
        assert "said nothing for 120 s" in (front.engine.health_problem() or "")

    run(play)
