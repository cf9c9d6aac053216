"""The server as a process, with the tiny model: signals, ports, and a request over a socket."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from live_server import live_server, wait_idle

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")


def _sent_whole_before_reading(url: str, size: int) -> bytes:
    """What a client gets that writes all of its body, then reads to the end. A reset connection raises."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port or 0), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size)
        client.sendall(b" " * size)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    return answer


def test_it_serves_and_ends_cleanly_though_a_stream_is_open() -> None:
    with live_server(TINY, "--shutdown-timeout", "1", "--max-body-bytes", "1000000") as server:
        body = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1] != ""
        busy = subprocess.run(
            [sys.executable, "-m", "octavo", "serve", TINY, "--port", str(urlsplit(server.url).port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert busy.returncode == 2 and "choose another" in busy.stderr and "Traceback" not in busy.stderr
        large = httpx.post(f"{server.url}/v1/completions", content=b" " * (8 << 20))
        assert large.status_code == 413
        assert _sent_whole_before_reading(server.url, 24 << 20).startswith(b"HTTP/1.1 413 ")
        assert wait_idle(server.url)
        held = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port or 0))
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    held.close()


def test_interrupted_while_loading_it_ends_cleanly() -> None:
    command = [sys.executable, "-m", "octavo", "serve", TINY, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        process.stdout.readline()  # type: ignore[union-attr]  (the first line of the plan: loading has begun)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in err, err
