"""`octavo doctor --server URL`: what a running server says of itself, and what to do about it."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from octavo import __version__
from octavo.cli.doctor import Finding
from octavo.core.errors import InvalidInput

__all__ = ["metric_values", "server_findings"]

_TIMEOUT = 10.0  # seconds
_MOST = 4 << 20  # bytes of an answer
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\w]+)")
_KEY = "set OCTAVO_API_KEY to a key of the server"
_FULL = 0.95  # share of the pages


def server_findings(url: str) -> Iterator[Finding]:
    """What its routes answer; a key is taken from OCTAVO_API_KEY. Raises ``InvalidInput`` for what is no URL."""
    if not re.match(r"https?://[^/]", url):
        raise InvalidInput("server", url, "give a URL, such as http://127.0.0.1:8000")
    base = url.rstrip("/")
    try:
        status, text = _get(f"{base}/version")
        told = json.loads(text)
    except (OSError, ValueError) as error:
        yield Finding("server", "does not answer", f"{base}: {_why(error)}; is it running there?", fatal=True)
        return
    if status == 401:
        yield Finding("server", f"{base} asks for a key", _KEY, fatal=True)
        return
    if not isinstance(told, dict) or "version" not in told:
        yield Finding("server", f"{base} answers {status}", "is no Octavo: check host, port and path", fatal=True)
        return
    yield _version(told)
    yield from _health(base)
    yield _model(base)
    status, text = _get(f"{base}/metrics")
    if status != 200:
        yield Finding("metrics", f"answers {status}", _KEY)
        return
    yield from _load(metric_values(text))


def _get(url: str) -> tuple[int, str]:
    key = os.environ.get("OCTAVO_API_KEY", "")
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT) as answer:
            return answer.status, answer.read(_MOST).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(_MOST).decode("utf-8", "replace")


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _version(told: Mapping[str, Any]) -> Finding:
    found = f"{told['version']}, layout {told.get('layout', 'unknown')}"
    same = told["version"] == __version__
    return Finding("server", found, "" if same else f"this command is {__version__}: use the server's own")


def _health(base: str) -> Iterator[Finding]:
    remedies = {
        "live": "restart it; its log says what it was doing",
        "ready": "wait, raise --max-pending, or add a server",
    }
    for probe, remedy in remedies.items():
        status, text = _get(f"{base}/health/{probe}")
        try:
            reason = json.loads(text).get("reason")
        except (ValueError, AttributeError):
            reason = None
        yield Finding(probe, "yes" if status == 200 else f"no: {reason or status}", "" if status == 200 else remedy)


def _model(base: str) -> Finding:
    status, text = _get(f"{base}/v1/models")
    if status != 200:
        return Finding("model", f"answers {status}", _KEY)
    models = json.loads(text)["data"]
    return Finding("model", ", ".join(f"{model['id']} ({model.get('max_model_len')} tokens)" for model in models))


def metric_values(text: str) -> dict[str, float]:
    """Samples of Prometheus' text, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def _load(values: Mapping[str, float]) -> Iterator[Finding]:
    def value(name: str) -> float:
        return values.get(name, 0.0)

    running, waiting = value("vllm:num_requests_running"), value("vllm:num_requests_waiting")
    age = value("octavo:last_step_age_seconds")
    stuck = bool(running + waiting) and age > 10
    yield Finding(
        "queue",
        f"{running:.0f} running, {waiting:.0f} waiting, {value('octavo:requests_refused_total'):.0f} refused so far",
        f"no step has ended for {age:.0f} s; octavo explain on a recording (--record) says why" if stuck else "",
    )
    total, referenced = value("octavo:pages_total"), value("octavo:pages_referenced")
    full = bool(total) and referenced / total > _FULL
    yield Finding(
        "KV pages",
        f"{referenced:.0f} in use of {total:.0f} planned, {value('octavo:pages_cached'):.0f} cached",
        "raise --kv-memory, or lower --max-seq-len or --max-running-requests" if full else "",
    )
    for tier in ("host", "disk"):
        if planned := value(f"octavo:{tier}_pages_total"):
            yield Finding(
                f"{tier} tier", f"{value(f'octavo:{tier}_pages_used'):.0f} pages in use of {planned:.0f} planned"
            )
    preempted, ended = value("vllm:num_preemptions_total"), value("vllm:request_success_total")
    often = preempted > 0.1 * max(ended, 10)
    remedy = "pages are short: raise --kv-memory, or lower --max-running-requests" if often else ""
    yield Finding("preemptions", f"{preempted:.0f} at {ended:.0f} answers", remedy)
    failed = value("octavo:restore_failures_total") + value("octavo:disk_write_failures_total")
    if failed:
        yield Finding("tiers", f"{failed:.0f} pages failed", "check the disk of --disk-kv; the answers are not harmed")
