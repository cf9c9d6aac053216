"""Waits that are ended from outside: the error comes out of the wait, and nothing of it is left behind."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from octavo.serve.interrupt import LINE, Interrupt, Line, while_there, within


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def no_cancel_is_left() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_ends_one_wait_and_no_other(done: bool) -> None:
    """Also where the work was done in the same turn of the loop."""

    async def go() -> None:
        loop, interrupt = asyncio.get_running_loop(), Interrupt()
        work = loop.create_future()
        if done:
            loop.call_soon(work.set_result, 1)
        loop.call_soon(interrupt, KeyError("first"))
        loop.call_soon(interrupt, KeyError("second"))
        with pytest.raises(KeyError, match="first"):
            await interrupt.wait(lambda: work)
        await no_cancel_is_left()
        with pytest.raises(KeyError, match="first"):  # whoever waits again gets it again
            await interrupt.wait(never)
        await no_cancel_is_left()

    asyncio.run(go())


def test_an_interrupt_between_waits_is_kept_for_the_next() -> None:
    async def go() -> None:
        interrupt = Interrupt()
        assert await interrupt.wait(lambda: asyncio.sleep(0, 5)) == 5
        interrupt(KeyError("late"))
        await no_cancel_is_left()
        with pytest.raises(KeyError):
            await interrupt.wait(never)

    asyncio.run(go())


def test_a_cancel_of_the_task_is_a_cancel() -> None:
    async def go() -> None:
        task = asyncio.ensure_future(within(9.0, never, KeyError("late")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lost_connection_ends_the_work_of_its_request(when: str) -> None:
    async def go() -> None:
        line, loop = Line(), asyncio.get_running_loop()
        if when == "before":
            line.lost()
        else:
            loop.call_soon(line.lost)
        with pytest.raises(ClientDisconnect):
            await while_there({LINE: line}, never, never)
        await no_cancel_is_left()

    asyncio.run(go())


def test_a_request_does_not_take_the_next_ones_ear_away() -> None:
    """On a kept connection the next request may begin before the one before it is over."""

    async def go() -> None:
        line, first = Line(), asyncio.get_running_loop().create_future()
        one = asyncio.ensure_future(while_there({LINE: line}, never, lambda: first))
        await asyncio.sleep(0)
        two = asyncio.ensure_future(while_there({LINE: line}, never, never))
        await asyncio.sleep(0)
        first.set_result(None)
        await one
        line.lost()
        with pytest.raises(ClientDisconnect):
            await two

    asyncio.run(go())
