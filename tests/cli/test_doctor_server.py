"""`octavo doctor --server`: a server of canned answers, and what is found and advised."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from octavo import __version__
from octavo.cli.doctor import Finding
from octavo.cli.doctor_server import metric_values, server_findings
from octavo.core.errors import InvalidInput

METRICS = """# HELP octavo:pages_total Pages.
octavo:pages_total{model_name="m"} 100.0
octavo:pages_referenced{model_name="m"} 40.0
vllm:num_requests_running{model_name="m"} 2.0
octavo:last_step_age_seconds{model_name="m"} 0.1
vllm:request_success_total{model_name="m",finished_reason="stop"} 7.0
vllm:request_success_total{model_name="m",finished_reason="length"} 5.0
vllm:num_preemptions_total{model_name="m"} 0.0
"""


@contextmanager
def server(metrics: str = METRICS, **answers: tuple[int, Any]) -> Iterator[str]:
    told: dict[str, tuple[int, Any]] = {
        "version": (200, {"version": __version__, "layout": "compact"}),
        "live": (200, {"reason": None}),
        "ready": (200, {"reason": None}),
        "models": (200, {"data": [{"id": "tiny", "max_model_len": 64}]}),
        **answers,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            last = self.path.rsplit("/", 1)[1]
            status, body = (200, None) if last == "metrics" else told[last]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(metrics.encode() if last == "metrics" else json.dumps(body).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()


def found(url: str) -> dict[str, Finding]:
    return {finding.what: finding for finding in server_findings(url)}


def test_a_healthy_server_needs_nothing() -> None:
    with server() as url:
        all_of_it = found(url)
    assert [finding.what for finding in all_of_it.values() if finding.remedy] == []
    assert all_of_it["server"].found == f"{__version__}, layout compact"
    assert all_of_it["model"].found == "tiny (64 tokens)"
    assert all_of_it["KV pages"].found.startswith("40 in use of 100 planned")
    assert "at 12 answers" in all_of_it["preemptions"].found


@pytest.mark.parametrize(
    ("answers", "metrics", "what"),
    [
        ({"ready": (503, {"reason": "full"})}, METRICS, "ready"),
        ({"live": (503, {"reason": "stuck"})}, METRICS, "live"),
        ({"version": (200, {"version": "0.0.0"})}, METRICS, "server"),
        ({"version": (401, {"error": {}})}, METRICS, "server"),
        ({"version": (200, ["another server"])}, METRICS, "server"),
        ({}, METRICS.replace(" 40.0", " 99.0"), "KV pages"),
        ({}, METRICS.replace(" 0.1", " 60.0"), "queue"),
        ({}, METRICS + 'vllm:num_preemptions_total{model_name="m"} 9.0\n', "preemptions"),
        ({}, METRICS + 'octavo:restore_failures_total{reason="disk"} 1.0\n', "tiers"),
    ],
)
def test_what_is_not_well_comes_with_a_remedy(answers: dict[str, Any], metrics: str, what: str) -> None:
    with server(metrics, **answers) as url:
        assert [name for name, finding in found(url).items() if finding.remedy] == [what]


def test_nobody_there_and_no_url() -> None:
    (nobody,) = server_findings("http://127.0.0.1:9")
    assert nobody.fatal and "is it running there?" in nobody.remedy
    with pytest.raises(InvalidInput, match="give a URL"):
        list(server_findings("file:///etc/passwd"))


def test_our_own_metrics_are_read() -> None:
    assert metric_values('a{x="1"} 2\na{x="2"} 3.5\n# c\nb 1e3\nc NaN\n')["a"] == 5.5
