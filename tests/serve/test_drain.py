"""SIGTERM in both layouts: what is open is answered, a second one ends at once; and what systemd is told meanwhile."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from live_server import LiveServer, live_server

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
BODY = b'{"prompt": "ab", "max_tokens": 4}'


@pytest.fixture(autouse=True)
def hangups_end() -> Iterator[None]:
    """Also where the tests themselves run under nohup: what is ignored here is ignored by the servers, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_server_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with live_server(TINY, "--layout", "single") as server:
        server.process.send_signal(signal.SIGHUP)
        assert httpx.post(f"{server.url}/v1/completions", content=BODY, timeout=30).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def half_sent(server: LiveServer) -> socket.socket:
    """A request whose body has not come yet."""
    client = socket.create_connection(address(server), timeout=30)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n"
    client.sendall(head.format(len(BODY)).encode())
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it is inside
    return client


def address(server: LiveServer) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


@pytest.mark.parametrize("layout", ["single", "compact"])
def test_what_is_open_is_answered_and_a_second_signal_ends_at_once(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with live_server(TINY, "--layout", layout, "--shutdown-timeout", "500") as server:
            assert manager.recv(100) == b"READY=1"
            client, held = half_sent(server), half_sent(server)
            server.process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            late = httpx.post(f"{server.url}/v1/completions", content=BODY, timeout=30)
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            assert httpx.get(f"{server.url}/health/ready", timeout=30).status_code == 503
            client.sendall(BODY)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            assert server.process.poll() is None  # for the other's sake
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
            assert not held.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("layout", ["single", "compact"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_open_at_the_limit_ends_with_an_error(layout: str, number: int) -> None:
    flags = ("--layout", layout, "--backend", "reference", "--max-running-requests", "1", "--shutdown-timeout", "0.5")
    with live_server(TINY, *flags) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"prompt": "ab", "n": 64, "max_tokens": 100, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(number)
            told = [line for line in lines if line]
        assert '"code":"draining"' in told[-2].replace(" ", "") and told[-1] == "data: [DONE]"
        assert server.process.wait(10) == 0
