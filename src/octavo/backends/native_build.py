"""What is known about the native library of this installation: what was built, and why it is not there."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.backends.native_lib import BackendUnavailable, library, library_path

__all__ = ["NativeBuild", "Unavailable", "compilers", "mention_once", "read_build", "unavailable"]

_COMPILERS = ("c++", "g++", "clang++")
_log = logging.getLogger("octavo")


@dataclass(frozen=True)
class NativeBuild:
    """The record that the build leaves beside the library: kernel tables, compiler, sanitizers."""

    tables: tuple[str, ...]
    compiler: str
    sanitize: str = ""


@dataclass(frozen=True)
class Unavailable:
    """Why the native backend does not run, and what would change that."""

    reason: str
    remedy: str


def read_build(path: Path | None = None) -> NativeBuild | None:
    """The record beside the library at `path` (default: the one that is loaded); None where there is none."""
    try:
        text = (path or library_path()).with_name("build.json").read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
        return NativeBuild(tuple(record["tables"]), record["compiler"], record["sanitize"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def compilers() -> tuple[str, ...]:
    """Names of the C++ compilers on PATH."""
    return tuple(name for name in _COMPILERS if shutil.which(name))


def unavailable() -> Unavailable | None:
    """Why the library cannot be used, or None when it can."""
    try:
        library()
    except BackendUnavailable as error:
        if library_path().exists():
            return Unavailable(error.remedy, f"build it again: {_rebuild()}")
    else:
        return None
    if compilers():
        return Unavailable("it was not built when Octavo was installed", f"a compiler is here now: {_rebuild()}")
    reason = "it was not built: Octavo was installed without a C++ compiler"
    return Unavailable(reason, f"install one (on Debian or Ubuntu: apt install g++), then {_rebuild()}")


def _rebuild() -> str:
    checkout = Path(__file__).parents[3] / "native" / "build.sh"
    return "make native" if checkout.exists() else "pip install --force-reinstall --no-deps --no-cache-dir octavo"


@functools.cache
def mention_once() -> None:
    """Say, once in a process, that `auto` runs without the native library."""
    found = unavailable()
    if found is not None:
        message = "the native backend is not available, NumPy runs instead (slowly): %s; %s"
        _log.warning(message, found.reason, found.remedy)
