"""Metrics, log lines and spans of requests; the table of metrics against what is scraped, documented and drawn."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fake_engine import FakeDelta, FakeEngine
from metric_pages import DASHBOARD, PAGE, dashboard, page_with, table
from prometheus_client.parser import text_string_to_metric_families
from serve_http import CHAT, COMPLETIONS, HELLO, Client, make_app, send, send_all

from octavo.core.errors import InvalidInput
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError
from octavo.serve.logs import JsonFormatter
from octavo.serve.metric_table import METRICS
from octavo.serve.metrics import Metrics, failure_class
from octavo.serve.tracing import Tracing, tracing_to
from octavo.serve.trail import Trail

SECRET = "a very private prompt"
PARTS = {"read", "tokenize", "queue", "prefill", "sample", "deliver", "network"}


class Measuring(FakeEngine):
    """An engine that says what it measured."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[FakeDelta, None]:
        async for delta in super().generate(*args, **kwargs):
            if delta.num_output_tokens == 1:
                delta = replace(delta, first=(1.0, 2.0, 0.5))
            yield replace(delta, spent=(6.0, 9.0)) if delta.finish_reason else delta

    def stats(self) -> dict[str, float]:
        told = super().stats()
        for metric in METRICS:
            if metric.stat and metric.buckets:
                told |= {f"{metric.stat}/le/{metric.buckets[0]}": 4, f"{metric.stat}/sum": 0.5}
            elif metric.stat and metric.stat != "kv_usage":
                told.setdefault(metric.stat + ("ann" if metric.stat.endswith("/") else ""), 2.0)
        return told


def scrape(app: Any) -> dict[str, float]:
    """Every sample by its name and its labels, without the model's."""
    text = send(app, "GET", "/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le"))
            if "le" not in sample.labels:
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def stream(app: Any, body: dict[str, Any]) -> None:
    asyncio.run(Client(app, COMPLETIONS, {"max_tokens": 4, "stream": True, **body}).run())


def test_the_page_and_the_dashboard_are_the_tables() -> None:
    remedy = "python tests/serve/metric_pages.py writes it"
    assert PAGE.read_text() == page_with(PAGE.read_text(), table()), remedy
    assert DASHBOARD.read_text() == dashboard(), remedy


def test_what_is_drawn_is_scraped_and_what_is_scraped_is_documented_and_drawn() -> None:
    app = make_app(Measuring())
    stream(app, {"prompt": SECRET})
    send(app, "POST", COMPLETIONS, json={"prompt": 5})
    full = make_app(Measuring(), max_pending=1)
    send_all(full, [("POST", COMPLETIONS, {"json": {"prompt": "a"}})] * 2)
    scraped = {re.sub(r"(_count|_sum|_created)?\{.*", "", name) for name in [*scrape(app), *scrape(full)]}
    drawn = {
        re.sub("_bucket$", "", name)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|octavo):\w+", target["expr"])
    }
    documented = set(re.findall(r"^\| `([\w:]+)`", PAGE.read_text(), re.MULTILINE))
    assert drawn == documented == {metric.name for metric in METRICS}
    with_batches = {metric.name for metric in METRICS if metric.when == "--batch-dir"}  # test_batches
    assert documented - scraped <= {"octavo:first_token_forecast_error", *with_batches}  # needs a pace that is known
    assert scraped <= documented


def test_a_stream_leaves_all_its_times() -> None:
    app = make_app(Measuring())
    stream(app, {"prompt": SECRET, "priority": -2})
    found, who = scrape(app), "priority=high,tenant=none"
    for part in PARTS:
        assert found[f"octavo:first_token_part_seconds_count{{part={part},{who}}}"] == 1, part
    assert found[f"octavo:first_token_part_seconds_sum{{part=queue,{who}}}"] == 1.0
    assert found[f"vllm:request_queue_time_seconds_sum{{{who}}}"] == 1.0
    assert found[f"vllm:request_prefill_time_seconds_sum{{{who}}}"] == 2.5
    assert found[f"vllm:request_inference_time_seconds_sum{{{who}}}"] == 8.5
    assert found[f"octavo:time_per_output_token_seconds_sum{{at=engine,{who}}}"] == 2.0
    assert found[f"octavo:time_per_output_token_seconds_count{{at=socket,{who}}}"] == 1
    assert found[f"octavo:socket_inter_token_latency_seconds_count{{{who}}}"] == 3
    assert found[f"vllm:request_params_max_tokens_sum{{{who}}}"] == 4
    assert found["octavo:core_seconds_total{tenant=ann}"] == 2.0
    assert found["octavo:engine_inter_token_latency_seconds_count{}"] == 4
    assert found["octavo:active_requests{}"] == 0


def test_what_is_written_before_the_first_token_is_no_token() -> None:
    app, who = make_app(Measuring()), "priority=normal,tenant=none"
    asyncio.run(Client(app, CHAT, {**HELLO, "max_tokens": 4, "stream": True}).run())  # begins with a role
    found = scrape(app)
    assert found[f"octavo:first_token_part_seconds_sum{{part=network,{who}}}"] >= 0.0
    assert found[f"octavo:socket_inter_token_latency_seconds_count{{{who}}}"] == 3


def test_parts_add_up_to_the_first_byte_written() -> None:
    trail = Trail(arrived=10.0, tokenize=0.25, submitted=11.0, engine=(0.5, 1.0, 0.125), first_token=13.0)
    trail.first_written = 13.5
    assert set(trail.parts()) == PARTS and sum(trail.parts().values()) == 3.5
    assert not Trail(submitted=1.0).parts()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ApiError(400, ""), "invalid_input"),
        (ApiError(404, "", code="model_not_found"), "invalid_input"),
        (ApiError(413, ""), "invalid_input"),
        (ApiError(400, "", code="invalid_grammar"), "invalid_input"),
        (ApiError(400, "", code="grammar_failed"), "grammar"),
        (ApiError(401, "", code="invalid_api_key"), "denied"),
        (ApiError(403, ""), "denied"),
        (ApiError(409, "", code="cancelled"), "cancelled"),
        (ApiError(429, "", code="queue_full"), "overload"),
        (ApiError(429, "", code="quota_tokens"), "quota"),
        (ApiError(500, "", code="engine_error"), "engine_error"),
        (ApiError(500, "", code="internal_error"), "internal"),
        (ApiError(503, "", code="draining"), "draining"),
        (ApiError(503, "", code="engine_down"), "engine_restart"),
        (ApiError(504, "", code="timeout"), "deadline"),
        (ApiError(408, "", code="deadline"), "deadline"),
    ],
)
def test_every_failure_has_a_class(error: ApiError, name: str) -> None:
    assert failure_class(error) == name
    metrics = Metrics(FakeEngine(), "fake")
    assert metrics.failed(error) and not metrics.failed(error)  # once, however often it is told
    assert f'class="{name}"' in metrics.text().decode()


@pytest.mark.parametrize("streams", [False, True])
def test_failures_of_real_requests_are_counted_once(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.requests")
    for engine, limits, name in (
        (FakeEngine(fail_after=0), {}, "engine_error"),
        (FakeEngine(hold=True), {"request_timeout": 0.02}, "deadline"),
        (FakeEngine(problem="it is gone"), {}, "engine_restart"),
    ):
        caplog.clear()
        app = make_app(engine, **limits)
        send(app, "POST", COMPLETIONS, json={"prompt": SECRET, "stream": streams})
        found = {key: value for key, value in scrape(app).items() if key.startswith("octavo:request_failures_total")}
        assert [*found.values()] == [1] and f"class={name}," in next(iter(found))
        assert [record.fields["outcome"] for record in caplog.records if hasattr(record, "fields")] == [name]


def test_a_client_that_leaves_is_one_cancelled_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.requests")
    app = make_app(FakeEngine(hold_after=2))

    async def leave() -> None:
        client = Client(app, COMPLETIONS, {"prompt": SECRET, "stream": True})
        running = asyncio.ensure_future(client.run())
        await client.until_sent(3)
        client.leave()
        await running

    asyncio.run(leave())
    assert scrape(app)["octavo:request_failures_total{class=cancelled,tenant=none}"] == 1
    assert [record.fields["outcome"] for record in caplog.records] == ["cancelled"]


def test_a_request_is_one_line_of_json_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = make_app(Measuring())
    stream(app, {"prompt": SECRET, "request_id": "mine"})
    send(app, "POST", COMPLETIONS, json={"prompt": SECRET, "top_p": 5})
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name == "octavo.requests"]
    served, refused = map(json.loads, lines)
    assert served["request_id"] == "mine" and served["outcome"] == "length" and served["core_seconds"] == 9.0
    assert served["output_tokens"] == 4 and {f"{part}_seconds" for part in PARTS} <= set(served)
    assert refused["outcome"] == "invalid_input" and refused["param"] == "top_p" and refused["status"] == 400
    assert not [record for record in caplog.records if SECRET.upper() in record.getMessage().upper()]
    assert not [line for line in lines if SECRET.upper() in line.upper() or "\n" in line]


@pytest.mark.parametrize(
    ("style", "level", "shown"), [("json", "warning", True), ("text", "warning", False), ("text", "info", True)]
)
def test_lines_for_requests_come_with_json_or_with_info(style: str, level: str, shown: bool) -> None:
    program = (
        "import logging; from octavo.serve.config import ServeConfig;"
        "from octavo.serve.logs import log_request, set_up_logging;"
        f"set_up_logging(ServeConfig(log_format={style!r}, log_level={level!r}));"
        "log_request(lambda: {'request_id': 'mine'}); logging.getLogger('octavo.serve').error('two\\nlines')"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = told.stderr.splitlines()
    assert any("mine" in line for line in lines) == shown
    if style == "json":
        assert [json.loads(line)["message"] for line in lines] == ["request", "two\nlines"]


def test_a_format_or_an_endpoint_that_is_none_is_refused() -> None:
    for values in ({"log_format": "xml"}, {"otlp_endpoint": "localhost"}):
        with pytest.raises(InvalidInput, match=next(iter(values))):
            ServeConfig(**values)


def test_a_request_is_a_span_with_its_parts_below_it() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trail = Trail("mine", arrived=10.0, tokenize=0.25, submitted=11.0, engine=(0.5, 1.0, 0.125), first_token=13.0)
    trail.last_token, trail.ended, trail.traceparent = 14.0, 15.0, f"00-{'ab' * 16}-{'cd' * 8}-01"
    Tracing(provider, "m").ended(trail)
    *parts, whole = kept.get_finished_spans()
    assert [part.name for part in parts] == [*trail.parts(), "decode"]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    assert f"{whole.parent.span_id:x}" == "cd" * 8 and f"{whole.context.trace_id:x}" == "ab" * 16
    assert whole.end_time - whole.start_time == pytest.approx(5e9, abs=1e3)
    assert [part.start_time for part in parts[1:-1]] == [part.end_time for part in parts[:-2]]
    assert whole.attributes["gen_ai.request.id"] == "mine"


def test_spans_reach_a_collector_before_the_end() -> None:
    heard: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *values: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tracing = tracing_to(f"http://127.0.0.1:{server.server_port}/v1/traces", "m")
        assert tracing is not None
        tracing.ended(Trail("mine", ended=20.0))
        tracing.close()
    finally:
        server.shutdown()
        server.server_close()
    assert [path for path, _ in heard] == ["/v1/traces"]


def test_without_the_extra_spans_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_to("", "m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInput, match=r"otlp_endpoint.*pip install 'octavo\[otel\]'"):
        tracing_to("http://localhost:4318/v1/traces", "m")
