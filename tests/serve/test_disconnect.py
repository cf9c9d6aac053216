"""A client that leaves, or stops reading: its work is cancelled and its place is free again.

What the engine holds is checked inside the event loop: its end cancels whatever was forgotten.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine
from serve_http import CHAT, HELLO, Client, make_app, send

LONG = {"messages": [{"role": "user", "content": "long " * 60}]}


async def ended(running: asyncio.Future[None]) -> None:
    """Wait until the application is done. No `wait_for`: what ignores a cancel would hang it."""
    done, _ = await asyncio.wait({running}, timeout=5)
    assert done, "the request has not ended"
    running.result()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [1, 3])
def test_leaving_before_the_first_token_cancels(stream: bool, many: int) -> None:
    engine = FakeEngine(hold=True)

    async def go() -> None:
        path, body = (CHAT, HELLO) if many == 1 else ("/v1/completions", {"prompt": ["a"] * many})
        client = Client(make_app(engine), path, {**body, "stream": stream})
        running = asyncio.ensure_future(client.run())
        while engine.live < many:
            await asyncio.sleep(0)
        client.leave()
        await ended(running)
        assert (engine.live, engine.cancelled) == (0, many)

    asyncio.run(go())


def test_leaving_in_the_middle_of_a_stream_cancels() -> None:
    engine = FakeEngine()

    async def go() -> list[dict[str, Any]]:
        client = Client(make_app(engine), CHAT, {**LONG, "stream": True})
        running = asyncio.ensure_future(client.run())
        await client.until_sent(5)
        client.leave()
        await ended(running)
        assert (engine.live, engine.cancelled) == (0, 1)
        return client.sent

    sent = asyncio.run(go())
    assert sent[-1]["more_body"] and len(sent) < 40  # it did not run to its end


def test_a_client_that_does_not_read_is_cut() -> None:
    engine = FakeEngine(hold_after=200)  # it runs ahead of the client, and would not end by itself

    async def go() -> list[dict[str, Any]]:
        client = Client(make_app(engine, stall_timeout=0.02), CHAT, {**LONG, "stream": True})
        running = asyncio.ensure_future(client.run())
        await client.until_sent(3)
        client.block_send = True
        await ended(running)
        assert (engine.live, engine.cancelled) == (0, 1)
        return client.sent

    assert len(asyncio.run(go())) < 40


def test_places_are_given_back_by_whoever_leaves() -> None:
    engine = FakeEngine()
    app = make_app(engine, max_pending=1)

    async def leave_at_once(stream: bool) -> None:
        client = Client(app, CHAT, {**LONG, "stream": stream})
        client.leave()
        await ended(asyncio.ensure_future(client.run()))
        assert engine.live == 0

    for stream in (False, True):
        asyncio.run(leave_at_once(stream))
        assert send(app, "POST", CHAT, json=HELLO).status_code == 200
    assert engine.live == 0
