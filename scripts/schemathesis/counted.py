"""Schemathesis' hooks: every answer is counted, by operation and status, into the file that COUNTS names."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from threading import Lock
from typing import Any

import schemathesis

_counts: Counter[str] = Counter()
_slowest = 0.0
_lock = Lock()


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count an answer, and keep how long the slowest took."""
    global _slowest
    with _lock:
        _counts[f"{case.operation.label} {response.status_code}"] += 1
        _slowest = max(_slowest, response.elapsed)


@atexit.register
def _write() -> None:
    Path(os.environ["COUNTS"]).write_text(json.dumps({"counts": _counts, "slowest": _slowest}))
