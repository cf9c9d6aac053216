"""Overload over HTTP: what is too much is refused in OpenAI's shape with Retry-After; first tokens are foretold."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serve_http import CHAT, COMPLETIONS, HELLO, Client, check_error, make_app, send
from starlette.applications import Starlette

from octavo.core.admission import Ask, Limits
from octavo.core.errors import InvalidInput
from octavo.serve.admission import OwnGate, Stay, tenant_of
from octavo.serve.config import ServeConfig

FIVE = {"prompt": "abcde"}


def refusals(app: Starlette, count: int, requests: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers of ``count`` of these requests; the engine holds the others, which then leave."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            tasks = {asyncio.ensure_future(client.post(COMPLETIONS, **request)) for request in requests}
            ended: set[asyncio.Future[httpx.Response]] = set()
            while len(ended) < count:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30)
                assert done, "a request was not refused"
                ended |= done
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in ended]

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("limits", "body", "code", "passed"),
    [
        ({"max_waiting": 2}, FIVE, "queue_full", 2),
        ({"max_waiting": 4}, {**FIVE, "n": 2}, "queue_full", 2),
        ({"max_queued_tokens": 12}, FIVE, "queue_full", 2),
        ({"max_tenant_waiting": 1}, FIVE, "tenant_queue_full", 1),
        ({"max_tenant_tokens": 6}, FIVE, "tenant_queue_full", 1),
        ({"max_request_memory": "4000"}, {**FIVE, "max_tokens": 1, "logprobs": 5}, "memory_full", 2),
        ({"max_first_token_s": 0.6}, FIVE, "first_token_late", 1),
        ({"max_first_token_s": 9.0}, {**FIVE, "deadline_ms": 600}, "first_token_late", 1),
    ],
)
def test_too_much_is_told_when_to_come_back(limits: dict, body: dict, code: str, passed: int) -> None:
    engine = FakeEngine(prefill_tokens_per_s=10.0, hold=True)
    for answer in refusals(make_app(engine, **limits), 4 - passed, [{"json": body}] * 4):
        error = check_error(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", code)
        assert 1 <= int(answer.headers["retry-after"]) <= 600
    assert len(engine.asked) <= passed  # the engine never saw the others


def test_limits_of_one_key_leave_another_alone() -> None:
    engine = FakeEngine(hold=True)
    app = make_app(engine, max_tenant_waiting=1)
    headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in ("one", "one", "two", "")]
    [refused] = refusals(app, 1, [{"json": FIVE, "headers": each} for each in headers])
    check_error(refused, 429)
    assert set(engine.tenants) <= {"", tenant_of("Bearer one"), tenant_of("Bearer two")}
    assert "one" not in tenant_of("Bearer one") and tenant_of("Bearer one") != tenant_of("Bearer two")


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_makes_room_in_the_queue(stream: bool) -> None:
    """The engine holds the first request after two tokens: it waits no more, so another one may."""
    engine = FakeEngine(hold_after=2)
    app = make_app(engine, max_waiting=1)

    async def go() -> None:
        client = Client(app, COMPLETIONS, {**FIVE, "stream": stream})
        task = asyncio.ensure_future(client.run())
        while not engine.live:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        other = Client(app, COMPLETIONS, {**FIVE, "stream": True})
        second = asyncio.ensure_future(other.run())
        await other.until_sent(2)
        assert other.sent[0]["status"] == 200
        client.leave()
        other.leave()
        await asyncio.wait_for(asyncio.gather(task, second), 5)

    asyncio.run(go())
    assert engine.live == 0
    engine.hold_after = None
    assert send(app, "POST", COMPLETIONS, json=FIVE).status_code == 200


def test_a_forecast_is_told_and_held_against_the_truth() -> None:
    app = make_app(FakeEngine(prefill_tokens_per_s=10.0))
    answer = send(app, "POST", COMPLETIONS, json=FIVE)
    assert answer.headers["x-octavo-first-token-forecast"] == "0.5000"
    text = send(app, "GET", "/metrics").text
    assert 'octavo:first_token_forecast_error_count{model_name="fake"} 1.0' in text
    assert "x-octavo-first-token-forecast" not in send(make_app(), "POST", CHAT, json=HELLO).headers


def test_the_pace_of_the_engine_is_what_the_door_counts_with() -> None:
    """Two requests of one step each: what they waited and stayed is told in the engine's steps."""
    engine = FakeEngine(prefill_tokens_per_s=10.0)
    stats, steps = engine.stats, iter(range(100, 1000, 10))
    engine.stats = lambda: {**stats(), "steps": next(steps), "mean_step_seconds": 0.25}  # type: ignore[method-assign]
    gate = OwnGate(Limits())
    stay = Stay(gate, 1, engine, lambda told, waited: None)
    asyncio.run(stay.arrive("", "", None, Ask("", 1)))  # step 100
    asyncio.run(stay.enter(5, Ask("", 1, 5)))  # step 110
    assert stay.forecast == 0.75  # its prompt, and a step
    stay.first_token()  # step 120
    stay.leave()
    assert gate.register.door.forecasts.stay == 10.0  # it left at step 130


def test_refusals_are_counted_by_their_reason() -> None:
    app = make_app(FakeEngine(hold=True), max_waiting=1)
    refusals(app, 2, [{"json": FIVE}] * 3)
    assert 'octavo:requests_refused_total{code="queue_full",model_name="fake"} 2.0' in send(app, "GET", "/metrics").text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_waiting", -1),
        ("max_queued_tokens", -1),
        ("max_tenant_waiting", -1),
        ("max_tenant_tokens", -1),
        ("max_first_token_s", -0.5),
        ("max_first_token_s", float("nan")),
        ("max_request_memory", "much"),
    ],
)
def test_limits_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name):
        ServeConfig(**{name: value})
