"""Keys, hosts, quotas and the operator's socket."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from serve_http import CHAT, COMPLETIONS, HELLO, check_error, make_app, send, send_all
from starlette.applications import Starlette

from octavo.core.errors import InvalidInput
from octavo.core.quota import Bucket
from octavo.serve.config import ServeConfig
from octavo.serve.guard import OPEN, allowed_hosts
from octavo.serve.keys import Keyring, read_keys
from octavo.serve.operator_socket import operator_socket
from octavo.serve.server import as_bound

ANN, BEN = "ann-secret", "ben-secret"


def key_file(folder: Path, **of_ann: Any) -> str:
    digests = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in (("ann", ANN), ("ben", BEN))}
    keys = [{"name": "ann", "sha256": digests["ann"], **of_ann}, {"name": "ben", "sha256": digests["ben"]}]
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


def as_(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_every_route_and_method_needs_a_key_but_health(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    paths = {re.sub(r"\{.*?\}", "x", route.path) for route in app.routes}
    paths |= {"/nothing", "/v1", "/health/", "/health//live", "/health/live/x", "/HEALTH"}
    methods = ("GET", "POST", "DELETE", "PUT", "OPTIONS", "PATCH")
    asked: list[Any] = [(method, path, {}) for path in sorted(paths) for method in methods]
    for (method, path, _), answer in zip(asked, send_all(app, asked), strict=True):
        assert (answer.status_code == 401) == (path not in OPEN), (method, path)
    assert send(app, "GET", "/health").status_code == 200
    error = check_error(send(app, "GET", "/v1/models"), 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (as_(ANN), 200), ({"authorization": f"bearer {BEN}"}, 200), ({"x-api-key": ANN}, 200),
        (as_("wrong"), 401), (as_(""), 401), (as_(ANN + "x"), 401), (as_(ANN[:-1]), 401), ({"authorization": ANN}, 401),
        ({"authorization": f"Basic {ANN}"}, 401), ({"x-api-key": "wrong"}, 401), ({}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": ANN}, 401),
        ([("authorization", f"Bearer {ANN}"), ("authorization", "Bearer wrong")], 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401), ({"x-api-key": hashlib.sha256(ANN.encode()).hexdigest()}, 401),
    ],
)  # fmt: skip
def test_who_may_speak(headers: Any, status: int, tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    assert send(app, "GET", "/v1/models", headers=headers).status_code == status


def test_a_refusal_speaks_the_language_of_its_route(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    anthropic = send(app, "POST", "/v1/messages").json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    assert set(send(app, "POST", "/api/chat").json()) == {"error"}


def test_all_keys_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = read_keys(key_file(tmp_path)), []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    for secret in (ANN, BEN, "wrong"):
        compared.clear()
        keys.find(secret)
        assert len(compared) == 2


def test_a_key_is_a_tenant_and_keeps_its_prefixes_apart(tmp_path: Path) -> None:
    for share, salts in ((False, ["ann:", "ben:s"]), (True, ["", "s"])):
        engine = FakeEngine()
        app = make_app(engine, key_file=key_file(tmp_path), share_prefixes=share)
        send(app, "POST", CHAT, json=HELLO, headers=as_(ANN))
        send(app, "POST", CHAT, json={**HELLO, "cache_salt": "s"}, headers={"x-api-key": BEN})
        assert (engine.tenants, engine.salts) == (["ann", "ben"], salts)


def test_an_id_is_its_keys_own(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=1)
    app = make_app(engine, key_file=key_file(tmp_path))

    async def ask(secret: str, method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=as_(secret)) as client:
            return await client.request(method, path, **kwargs)

    async def go() -> None:
        body, path = {**HELLO, "request_id": "x"}, "/v1/requests/x"
        running = asyncio.ensure_future(ask(ANN, "POST", CHAT, json=body))
        for _ in range(1000):
            if (await ask(ANN, "GET", path)).json().get("usage", {}).get("completion_tokens") == 1:
                break
            await asyncio.sleep(0.001)
        engine.hold_after = None
        assert (await ask(BEN, "GET", path)).json()["status"] == "unknown"
        check_error(await ask(ANN, "POST", CHAT, json=body), 409, "request_id")
        assert (await ask(BEN, "POST", CHAT, json=body)).status_code == 200
        told = [(await ask(secret, "GET", path)).json()["status"] for secret in (ANN, BEN)]
        assert told == ["running", "finished"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())


BAD_FILES = [
    b"", b"{}", b'{"keys": []}', b'{"keys": [{"name": "a"}]}', b'{"keys": [{"name": "a", "sha256": "xyz"}]}',
    b'{"keys": [{"name": "a b", "sha256": "%s"}]}', b'{"keys": [{"name": "a", "sha256": "%s", "quota": 1}]}',
    b'{"keys": [{"name": "a", "sha256": "%s"}, {"name": "b", "sha256": "%s"}]}',
    b'{"keys": [{"name": "a", "sha256": "%s", "concurrent": -1}]}', b" " * (1 << 20) + b"{}",
    b'{"keys": [], "keys": [{"name": "a", "sha256": "%s"}]}', b'{"keys": [{"name": "a", "name": "b", "sha256": "%s"}]}',
    b"[" * 100_000, b"\xff", b'{"keys": [{"name": "a", "sha256": "%s", "concurrent": 1e999}]}', b"1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_key_file_that_is_wrong_starts_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content.replace(b"%s", b"0" * 64))
    with pytest.raises(InvalidInput, match="key_file"):
        make_app(key_file=str(path))
    with pytest.raises(InvalidInput, match="key_file"):
        read_keys(str(tmp_path / "missing"))


GOOD_FILE = b'{"keys": [\r\n{"name": "a", "sha256": "' + b"0" * 64 + b'", "concurrent": 2}]}\r\n'


@given(st.integers(0, len(GOOD_FILE)), st.integers(0, 8), st.binary(max_size=4))
def test_a_damaged_key_file_is_refused_or_read(at: int, cut: int, put: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(GOOD_FILE[:at] + put + GOOD_FILE[at + cut :])
        file.flush()
        with suppress(InvalidInput):
            assert isinstance(read_keys(file.name), Keyring)


def test_a_key_file_of_another_system_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD_FILE)
    assert isinstance(read_keys(str(path)), Keyring)


def test_a_key_file_is_a_plain_one_that_not_everybody_writes(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(GOOD_FILE)
    path.chmod(0o666)
    os.mkfifo(tmp_path / "pipe")
    for name, remedy in (("keys.json", "chmod o-w"), ("pipe", "no plain file"), ("", "no plain file")):
        with pytest.raises(InvalidInput, match=remedy):
            read_keys(str(tmp_path / name))


@pytest.mark.parametrize(
    ("limits", "host", "status"),
    [
        ({}, "localhost", 200), ({}, "127.0.0.1:8000", 200), ({}, "[::1]:8000", 200), ({}, "LOCALHOST", 200),
        ({}, "evil.example", 403), ({}, "127.0.0.1.evil.example", 403), ({}, "localhost.evil:80", 403), ({}, "", 403),
        ({"allowed_hosts": "box.lan, other"}, "box.lan:80", 200), ({"allowed_hosts": "box.lan"}, "localhost", 200),
        ({"host": "0.0.0.0"}, "any.example", 200), ({"host": "0.0.0.0", "allowed_hosts": "a.b"}, "any.example", 403),
        ({"host": "127.0.0.9"}, "127.0.0.9", 200), ({"host": "127.0.0.9"}, "evil.example", 403),
    ],
)  # fmt: skip
def test_a_server_on_loopback_answers_to_names_of_loopback(limits: dict[str, Any], host: str, status: int) -> None:
    answer = send(make_app(**limits), "GET", "/health", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert check_error(answer, 403)["code"] == "host_not_allowed" and "evil" not in answer.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("http://127.0.0.1", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_pages_of_other_sites_are_not_served(origin: str, status: int) -> None:
    engine = FakeEngine()
    answer = send(make_app(engine), "POST", COMPLETIONS, json={"prompt": "a"}, headers={"origin": origin})
    assert answer.status_code == status and bool(engine.asked) == (status == 200)
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_nothing_but_http_is_spoken(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def go() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def note(message: Any) -> None:
            sent.append(message)

        app = make_app()
        await app({"type": "websocket", "path": "/health", "headers": []}, receive, note)

    asyncio.run(go())
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_bucket_gives_back_evenly() -> None:
    bucket = Bucket(60)
    assert bucket.wait(60, 100.0) == 0
    bucket.take(60, 100.0)
    assert bucket.wait(1, 100.0) == 1 and bucket.wait(10, 101.0) == pytest.approx(9)
    bucket.take(30, 101.0)  # into debt
    assert bucket.wait(1, 101.0) == pytest.approx(30) and bucket.wait(1, 131.0) == 0
    assert bucket.wait(1, 90.0) == 0  # a clock that goes back gives nothing and takes nothing
    assert Bucket(60).wait(1000, 0.0) == 0  # more than a minute holds waits for a full bucket, no longer
    assert Bucket(0).wait(10**9, 0.0) == 0


@pytest.mark.parametrize(
    ("quota", "passed", "code"),
    [
        ({"requests_per_minute": 3}, 3, "quota_requests"),
        ({"tokens_per_minute": 9}, 2, "quota_tokens"),
        ({"concurrent": 1}, 5, ""),
    ],
)
def test_a_quota_is_its_keys_alone(quota: dict[str, int], passed: int, code: str, tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path, **quota))
    body = {"prompt": "ab", "max_tokens": 2}
    answers = [send(app, "POST", COMPLETIONS, json=body, headers=as_(ANN)) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * passed + [429] * (5 - passed)
    for answer in answers[passed:]:
        assert check_error(answer, 429)["code"] == code and 1 <= int(answer.headers["retry-after"]) <= 60
    assert send(app, "POST", COMPLETIONS, json=body, headers=as_(BEN)).status_code == 200


def test_requests_at_once_are_counted_and_given_back(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path, concurrent=2))
    body = {"json": {"prompt": "a"}, "headers": as_(ANN)}
    for _ in range(2):
        answers = send_all(app, [("POST", COMPLETIONS, body)] * 4)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]


def with_admin(app: Starlette, path: Path, calls: Any) -> None:
    async def go() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            admin = httpx.AsyncClient(transport=transport, base_url="http://admin")
            public = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
            async with admin, public:
                await calls(admin, public)

    asyncio.run(go())


def test_the_operator_drains_by_a_socket_of_their_own(tmp_path: Path) -> None:
    path, engine = tmp_path / "admin", FakeEngine()

    async def calls(admin: httpx.AsyncClient, public: httpx.AsyncClient) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await admin.get("/state")).json()["draining"] is False
        for route in ("/drain", "/state", "/resume", "/log_level"):
            assert (await public.post(route)).status_code == 404
        assert (await admin.post("/flush_cache")).status_code == 200 and engine.flushes == 1
        check_error(await admin.post("/model", json={"model": "other"}), 400, "model")
        assert (await admin.post("/drain")).json()["draining"] is True
        assert (await public.get("/health/ready")).status_code == 503
        assert (await public.get("/health/live")).status_code == 200
        refused = await public.post(CHAT, json=HELLO)
        assert check_error(refused, 503)["code"] == "draining" and refused.headers["retry-after"]
        await admin.post("/resume")
        assert (await public.post(CHAT, json=HELLO)).status_code == 200

    with_admin(make_app(engine, admin_socket=str(path)), path, calls)
    assert not path.exists()


def test_the_operator_sets_the_log_level(tmp_path: Path) -> None:
    path, before = tmp_path / "admin", logging.getLogger().level

    async def calls(admin: httpx.AsyncClient, public: httpx.AsyncClient) -> None:
        answer = await admin.post("/log_level", json={"level": "error", "levle": 1})
        assert answer.json()["log_level"] == "error" and answer.headers["x-octavo-warnings"] == "levle"
        assert logging.getLogger().level == logging.ERROR
        check_error(await admin.post("/log_level", json={"level": "loud"}), 400, "level")

    try:
        with_admin(make_app(admin_socket=str(path)), path, calls)
    finally:
        logging.getLogger().setLevel(before)


def test_a_socket_that_cannot_be_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="admin_socket"):
        with_admin(make_app(admin_socket=str(path)), path, None)
    assert path.read_text() == "mine"


def test_a_living_servers_socket_is_left_alone_and_a_dead_ones_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with operator_socket(path):
        with pytest.raises(InvalidInput, match="another server"), operator_socket(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with operator_socket(path):
        path.unlink()
        path.write_text("another's")  # that came since
    assert path.read_text() == "another's"


def test_loopback_is_known_by_its_address_and_not_its_name() -> None:
    for host, expected in (("LocalHost", {"127.0.0.1", "localhost", "::1"}), ("0.0.0.0", set())):
        with socket.socket() as listener:
            listener.bind((host, 0))
            config = as_bound(ServeConfig(host=host), listener)
        assert allowed_hosts(config) == expected


METERED = {
    "/tokenize": {"prompt": "a"},
    "/v1/detokenize": {"tokens": [97]},
    "/apply-template": HELLO,
    "/v1/messages/count_tokens": HELLO,
    "/v1/responses/input_tokens": {"input": "a"},
}


@pytest.mark.parametrize("path", METERED)
def test_what_needs_no_engine_counts_as_a_request_too(tmp_path: Path, path: str) -> None:
    app = make_app(key_file=key_file(tmp_path, requests_per_minute=1))
    asked = [{"json": METERED[path], "headers": as_(key)} for key in (ANN, ANN, BEN, BEN)]
    answers = send_all(app, [("POST", path, one) for one in asked])
    assert sorted(answer.status_code for answer in answers[:2]) == [200, 429]
    assert [answer.status_code for answer in answers[2:]] == [200, 200]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) > 1
