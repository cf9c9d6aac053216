"""Engine, front end and supervisor as processes, with the tiny model, and with real kills."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server, metric, wait_idle

from octavo.serve.config import ServeConfig
from octavo.serve.roles.supervisor import _Supervisor

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
COMPACT = (TINY, "--layout", "compact", "--backend", "reference")
FULL = (TINY, "--layout", "full", "--backend", "reference")
EXTRA: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": 2},
    {"stop": ["q"]},
    {"temperature": 0},
    {"prompt_logprobs": 1, "n": 2},
]


def children(pid: int) -> dict[str, int]:
    """Seat to process id of all that a supervisor has running."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it has just ended
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found |= {word.decode()[7:]: int(child) for word in arguments if word.startswith(b"octavo-")}
    return found


def until(condition: Any, seconds: float = 30.0) -> Any:
    """The first true value of a condition."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.02)
    return found


def body(index: int) -> dict[str, Any]:
    """A request that takes a while; some have a stop string, logprobs, two choices."""
    asked = {"prompt": "the quick brown fox"[: 3 + index], "max_tokens": 24, "seed": index, "request_id": f"r{index}"}
    return {**asked, **EXTRA[index], "stream": True, "return_token_ids": True, "ignore_eos": True}


async def read(client: httpx.AsyncClient, asked: dict[str, Any], heard: asyncio.Event) -> dict[int, list[Any]]:
    """What a stream says, choice by choice: tokens, text, logprobs, ends, joined."""
    told: dict[int, list[Any]] = {}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                mine = told.setdefault(choice["index"], [[], "", [], [], []])
                mine[0] += choice["token_ids"] or []
                mine[1] += choice["text"]
                mine[2] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                mine[3] += [choice["finish_reason"], choice["stop_reason"]] if choice["finish_reason"] else []
                mine[4] += [choice["prompt_logprobs"]] if choice.get("prompt_logprobs") else []
                if len(mine[0]) >= 5:
                    heard.set()
    return told


async def all_streams(url: str, between: Any = None) -> list[dict[int, list[Any]]]:
    """Several streams at once; `between` is done once all have said something, off the loop."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        heard = [asyncio.Event() for _ in range(len(EXTRA))]
        reading = [asyncio.ensure_future(read(client, body(i), heard[i])) for i in range(len(EXTRA))]
        if between is not None:
            await asyncio.gather(*(event.wait() for event in heard))
            await asyncio.to_thread(between)
        return list(await asyncio.gather(*reading))


def strike(server: LiveServer, seat: str, number: int = signal.SIGKILL) -> None:
    os.kill(children(server.process.pid)[seat], number)


def status_of(url: str, name: str) -> str:
    """What a fresh connection is told of a request."""
    answer = httpx.get(f"{url}/v1/requests/{name}", timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["status"])


def renewed(server: LiveServer, seat: str, number: int = signal.SIGKILL) -> None:
    """Strike, and wait for another process."""
    struck = children(server.process.pid)[seat]
    os.kill(struck, number)
    until(lambda: children(server.process.pid).get(seat, struck) != struck)


def pause(server: LiveServer, seat: str, seconds: float) -> None:
    """Have a process stand still for less than the silence that counts as death."""
    strike(server, seat, signal.SIGSTOP)
    time.sleep(seconds)
    strike(server, seat, signal.SIGCONT)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers started here have their folders of sockets."""
    with TemporaryDirectory(prefix="o") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_vectors_are_made_again_when_the_engine_is_killed(run: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog "[i:] + "and sleeps"[: i % 8] for i in range(36)]

    def ask(url: str, kind: str) -> Any:
        asked = {"input": texts, "pooling": kind, "encoding_format": "base64"}
        answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=120).json()
        return [answer["data"], answer["usage"]]

    told = []
    for layout, seats in (("single", ()), ("compact", ("engine",)), ("full", ("engine", "detokenizer"))):
        flags = ("--backend", "reference", "--layout", layout, "--max-batched-tokens", "16")
        with live_server(TINY, *flags) as server:
            told.append([ask(server.url, kind) for kind in ("mean", "last")])

            def struck_in_the_middle(seat: str) -> bool:
                """Whether it had not ended before; on a busy machine it may have."""
                until(lambda: is_healthy(server.url))
                with ThreadPoolExecutor(1) as later:
                    again = later.submit(ask, server.url, "mean")
                    until(lambda: again.done() or metric(server.url, "vllm:num_requests_running") > 0)
                    in_time = not again.done()
                    strike(server, seat)
                    assert again.result() == told[0][0]
                return in_time

            for seat in seats:
                until(lambda seat=seat: struck_in_the_middle(seat), 120)
            assert wait_idle(server.url)
    assert told[0] == told[1] == told[2]  # whatever the layout
    assert len({item["embedding"] for item in told[0][0][0]}) == len(texts)


def test_every_stream_goes_on_when_the_engine_is_killed_or_stands_still(run: Path) -> None:
    with live_server(*COMPACT, "--silence-timeout", "2") as server:
        undisturbed = asyncio.run(all_streams(server.url))
        assert all(len(told[0][0]) == 24 or told[0][3] == ["stop", "q"] for told in undisturbed)
        before = children(server.process.pid)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            hit = partial(renewed, server, "engine", number)
            assert asyncio.run(all_streams(server.url, hit)) == undisturbed
            until(lambda: is_healthy(server.url))
        assert asyncio.run(all_streams(server.url, partial(pause, server, "api-0", 0.3))) == undisturbed
        after = children(server.process.pid)
        assert after["api-0"] == before["api-0"] and after["engine"] != before["engine"]
        assert wait_idle(server.url)
        assert [line for line in server.output if "has ended" in line] == ["engine has ended with -9\n"] * 2
        (folder,) = run.iterdir()
        assert len(list(folder.iterdir())) == 2  # no sockets of the dead


def test_nobody_is_ended_because_others_slept() -> None:
    with live_server(*COMPACT, "--silence-timeout", "2") as server:
        undisturbed = asyncio.run(all_streams(server.url))
        before = children(server.process.pid)

        def stand_still() -> None:
            for number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.5)):
                for pid in (server.process.pid, *before.values()):
                    os.kill(pid, number)
                time.sleep(seconds)

        assert asyncio.run(all_streams(server.url, stand_still)) == undisturbed
        assert children(server.process.pid) == before


SHIM = str(Path(__file__).resolve().parents[1] / "faults" / "shim")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Servers started here can be told to fail: what is given back does so, by seat, fault and number."""
    monkeypatch.setenv("OCTAVO_FAULTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SHIM, os.environ.get("PYTHONPATH", "")]))

    def inject(server: LiveServer, seat: str, fault: str, value: float) -> None:
        (tmp_path / str(children(server.process.pid)[seat])).write_text(f"{fault} {value}")
        strike(server, seat, signal.SIGUSR1)

    return inject


def test_an_engine_whose_step_hangs_is_started_anew(faults: Any) -> None:
    with live_server(*COMPACT, "--silence-timeout", "2", "--step-timeout", "1.5") as server:
        undisturbed = asyncio.run(all_streams(server.url))
        before = children(server.process.pid)["engine"]
        assert asyncio.run(all_streams(server.url, partial(faults, server, "engine", "hang", 1.2))) == undisturbed
        assert children(server.process.pid)["engine"] == before
        assert asyncio.run(all_streams(server.url, partial(faults, server, "engine", "hang", 600.0))) == undisturbed
        until(lambda: children(server.process.pid).get("engine", before) != before)
        until(lambda: is_healthy(server.url))
        assert [line for line in server.output if "has ended" in line] == ["engine has ended with -9\n"]


def test_every_stream_goes_on_when_who_makes_the_text_is_killed() -> None:
    with live_server(*FULL, "--link", "tcp://127.0.0.1") as server:
        undisturbed = asyncio.run(all_streams(server.url))
        assert all(len(told[0][0]) == 24 or told[0][3] == ["stop", "q"] for told in undisturbed)

        def hit() -> None:
            strike(server, "detokenizer")
            strike(server, "tokenizer-0")

        assert asyncio.run(all_streams(server.url, hit)) == undisturbed
        until(lambda: is_healthy(server.url))
        assert wait_idle(server.url)


def test_no_thread_has_to_be_started_to_serve(faults: Any) -> None:
    with live_server(*COMPACT) as server:
        for seat in ("engine", "api-0"):
            faults(server, seat, "no_threads", 600.0)
        large = {"prompt": "abc", "max_tokens": 2, "user": "x" * 100_000}
        until(lambda: is_healthy(server.url))
        for _ in range(4):
            assert httpx.post(f"{server.url}/v1/completions", json=large).status_code == 200
        assert asyncio.run(all_streams(server.url))[0][0][0]


async def struck(url: str, between: Any) -> tuple[list[str], list[str]]:
    """Many streams over connections of their own, of which some break in `between`: ids that ended well, and others."""

    async def one(name: str) -> bool:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            try:
                told = await read(client, {**body(0), "max_tokens": 110, "request_id": name}, asyncio.Event())
            except httpx.HTTPError:
                return False
            return told[0][3][:1] == ["length"] and len(told[0][0]) == 110

    names = [f"s{i}" for i in range(8)]
    reading = [asyncio.ensure_future(one(name)) for name in names]
    await asyncio.to_thread(between)
    ends = await asyncio.gather(*reading)
    return [n for n, end in zip(names, ends, strict=True) if end], [
        n for n, e in zip(names, ends, strict=True) if not e
    ]


def test_several_front_ends_are_one_server() -> None:
    flags = ("--apis", "2", "--max-running-requests", "1", "--silence-timeout", "300")
    with live_server(*FULL, *flags) as server:

        def answers(name: str) -> set[Any]:
            """What fresh connections are told of a request, whichever front end takes them."""
            return {status_of(server.url, name) for _ in range(4)}

        def hit() -> None:
            """While the engine stands still, so no stream can end."""
            until(lambda: all(answers(f"s{i}") == {"running"} for i in range(8)), 120)
            asked = {**body(0), "request_id": "s7"}
            with ThreadPoolExecutor(6) as clients:
                again = clients.map(partial(httpx.post, json=asked, timeout=60), [f"{server.url}/v1/completions"] * 6)
            assert {answer.status_code for answer in again} == {409}
            found = children(server.process.pid)
            busy = max(("api-0", "api-1"), key=lambda seat: len(os.listdir(f"/proc/{found[seat]}/fd")))
            os.kill(found[busy], signal.SIGKILL)
            strike(server, "engine", signal.SIGCONT)

        strike(server, "engine", signal.SIGSTOP)
        well, broken = asyncio.run(struck(server.url, hit))
        assert broken
        for name in broken[:2]:
            until(lambda name=name: answers(name) == {"cancelled"})
        assert all(answers(name) == {"finished"} for name in well[:2])
        until(lambda: len([seat for seat in children(server.process.pid) if seat.startswith("api")]) == 2)
        until(lambda: is_healthy(server.url))
        assert wait_idle(server.url)
        request = {**body(0), "stream": False, "request_id": "last"}
        assert httpx.post(f"{server.url}/v1/completions", json=request).status_code == 200
        seen = [metric(server.url, "vllm:request_success_total") for _ in range(6)]
        assert seen == sorted(seen) and 1 <= seen[-1] <= len(well) + 1  # whoever is asked, no counter falls
        asked = {"input": "ab", "previous_response_id": "resp_x"}
        refused = httpx.post(f"{server.url}/v1/responses", json=asked)
        assert refused.status_code == 400 and "--apis 1" in refused.text


async def flood(url: str, requests: int, between: Any) -> None:
    """More requests than are run at once; `between` is done once the first one has said something."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        heard = asyncio.Event()
        asked = [{**body(0), "max_tokens": 64, "request_id": f"f{i}"} for i in range(requests)]
        reading = [asyncio.ensure_future(read(client, one, heard)) for one in asked]
        await heard.wait()
        await asyncio.to_thread(between)
        assert any(isinstance(e, httpx.HTTPError) for e in await asyncio.gather(*reading, return_exceptions=True))


def test_what_a_dead_front_end_had_asked_for_is_cancelled() -> None:
    with live_server(*COMPACT, "--max-running-requests", "2") as server:
        engine = children(server.process.pid)["engine"]

        def strike_when_many_wait() -> None:
            until(lambda: metric(server.url, "vllm:num_requests_waiting") > 20)
            strike(server, "api-0")

        asyncio.run(flood(server.url, 90, strike_when_many_wait))
        until(lambda: is_healthy(server.url))
        assert wait_idle(server.url)
        assert metric(server.url, "octavo:steps_total") < 0.7 * 90 * 64 / 2  # it was not run to its end
        assert children(server.process.pid)["engine"] == engine
        told = [status_of(server.url, f"f{i}") for i in range(90)]
        assert set(told) <= {"cancelled", "unknown"} and told.count("cancelled") > 10  # the others had ended
        assert status_of(server.url, "r0") == "unknown"
        assert asyncio.run(all_streams(server.url))[0][0][0]  # the same ids may come again
        assert status_of(server.url, "r0") == "finished"

        def end() -> None:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not is_healthy(server.url))  # it lets nobody in

        drained = asyncio.run(all_streams(server.url, end))
        assert all(told[0][3] for told in drained)
        assert server.process.wait(10) == 0


def test_a_second_signal_ends_everything_at_once() -> None:
    with live_server(*COMPACT, "--shutdown-timeout", "60", "--max-running-requests", "2") as server:
        left = children(server.process.pid).values()

        def end() -> None:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not is_healthy(server.url))
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(10) == 0

        asyncio.run(flood(server.url, 90, end))
        assert not any(is_running(pid) for pid in left)


def cpu_time(pid: int) -> int:
    """Clock ticks that a process has run for."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def is_waiting(pid: int) -> bool:
    """Whether a process that has begun does nothing for a while."""
    before = cpu_time(pid)
    time.sleep(0.3)
    return before == cpu_time(pid) > 10


def test_a_front_end_that_waits_for_its_engine_ends_when_it_is_told() -> None:
    with live_server(*COMPACT, "--shutdown-timeout", "600") as server:
        dead = children(server.process.pid)
        for pid in dead.values():
            os.kill(pid, signal.SIGKILL)

        def others() -> dict[str, int]:
            found = children(server.process.pid)
            return found if len(found) == 2 and not set(found.values()) & set(dead.values()) else {}

        found = until(others)
        os.kill(found["engine"], signal.SIGSTOP)  # so that there is none for long
        until(lambda: is_waiting(found["api-0"]))


def unread() -> int:
    """A pipe that nobody reads."""
    ears, mouth = os.pipe()
    os.close(ears)
    return mouth


@pytest.mark.parametrize("opened", [unread, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["unread", "full"])
def test_a_server_goes_on_when_nothing_of_what_it_says_can_be_written(opened: Callable[[], int]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mouth = opened()
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), "--log-format", "json", *COMPACT]
    process = subprocess.Popen(command, stdout=mouth, stderr=mouth)
    os.close(mouth)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_healthy(url), 60.0)
        engine = children(process.pid)["engine"]
        os.kill(engine, signal.SIGKILL)
        until(lambda: children(process.pid).get("engine", engine) != engine)
        until(lambda: is_healthy(url))
        for count in (1, 2):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
            until(lambda count=count: metric(url, "octavo:log_lines_dropped_total") >= count)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


class NoProcess:
    """A system that has no more processes to give."""

    config = ServeConfig()

    def start(self, seat: str, epoch: int, *more: str) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.parametrize("has_served", [False, True])
def test_a_process_that_cannot_be_started_is_tried_later(has_served: bool) -> None:
    supervisor: Any = _Supervisor(NoProcess(), None)  # type: ignore[arg-type]
    for seat in supervisor.plan._seats:
        seat.was_ready = has_served
    supervisor.plan.tick(0.0)
    supervisor._act()
    assert (supervisor._end is None) == has_served
    assert has_served or supervisor._end.code == 1
    assert not supervisor._children


def test_nobody_outlives_the_supervisor(run: Path) -> None:
    with pytest.raises(AssertionError, match="ended with -9"), live_server(*COMPACT) as server:
        (folder,) = run.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        names = sorted(path.name.split("-")[0] for path in folder.iterdir())
        assert names == ["control", "engine"]
        left = children(server.process.pid).values()
        assert len(left) == 2
        server.process.kill()
        until(lambda: not any(is_running(pid) for pid in left), 10.0)
        assert list(run.iterdir()) == []


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only to be buried."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text('raise ImportError("advice\\n\\nno room for a segment\\n")')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        "--port",
        "0",
        TINY,
        "--layout",
        "compact",
        "--backend",
        "numpy",
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1 and "no room for a segment" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "flags, remedy", [(["--layout", "fast"], "use one of"), (["--layout", "compact", "nowhere.json"], "nowhere.json")]
)
def test_what_is_not_there_is_refused_by_name(flags: list[str], remedy: str) -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *flags]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and remedy in found.stderr and "Traceback" not in found.stderr


def operator(path: Path) -> Callable[..., Any]:
    """Asks the operator's socket; None while nobody is there."""

    def ask(method: str, route: str, **values: Any) -> Any:
        with suppress(httpx.TransportError), httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            return client.request(method, f"http://admin{route}", **({"json": values} if values else {})).json()
        return None

    return ask


def test_what_the_operator_sets_outlives_a_front_end_and_another_model_takes_the_place_of_one(tmp_path: Path) -> None:
    path, other = tmp_path / "admin", tmp_path / "other.json"
    other.write_text(Path(TINY).read_text().replace("tiny-llama", "tiny-other"))
    ask = operator(path)
    with live_server(*COMPACT, "--admin-socket", str(path)) as server:
        ask("POST", "/log_level", level="error")
        assert ask("POST", "/drain")["draining"]
        front = children(server.process.pid)["api-0"]
        os.kill(front, signal.SIGKILL)
        state = until(lambda: ask("GET", "/state"))
        assert state["draining"] and state["log_level"] == "error"
        before = ask("POST", "/resume")["model"]
        assert ask("POST", "/model", model=str(other))["replacing"] == str(other)
        after = until(lambda: (found := ask("GET", "/state")) and not found["replacing"] and found)
        assert after["problem"] is None and after["log_level"] == "error"
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == after["model"] != before
        assert httpx.get(f"{server.url}/api/tags").json()["models"][0]["size"] == other.stat().st_size
        ask("POST", "/model", model=str(tmp_path / "nowhere.json"))
        failed = until(lambda: (found := ask("GET", "/state")) and found["problem"] and found)
        assert "nowhere" in failed["problem"]
        until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200)
        assert ask("GET", "/state")["model"] == after["model"]
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200, answer.text
