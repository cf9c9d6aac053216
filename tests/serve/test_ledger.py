"""GET /v1/requests/{id}: what became of a request, and that its id never runs twice."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serve_http import CHAT, HELLO, Client, check_error, make_app, send
from starlette.applications import Starlette

NAMED = {**HELLO, "request_id": "mine"}


def status(app: Starlette, request_id: str = "mine") -> dict[str, Any]:
    answer = send(app, "GET", f"/v1/requests/{request_id}")
    assert answer.status_code == 200
    return answer.json()


def test_how_a_request_ended() -> None:
    for engine, stream, expected in (
        (FakeEngine(), False, {"status": "finished"}),
        (FakeEngine(), True, {"status": "finished"}),
        (FakeEngine(fail_after=1), False, {"status": "finished", "finish_reason": "error"}),
        (FakeEngine(fail_after=1), True, {"status": "finished", "finish_reason": "error"}),
    ):
        app = make_app(engine)
        assert status(app) == {"id": "mine", "object": "request", "status": "unknown"}
        send(app, "POST", CHAT, json={**NAMED, "stream": stream})
        assert status(app) == {"id": "mine", "object": "request", **expected}


def test_what_a_dead_front_end_had_open_was_cancelled() -> None:
    app = make_app()
    send(app, "POST", CHAT, json=NAMED)
    app.state.front.orphaned([("key-1", "theirs.0123abcd"), ("", "a.b-1.89abcdef-12~3"), ("", "mine.2.00000000")])
    told = {name: status(app, name)["status"] for name in ("mine", "theirs", "a.b-1", "mine.2", "a.b")}
    assert told == {
        "mine": "finished",
        "theirs": "cancelled",
        "a.b-1": "cancelled",
        "mine.2": "cancelled",
        "a.b": "unknown",
    }


def test_what_was_refused_never_ran() -> None:
    app = make_app()
    check_error(send(app, "POST", CHAT, json={**NAMED, "max_tokens": 10**6}), 400)
    assert status(app)["status"] == "unknown"


def test_a_live_id_is_refused_and_a_left_one_may_come_again() -> None:
    engine = FakeEngine(hold_after=1)
    app = make_app(engine)

    async def ask(method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **kwargs)

    async def go() -> None:
        client = Client(app, CHAT, {**NAMED, "stream": True})
        running = asyncio.ensure_future(client.run())
        await client.until_sent(3)
        check_error(await ask("POST", CHAT, json=NAMED), 409, "request_id")
        assert len(engine.asked) == 1
        shown = (await ask("GET", "/v1/requests/mine")).json()
        assert (shown["status"], shown["usage"]["completion_tokens"]) == ("running", 1)
        client.leave()
        await running
        assert (await ask("GET", "/v1/requests/mine")).json()["status"] == "cancelled"
        engine.hold_after = None
        assert (await ask("POST", CHAT, json=NAMED)).status_code == 200
        assert (await ask("GET", "/v1/requests/mine")).json()["status"] == "finished"

    asyncio.run(go())


def test_an_explanation_is_its_keys_own() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    mine = {"authorization": "Bearer mine"}
    assert send(app, "POST", CHAT, json={**HELLO, "request_id": "x"}, headers=mine).status_code == 200
    told = send(app, "GET", "/v1/requests/x/explain", headers=mine).json()
    assert told == {"id": "x", "object": "request.explanation", "requests": [{"request": "x"}]}
    assert check_error(send(app, "GET", "/v1/requests/x/explain"), 404)["code"] == "request_not_found"


@pytest.mark.parametrize("name", ["x" * 129, "x" * 5000, "a%20b", "%00", "%F0%9F%98%80"])
def test_what_is_no_id_is_asked_of_nobody(name: str) -> None:
    """Other processes take whoever sends what is no message for broken, and end or ignore it."""
    app, asked = make_app(FakeEngine()), []

    async def ask(*about: Any) -> Any:
        asked.append(about)
        return {}

    app.state.front.describe = app.state.front.engine.explain = ask
    told = send(app, "GET", f"/v1/requests/{name}")
    assert told.status_code == 200 and told.json().get("status") == "unknown"
    assert check_error(send(app, "GET", f"/v1/requests/{name}/explain"), 404)["code"] == "request_not_found"
    assert not asked
