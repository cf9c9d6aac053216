"""Threads of the numeric library: set before NumPy reads them, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from octavo.engine import threads
from octavo.engine.threads import default_threads

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PROGRAM = """
import json, os, sys
{first}
from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_engine
said = []
try:
    load_engine(EngineConfig(model="no such model", threads={threads}, offline=True), say=said.append)
except ValueError:
    pass
print(json.dumps([os.environ.get("OPENBLAS_NUM_THREADS"), said, "numpy" in sys.modules]))
"""


def _load(threads: int, first: str = "", **environment: str) -> tuple[str | None, list[str], bool]:
    """(OPENBLAS_NUM_THREADS afterwards, what was said, whether NumPy was imported) of loading in a new process."""
    clean = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    program = _PROGRAM.format(first=first, threads=threads)
    run = subprocess.run(
        [sys.executable, "-c", program], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    threads_set, said, imported = json.loads(run.stdout)
    return threads_set, said, imported


@pytest.mark.parametrize(
    ("threads", "environment", "expected"),
    [
        (0, {}, str(default_threads())),
        (0, {"OPENBLAS_NUM_THREADS": "7"}, "7"),
        (0, {"OMP_NUM_THREADS": "7"}, None),
        (3, {}, "3"),
        (3, {"OPENBLAS_NUM_THREADS": "7"}, "3"),
    ],
)
def test_flag_then_environment_then_half_of_the_cores(
    threads: int, environment: dict[str, str], expected: str | None
) -> None:
    assert _load(threads, **environment) == (expected, [], False)


def test_too_late_is_said() -> None:
    _, said, imported = _load(3, "import numpy")
    assert imported
    assert ["no effect" in line for line in said] == [True]
    assert _load(0, "import numpy")[1] == []


@pytest.mark.parametrize(
    ("cores", "quota", "expected"), [(1, None, 1), (2, None, 1), (9, None, 4), (64, 2.5, 1), (64, 0.1, 1), (4, 99.0, 2)]
)
def test_half_of_what_may_be_used(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    assert default_threads() == expected
