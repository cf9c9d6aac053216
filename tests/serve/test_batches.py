"""Files and batches over a fake engine, through OpenAI's own client: made, run, stopped, gone on with after a crash."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from errno import ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from fake_engine import HIDDEN, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from serve_http import CHAT, COMPLETIONS, check_error, make_app, send, send_all
from starlette.applications import Starlette
from test_guard import ANN, BEN, as_, key_file

from octavo.core.errors import InvalidInput
from octavo.serve.batches.files import shown_name
from octavo.serve.batches.folder import Folder
from octavo.serve.batches.form import Form
from octavo.serve.batches.lines import body_of, read_lines
from octavo.serve.batches.records import new_batch
from octavo.serve.errors import ApiError

_Result = TypeVar("_Result")
VECTORS: Any = "/v1/embeddings"
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def line(name: str, text: str = "hé", url: str = CHAT, **more: Any) -> str:
    chat, plain = {"messages": [{"role": "user", "content": text}]}, {"prompt": text}
    body = chat if url == CHAT else plain if url == COMPLETIONS else {}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {**body, **more}})


def text_of(*lines: str) -> bytes:
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "batches")


def app_at(place: str, engine: FakeEngine | None = None, **limits: Any) -> Starlette:
    return make_app(engine, batch_dir=place, **limits)


def run(app: Starlette, call: Callable[[openai.AsyncOpenAI], Awaitable[_Result]], key: str = "x") -> _Result:
    """What the client gets from an application in this process, which then lets go of its folder."""

    async def go() -> _Result:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
        try:
            async with openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http
            ) as client:
                app.state.desk.start()
                return await call(client)
        finally:
            await app.state.desk.stop()

    return asyncio.run(go())


async def made(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("a.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=more.pop("window", "24h"), **more
    )


async def over(client: openai.AsyncOpenAI, batch: Any) -> Any:
    while batch.status in OPEN:
        await asyncio.sleep(0.005)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    found = [json.loads(raw) for raw in (await client.files.content(name)).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_a_batch_is_answered_as_online(place: str) -> None:
    engine = FakeEngine()
    bad = line("wrong", temperature=-1.0)

    async def calls(client: openai.AsyncOpenAI) -> Any:
        batch = await made(client, text_of(line("a"), line("b", "two", max_tokens=2), bad), metadata={"x": "y"})
        batch = await over(client, batch)
        online = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hé"}])
        files = await client.files.list()
        answers, errors = [await lines_of(client, name) for name in (batch.output_file_id, batch.error_file_id)]
        return batch, online, answers, errors, files

    batch, online, answers, errors, files = run(app_at(place, engine), calls)
    assert batch.status == "completed" and batch.object == "batch" and batch.metadata == {"x": "y"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    same = ("object", "model", "choices", "usage")
    body = answers["a"]["response"]["body"]
    assert {name: body[name] for name in same} == {name: online.to_dict()[name] for name in same}
    assert answers["a"]["response"]["status_code"] == 200 and answers["a"]["error"] is None
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.total_tokens == sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers.values())
    assert sorted(file.purpose for file in files.data) == ["batch", "batch_output", "batch_output"]
    assert engine.bulk == [True, True, False]


def test_every_endpoint_runs_and_a_line_is_no_stream(place: str) -> None:
    async def calls(client: openai.AsyncOpenAI) -> Any:
        found = {}
        asked = {
            COMPLETIONS: {},
            "/v1/responses": {"input": "a"},
            CHAT: {"stream": True},
            VECTORS: {"input": "a"},
        }
        for url, more in asked.items():
            batch = await over(client, await made(client, text_of(line("a", url=url, **more)), url))
            found[url] = batch, await lines_of(client, batch.output_file_id or batch.error_file_id)
        return found

    found = run(app_at(place), calls)
    assert found["/v1/completions"][1]["a"]["response"]["body"]["object"] == "text_completion"
    assert found["/v1/responses"][1]["a"]["response"]["body"]["object"] == "response"
    assert found[CHAT][0].request_counts.failed == 1
    assert len(found[VECTORS][1]["a"]["response"]["body"]["data"][0]["embedding"]) == HIDDEN
    assert found[VECTORS][0].usage.total_tokens == 1


BAD = {
    "invalid_json_line": b"{nonsense\n",
    "invalid_request": b'{"custom_id": 7, "url": "/v1/chat/completions", "body": {}}\n',
    "invalid_url": line("a", url="/admin").encode(),
    "duplicate_custom_id": text_of(line("a"), line("a")),
    "invalid_custom_id": line("").encode(),
    "invalid_method": line("a").replace("POST", "GET").encode(),
    "empty_file": b"\n \n",
    "too_many_requests": text_of(*(line(str(i)) for i in range(5))),
    "line_too_long": text_of(line("a", "x" * 3000), line("b")),
}


@pytest.mark.parametrize("code", BAD)
def test_a_file_that_cannot_be_run_is_refused_whole(place: str, code: str) -> None:
    engine = FakeEngine()

    async def calls(client: openai.AsyncOpenAI) -> Any:
        return await over(client, await made(client, BAD[code]))

    batch = run(app_at(place, engine, max_batch_lines=4, max_body_bytes=2000), calls)
    assert batch.status == "failed" and batch.errors.data[0].code == code and not engine.asked
    assert batch.output_file_id is batch.error_file_id is None


@given(st.lists(st.binary(max_size=40) | st.sampled_from([line("a").encode(), line("b").encode()]), max_size=6))
def test_whatever_is_in_a_file_it_is_run_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any"
    file.write_bytes(b"\n".join(rows))
    found = read_lines(file, CHAT, 4, 200)
    assert [json.loads(body_of(file, one))["messages"][0]["content"] for one in found.lines] == ["hé"] * len(
        found.lines
    )
    assert found.lines or found.errors


# -- files


def test_a_name_is_what_can_be_shown_of_it() -> None:
    for name, shown in (("C:\\x\\a\x07b.jsonl", "ab.jsonl"), ("..", ".."), ("a/", "file"), ("x" * 999, "x" * 255)):
        assert shown_name(name) == shown


def post_file(app: Starlette, name: str = "a.jsonl", content: bytes = b"{}", **fields: str) -> Any:
    files = {"file": (name, content)}
    return send(app, "POST", "/v1/files", files=files, data={"purpose": "batch", **fields})


def test_names_are_text_and_files_are_their_owners_own(place: str, tmp_path: Path) -> None:
    app = app_at(place, key_file=key_file(tmp_path))
    form = {"files": {"file": ("../../etc/passwd", b"{}")}, "data": {"purpose": "batch"}}
    mine = send(app, "POST", "/v1/files", headers=as_(ANN), **form).json()
    assert mine["filename"] == "passwd" and mine["bytes"] == 2
    assert {entry.name.split(".")[0] for entry in Path(place, "files").iterdir()} == {mine["id"]}
    for name in (mine["id"], "..", "%2e%2e%2flock", "file-" + "0" * 24, "lock"):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
            check_error(send(app, "GET", path, headers=as_(BEN)), 404)
    body = {"input_file_id": mine["id"], "endpoint": CHAT}
    check_error(send(app, "POST", "/v1/batches", json=body, headers=as_(BEN)), 404, "input_file_id")
    assert send(app, "GET", "/v1/files", headers=as_(BEN)).json()["data"] == []
    assert send(app, "GET", f"/v1/files/{mine['id']}/content", headers=as_(ANN)).content == b"{}"
    assert send(app, "DELETE", f"/v1/files/{mine['id']}", headers=as_(ANN)).json()["deleted"]
    assert list(Path(place, "files").iterdir()) == []


def test_limits_hold_before_anything_is_kept(place: str) -> None:
    app = app_at(place, max_batch_bytes=1000, max_batch_files=2, max_batch_store=1500)
    check_error(post_file(app, content=b"x" * 1001), 413)
    check_error(post_file(app, content=b"x" * 100_000), 413)
    check_error(post_file(app, purpose="assistants"), 400, "purpose")
    check_error(send(app, "POST", "/v1/files", data={"purpose": "batch"}, files={"other": b"x"}), 400, "file")
    check_error(send(app, "POST", "/v1/files", json={}), 415)
    assert post_file(app, content=b"x" * 900).status_code == 200
    assert check_error(post_file(app, content=b"x" * 900), 429)["code"] == "no_room"
    warned = post_file(app, content=b"x", **{"expires_after[seconds]": "9"})
    assert warned.headers["x-octavo-warnings"] == "expires_after[seconds]"
    assert check_error(post_file(app), 429)["code"] == "too_many_files"
    assert len(list(Path(place, "files").iterdir())) == 4


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=20), st.integers(0, 3))
def test_a_form_is_read_the_same_in_whatever_pieces(content: bytes, cuts: list[int], extra: int) -> None:
    content = content.replace(b"--x", b"")
    fields = b"".join(b'--xx\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nv\r\n' % i for i in range(extra))
    part = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a\\"b"\r\nX: y\r\n\r\n'
    whole, found = b"prelude\r\n" + fields + part + content + b"\r\n--xx--\r\nmore", bytearray()
    form = Form(b"xx", found.extend)
    for cut in cuts:
        form.feed(whole[:cut])
        whole = whole[cut:]
    form.feed(whole)
    form.finish()
    assert bytes(found) == content and form.file_name == 'a"b' and len(form.fields) == extra


PIECES = [b"--xx", b"\r\n", b"--", b'Content-Disposition: form-data; name="file"', b"a"]


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_bytes_that_are_no_form_are_refused(pieces: list[bytes]) -> None:
    form = Form(b"xx", lambda data: None)
    try:
        for piece in pieces:
            form.feed(piece)
        form.finish()
    except ApiError as error:
        assert error.status == 400
    else:
        assert b"--xx--" in b"".join(pieces)


def test_without_a_folder_the_remedy_is_told() -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        assert "--batch-dir" in check_error(send(make_app(), method, path), 404)["message"]


def test_a_folder_is_one_servers_and_nobody_elses(place: str, tmp_path: Path) -> None:
    held = Folder(place)
    with pytest.raises(InvalidInput, match="another server"):
        Folder(place)
    held.close()
    Folder(place).close()
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(InvalidInput, match="mode 0700"):
        Folder(str(tmp_path / "open"))


# -- batches


def test_lists_have_pages_and_bodies_are_checked(place: str) -> None:
    async def calls(client: openai.AsyncOpenAI) -> Any:
        ids = [(await made(client, text_of(line("a")))).id for _ in range(5)]
        first = await client.batches.list(limit=2)
        seen = [batch.id async for batch in client.batches.list(limit=2)]
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=101)
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(after="batch_no")
        with pytest.raises(openai.BadRequestError, match="at most 30 days"):
            await made(client, b"x", window="31d")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            await made(client, b"x", "/metrics")
        return ids, first, seen

    ids, first, seen = run(app_at(place), calls)
    assert len(first.data) == 2 and first.has_more and sorted(seen) == sorted(ids) and len(seen) == 5


class OneAnswer(FakeEngine):
    """Answers the first request, and no other."""

    async def generate(self, *args: Any, **more: Any) -> Any:
        self.hold = bool(self.asked)
        async for delta in super().generate(*args, **more):
            yield delta


def test_a_cancelled_batch_keeps_what_is_answered(place: str) -> None:
    engine = OneAnswer()

    async def calls(client: openai.AsyncOpenAI) -> Any:
        batch = await made(client, text_of(*(line(str(i)) for i in range(4))))
        while batch.request_counts.completed == 0:
            await asyncio.sleep(0.002)
            batch = await client.batches.retrieve(batch.id)
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await over(client, batch)
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)
        return batch, await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)

    batch, answers, errors = run(app_at(place, engine, batch_concurrency=1), calls)
    assert batch.status == "cancelled" and len(answers) + len(errors) == 4 and answers and errors
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"} and engine.live == 0


def test_time_that_is_over_ends_a_batch(place: str) -> None:
    async def calls(client: openai.AsyncOpenAI) -> Any:
        batch = await over(client, await made(client, text_of(line("a"), line("b")), window="1s"))
        return batch, await lines_of(client, batch.error_file_id)

    batch, errors = run(app_at(place, FakeEngine(hold=True)), calls)
    assert batch.status == "expired" and {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert set(errors) == {"a", "b"}


def test_no_room_now_is_no_answer(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, real, asked = app_at(place), asyncio.sleep, []

    async def calls(client: openai.AsyncOpenAI) -> Any:
        app.state.front.draining = True
        batch = await made(client, text_of(line("a")))

        async def sleep(seconds: float) -> None:
            if seconds >= 1:
                asked.append(seconds)
                app.state.front.draining = False
            await real(0.001)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        return await over(client, batch)

    assert run(app, calls).request_counts.completed == 1 and asked == [5.0]


def test_online_limits_do_not_count_bulk(place: str) -> None:
    engine = FakeEngine(hold=True)
    app = app_at(place, engine, max_pending=1, batch_concurrency=4)

    async def calls(client: openai.AsyncOpenAI) -> Any:
        await made(client, text_of(*(line(str(i)) for i in range(6))))
        while engine.live < 4:
            await asyncio.sleep(0.002)
        engine.hold = False
        answer = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hé"}])
        return answer, app.state.front.gate.register.door.sequences

    answer, sequences = run(app, calls)
    assert answer.choices[0].message.content and sequences == 0 and len(engine.asked) == 5


def test_who_waits_for_a_quota_takes_no_place(place: str) -> None:
    app = app_at(place, batch_concurrency=1)
    desk = app.state.desk

    async def call(path: str, body: bytes, owner: str, key: Any) -> Any:
        return (429, {"retry-after": "30"}, {}) if b"waits" in body else (200, {}, {})

    async def calls(client: openai.AsyncOpenAI) -> Any:
        desk._call = call
        waits = await made(client, text_of(*(line(str(i), "waits") for i in range(3))))
        passes = await asyncio.wait_for(over(client, await made(client, text_of(line("a"), line("b")))), 10.0)
        return passes, await client.batches.retrieve(waits.id)

    passes, waits = run(app, calls)
    assert passes.status == "completed" and waits.status == "in_progress"


# -- a disk that is full, or slow, or written by another version


def full(folder: Folder, name: str, data: bytes) -> None:
    raise OSError(ENOSPC, "No space left on device")


def test_a_batch_that_could_not_be_kept_is_none(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at(place)
    file = post_file(app, content=text_of(line("a"))).json()["id"]
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", full)
        asked = send(app, "POST", "/v1/batches", json={"input_file_id": file, "endpoint": CHAT})
        assert check_error(asked, 503)["code"] == "disk_failed"
    assert send(app, "GET", "/v1/batches").json()["data"] == []
    assert send(app, "DELETE", f"/v1/files/{file}").json()["deleted"]


@pytest.mark.parametrize("work", ["create", "move", "write"])
def test_a_file_that_the_disk_does_not_take_is_none(place: str, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    app = app_at(place, max_batch_files=1)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, work, lambda folder, *args: full(folder, "", b""))
        assert check_error(post_file(app), 503)["code"] == "disk_failed"
    assert [file.suffix for file in Path(place, "files").iterdir()] in (
        [],
        [".data"],
    )  # the latter goes at the next start
    assert post_file(app).status_code == 200
    assert app.state.desk.files._total == 2


def test_uploads_at_once_are_counted(place: str) -> None:
    store = app_at(place, max_batch_files=2).state.desk.files
    with store.upload("a"), store.upload("a"), store.upload("b"), pytest.raises(ApiError), store.upload("a"):
        pass
    assert not store._uploads
    with store.upload("a"), store.upload("a"):
        pass


def test_a_batch_that_rests_can_be_cancelled(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at(place)

    async def calls(client: openai.AsyncOpenAI) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "append", full)
            batch = await made(client, text_of(line("a")))
            while app.state.desk._tasks:
                await asyncio.sleep(0.002)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await over(client, batch)
        return batch, await lines_of(client, batch.error_file_id)

    batch, errors = run(app, calls)
    assert batch.status == "cancelled" and errors["a"]["error"]["code"] == "batch_cancelled"


def test_a_file_that_has_come_is_kept_however_long_that_takes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, real = app_at(place, request_timeout=0.2), Folder.move

    def slow(folder: Folder, name: str, to: str) -> None:
        time.sleep(0.25 * to.endswith(".data"))
        real(folder, name, to)

    monkeypatch.setattr(Folder, "move", slow)
    assert post_file(app, content=b"12345").json()["bytes"] == app.state.desk.files._total == 5


def test_what_another_version_wrote_is_left_alone(place: str) -> None:
    app = app_at(place)
    file = post_file(app).json()["id"]
    app.state.desk._folder.close()
    record, before = Path(place, "files", f"{file}.json"), sorted(Path(place, "files").iterdir())
    record.write_bytes(b'{"id": "other"}')
    assert send(app_at(place), "GET", "/v1/files").json()["data"] == []
    assert sorted(Path(place, "files").iterdir()) == before and record.read_bytes() == b'{"id": "other"}'


# -- after a crash


class Crashes:
    """Keeps a copy of the folder as it is after each thing that is done to it, and with half of each line appended."""

    def __init__(self, place: str, keep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.keep, self.count = Path(place), keep, 0
        for name in ("append", "move", "remove"):
            monkeypatch.setattr(Folder, name, self._watched(name, getattr(Folder, name)))

    def _watched(self, name: str, real: Any) -> Any:
        def call(folder: Folder, *args: Any) -> None:
            real(folder, *args)
            self._copy()
            if name == "append":
                cut = self._copy() / args[0]
                cut.write_bytes(cut.read_bytes()[: -len(args[1]) // 2])

        return call

    def _copy(self) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.place, self.keep / str(self.count)))

    def copies(self) -> Iterator[Path]:
        return (self.keep / str(number + 1) for number in range(self.count))


def ready_files(copy: Path) -> list[Path]:
    return [path for path in (copy / "files").iterdir() if path.suffix == ".json"]


def test_a_crash_at_any_moment_loses_no_line_and_runs_none_twice(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = text_of(line("a"), line("b", "two"), line("c", temperature=-1.0), line("d", "four"))
    with monkeypatch.context() as patch:
        crashes = Crashes(place, tmp_path, patch)

        async def first(client: openai.AsyncOpenAI) -> Any:
            return await over(client, await made(client, lines))

        whole = run(app_at(place, batch_concurrency=1), first)
    assert whole.status == "completed" and crashes.count > 12
    begun = 0
    for copy in crashes.copies():
        engine, found = FakeEngine(), {path.name: path.read_bytes() for path in (copy / "batches").iterdir()}
        done = sum(raw.count(b"\n") for name, raw in found.items() if name.endswith("out"))
        ready = [path for path in (copy / "batches").iterdir() if path.suffix == ".json"]

        async def again(client: openai.AsyncOpenAI) -> Any:
            batches = [await over(client, batch) async for batch in client.batches.list()]
            files = [(b, b.output_file_id, b.error_file_id) for b in batches]
            return [(b, await lines_of(client, out), await lines_of(client, err)) for b, out, err in files]

        results = run(app_at(str(copy), engine), again)
        assert len(results) == len(ready)
        names = [path.name for path in (copy / "files").iterdir()]
        assert sorted(names) == sorted(f"{path.stem}.{end}" for path in ready_files(copy) for end in ("data", "json"))
        for batch, answers, errors in results:
            begun += 1
            assert batch.status == "completed" and set(answers) == {"a", "b", "d"} and set(errors) == {"c"}
            was = json.loads(found[f"{batch.id}.json"])["status"]
            assert len(engine.asked) == (3 - done if was in ("validating", "in_progress") else 0)
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    assert begun > 8


def test_what_was_let_in_goes_on_under_lower_limits(place: str) -> None:
    engine = OneAnswer()

    async def begin(client: openai.AsyncOpenAI) -> Any:
        batch = await made(client, text_of(line("a"), line("b"), line("c", "x" * 400)))
        while batch.request_counts.completed == 0:
            await asyncio.sleep(0.002)
            batch = await client.batches.retrieve(batch.id)
        return batch.id

    name = run(app_at(place, engine, batch_concurrency=1), begin)

    async def again(client: openai.AsyncOpenAI) -> Any:
        batch = await over(client, await client.batches.retrieve(name))
        return batch, await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)

    batch, answers, errors = run(app_at(place, max_batch_lines=1, max_body_bytes=300), again)
    assert batch.status == "completed" and set(answers) == {"a", "b"}
    assert errors["c"]["response"]["status_code"] == 413


def test_the_batch_of_a_key_that_is_gone_fails(place: str, tmp_path: Path) -> None:
    async def begin(client: openai.AsyncOpenAI) -> Any:
        return await made(client, text_of(line("a")))

    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "ben", "sha256": sha256(BEN.encode()).hexdigest()}]}))
    run(app_at(place, FakeEngine(hold=True), key_file=str(keys)), begin, BEN)
    keys.write_text(json.dumps({"keys": [{"name": "ann", "sha256": sha256(ANN.encode()).hexdigest()}]}))
    engine, app = FakeEngine(), app_at(place, key_file=str(keys))

    async def wait(client: openai.AsyncOpenAI) -> Any:
        (record,) = app.state.desk.of("ben")
        while record.status in OPEN:
            await asyncio.sleep(0.002)
        return record

    assert run(app, wait, ANN).errors[0]["code"] == "no_key" and not engine.asked


def test_the_document_and_the_metrics_tell_of_batches(place: str) -> None:
    app = app_at(place)

    async def calls(client: openai.AsyncOpenAI) -> Any:
        return await over(client, await made(client, text_of(line("a"), line("b", temperature=-1.0))))

    run(app, calls)
    document, metrics = send_all(app, [("GET", "/openapi.json", {}), ("GET", "/metrics", {})])
    paths = {"/v1/files", "/v1/files/{file_id}/content", "/v1/batches/{batch_id}/cancel"}
    assert paths <= set(document.json()["paths"])
    for sample in (
        'batches_open{model_name="fake"} 0.0',
        'batches_total{model_name="fake",status="completed"} 1.0',
        'batch_lines_total{model_name="fake",outcome="completed"} 1.0',
        'batch_lines_total{model_name="fake",outcome="failed"} 1.0',
    ):
        assert f"octavo:{sample}" in metrics.text
    assert 'priority="bulk"' in metrics.text


def test_what_a_batch_does_not_know_is_named(place: str) -> None:
    app = app_at(place)
    file = post_file(app, content=text_of(line("a"))).json()["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "output_expires_after": {"seconds": 1}, "metadate": {}}
    answer = send(app, "POST", "/v1/batches", json=asked)
    assert answer.headers["x-octavo-warnings"] == "output_expires_after, metadate"
    assert "metadata" in answer.json()["warnings"][1]["message"]
    check_error(send(app, "POST", "/v1/batches", json={**asked, "metadata": {"a": "x" * 513}}), 400, "metadata")


def test_a_batch_has_used_what_its_lines_have() -> None:
    about = {"endpoint": CHAT, "input_file_id": "f", "model": "m"}
    batch = new_batch("", ("24h", 86_400), **about)
    chat = {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    response = {
        "input_tokens": 3,
        "output_tokens": 6,
        "total_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
    }
    for usage in (chat, {**chat, "completion_tokens_details": {"reasoning_tokens": 3}}, response):
        batch.count({"response": {"status_code": 200, "body": {"usage": usage}}})
    assert batch.told()["usage"] == {
        "input_tokens": 7,
        "output_tokens": 16,
        "total_tokens": 23,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens_details": {"reasoning_tokens": 7},
    }
