"""The page at `/`, as files; and the live view's stream, of one process and of several."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from live_server import live_server
from serve_http import Client, check_error, make_app, send
from starlette.applications import Starlette
from test_guard import ANN, BEN, key_file

from octavo.serve import static
from octavo.serve.apis.live import shown_to
from octavo.serve.static import PATHS

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
FOLDER = Path(static.__file__).with_name("page")
MOST_BYTES = 64 << 10  # of the whole page
SEEN = {
    "names": ["mine.0123abcd", "theirs.0123abcd-1"],
    "tenants": ["me", "them"],
    "rows": [[0, 0, "decoding", 5, 4, 1, 0, "none", 1.5], [1, 0, "waiting", 7, 0, 0, 0, "kv", 2.5]],
    "ended": [[1, 0.5, 0.1, 9, 4, 0], [0, 0.25, 0.1, 9, 4, 0]],
    "steps": [[1, 2.0, 3.5, 4, 1, [0, 1]]],
    "tree": [[0, 2, 1]],
}


# -- files


def test_every_file_is_served_under_one_strict_policy() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {Path(path).name or "index.html" for path in PATHS}
    app, size = make_app(), 0
    for path in PATHS:
        answer = send(app, "GET", path)
        assert answer.status_code == 200 and answer.content
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
        assert policy.pop("frame-ancestors") == policy.pop("trusted-types") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert set(policy) == {"script-src", "style-src", "img-src", "connect-src"}
        assert set(policy.values()) == {"'self'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert send(app, "POST", path).status_code == 405
        size += len(answer.content)
    assert size <= MOST_BYTES
    assert send(app, "GET", "/page/../app.py").status_code == send(app, "GET", "/page/").status_code == 404


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_a_file_needs_nothing_from_elsewhere_and_makes_no_markup_of_text(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", text)
    made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|javascript:"
    assert not re.search(made, text)
    named = re.findall(r'(?:src|href|from)[= ]"([^"]+)"', text)
    assert {path.replace("./", "/page/") for path in named} <= PATHS
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)
        assert all(re.search(r'\ssrc="', tag) for tag in re.findall(r"<script[^>]*>", text))


def test_with_keys_the_page_is_open_and_what_it_asks_for_is_not(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    assert all(send(app, "GET", path).status_code == 200 for path in PATHS)
    check_error(send(app, "GET", "/v1/live"), 401)
    check_error(send(make_app(), "GET", "/v1/live", headers={"origin": "http://elsewhere.example"}), 403)
    assert send(make_app(), "GET", "/", headers={"host": "elsewhere.example"}).status_code == 403


# -- who sees what


@given(owners=st.lists(st.sampled_from(["me", "them", None]), min_size=2, max_size=2))
def test_others_requests_have_no_name_and_no_numbers(owners: list[str | None]) -> None:
    shown = shown_to({**SEEN, "tenants": owners}, "me")
    mine = [owner == "me" for owner in owners]
    assert shown["names"] == [name if may else None for name, may in zip(("mine", "theirs"), mine, strict=True)]
    for row, seen in zip(shown["rows"], SEEN["rows"], strict=True):
        assert row == (seen if mine[row[0]] else [*seen[:3], None, None, None, None, None, None])
    assert shown["ended"] == [row for row in SEEN["ended"] if mine[row[0]]]
    assert shown["tree"] == [] and "tenants" not in shown
    everything = {name: value for name, value in SEEN.items() if name != "tenants"}
    assert shown_to(SEEN, None) == {**everything, "names": ["mine", "theirs"]}


class Watcher(Client):
    """One that watches until it leaves."""

    def __init__(self, app: Starlette, secret: str = "") -> None:
        super().__init__(app, "/v1/live", {})
        self.scope["method"] = "GET"
        if secret:
            self.scope["headers"].append((b"authorization", f"Bearer {secret}".encode()))

    @property
    def frames(self) -> list[dict[str, Any]]:
        pieces = [message.get("body", b"") for message in self.sent[1:]]
        return [json.loads(piece[6:]) for piece in pieces if piece.startswith(b"data: {")]


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        await asyncio.sleep(0.01)


def test_each_key_sees_its_own_requests(tmp_path: Path) -> None:
    app = make_app(FakeEngine(seen={**SEEN, "tenants": ["ann", "ben"]}), key_file=key_file(tmp_path))

    async def go() -> None:
        for secret, expected in ((ANN, ["mine", None]), (BEN, [None, "theirs"])):
            watcher = Watcher(app, secret)
            task = asyncio.ensure_future(watcher.run())
            await until(lambda watcher=watcher: watcher.frames)
            watcher.leave()
            await task
            assert watcher.frames[0]["names"] == expected

    asyncio.run(go())


def test_a_key_watches_a_few_times_and_leaves_room_for_others(tmp_path: Path) -> None:
    app = make_app(FakeEngine(seen={**SEEN, "tenants": ["ann", "ben"]}), key_file=key_file(tmp_path))

    async def go() -> None:
        watchers = [Watcher(app, ANN) for _ in range(4)]
        tasks = [asyncio.ensure_future(watcher.run()) for watcher in watchers]
        await until(lambda: all(watcher.frames for watcher in watchers))
        late, other = Watcher(app, ANN), Watcher(app, BEN)
        await late.run()
        assert late.sent[0]["status"] == 429
        tasks.append(asyncio.ensure_future(other.run()))
        await until(lambda: other.frames)
        app.state.front.leave()
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_the_engine_is_asked_once_for_all_and_by_nobody_when_nobody_watches() -> None:
    engine = FakeEngine(seen=SEEN)
    app = make_app(engine)

    async def go() -> None:
        assert engine.looks == 0
        watchers = [Watcher(app) for _ in range(16)]
        tasks = [asyncio.ensure_future(watcher.run()) for watcher in watchers]
        await until(lambda: all(len(watcher.frames) > 1 for watcher in watchers))
        assert engine.looks <= 1 + max(len(watcher.frames) for watcher in watchers)
        late = Watcher(app)
        await late.run()
        assert late.sent[0]["status"] == 429
        engine.problem = "gone"
        await until(lambda: all(watcher.frames[-1] == {"engine": False} for watcher in watchers))
        engine.problem = None
        await until(lambda: all(watcher.frames[-1]["engine"] for watcher in watchers))
        for watcher in watchers[:8]:
            watcher.leave()
        await asyncio.gather(*tasks[:8])
        app.state.front.leave()  # the server stops
        await asyncio.gather(*tasks)
        assert not app.state.front.watchers
        looks = engine.looks
        await asyncio.sleep(0.4)
        assert engine.looks == looks

    asyncio.run(go())


# -- processes


@pytest.mark.parametrize("layout", ["single", "compact"])
def test_a_live_engine_is_seen_and_a_watcher_does_not_hold_up_the_end(layout: str) -> None:
    flags = (TINY, "--layout", layout, "--backend", "reference", "--shutdown-timeout", "60")
    body = {"prompt": "the quick", "max_tokens": 40, "ignore_eos": True, "request_id": "seen"}
    with live_server(*flags) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("GET", "/v1/live") as live:
            lines = live.iter_lines()
            frames = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
            assert next(frames)["rows"] == []
            assert client.post("/v1/completions", json=body).status_code == 200
            seen = next(frame for frame in frames if frame["ended"])
            assert seen["engine"] and seen["names"] == ["seen"] and seen["ended"][0][4] == 40
            assert len(seen["steps"]) >= 40 and seen["stats"]["output_tokens"] == 40
            server.process.terminate()
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(25) == 0
