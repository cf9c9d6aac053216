"""`octavo doctor`: what was found on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.core.errors import OctavoError
from octavo.engine.memory import available_memory, show_size
from octavo.engine.threads import cpu_quota, usable_cores

__all__ = ["Finding", "findings", "run_doctor"]

# instruction sets that matter to kernels -> how /proc/cpuinfo spells them
_INSTRUCTION_SETS = {
    "SSE4.2": "sse4_2",
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX-VNNI": "avx_vnni",
    "AVX-512F": "avx512f",
    "AVX-512BW": "avx512bw",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-512 BF16": "avx512_bf16",
    "AMX tile": "amx_tile",
    "AMX int8": "amx_int8",
    "AMX BF16": "amx_bf16",
    "NEON": "asimd",
    "dot product": "asimddp",
    "I8MM": "i8mm",
    "SVE": "sve",
}
_SMALLEST_MEMORY = 1 << 30
_SMALLEST_DISK = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A `remedy` says that it is not well, and `fatal` that nothing will run."""

    what: str
    found: str
    remedy: str = ""
    fatal: bool = False


def run_doctor(as_json: bool, cache_dir: str, verify: bool = False, server: str = "") -> int:
    """Print the findings on this machine, or on a server. 1 if something is missing without which nothing runs."""
    if server:
        from octavo.cli.doctor_server import server_findings

        found = list(server_findings(server))
    else:
        found = list(findings(cache_dir, verify))
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        _print(found)
    return int(any(finding.fatal for finding in found))


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = max(len(finding.what) for finding in found)
    margin = "\n" + " " * (width + 4)
    room = max(20, console.width - width - 4) if console.is_terminal else 1 << 20  # a pipe gets whole lines

    def wrapped(text: str) -> str:
        return margin.join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))

    for finding in found:
        mark, colour = ("✗", "red") if finding.fatal else ("!", "yellow") if finding.remedy else ("✓", "green")
        line = Text.assemble((mark, colour), f" {finding.what:<{width}}  {wrapped(finding.found)}")
        if finding.remedy:
            line.append(margin + wrapped(finding.remedy), colour)
        console.print(line, soft_wrap=True)


def findings(cache_dir: str = "", verify: bool = False) -> Iterator[Finding]:
    """Everything that is looked at, in the order of importance. `verify` reads each cached model whole."""
    yield Finding(
        "octavo", f"{__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    yield from _packages()
    yield _backend()
    yield from _native()
    yield from _processor()
    yield _memory()
    yield from _cache(cache_dir, verify)


def _packages() -> Iterator[Finding]:
    missing, held = [], []
    for line in metadata.requires("octavo") or []:
        if "extra ==" in line or ("sys_platform" in line and sys.platform == "win32"):
            continue
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0]
        try:
            held.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(
            "packages",
            "missing: " + ", ".join(missing),
            "install them, where Octavo's pyproject.toml is: pip install --editable .",
            fatal=True,
        )
    if held:
        yield Finding("packages", ", ".join(held))


def _backend() -> Finding:
    from octavo.backends import create_backend

    try:
        return Finding("backend", create_backend("auto").name)
    except (OctavoError, ImportError) as error:
        return Finding("backend", "none", f"{error}; install NumPy: pip install numpy", fatal=True)


def _native() -> Iterator[Finding]:
    from octavo.backends.native_build import read_build, unavailable
    from octavo.backends.native_lib import library

    missing = unavailable()
    if missing is not None:
        yield Finding("native kernels", f"pure Python: {missing.reason}", missing.remedy)
        return
    try:
        engine = _active_engine()
    except OctavoError as error:
        yield Finding("native kernels", "built, but cannot start", f"{error}; see OCTAVO_NATIVE_ISA")
        return
    yield Finding("native kernels", f"{engine.isa}, {engine.threads} threads")
    build, usable = read_build(), library().octavo_isas().decode()
    found = f"{usable.replace(' ', ', ')} run here"
    if build is not None:
        found += f"; built: {', '.join(build.tables)} ({build.compiler})"
    yield Finding("kernel tables", found)
    yield _huge_pages()


def _active_engine() -> Any:
    from octavo.backends.native_backend import NativeEngine

    return NativeEngine("", 0)


def _huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Weights lie in huge pages where the kernel gives them to who asks."""
    try:
        state = re.findall(r"\[(\w+)\]", path.read_text())[0]
    except (OSError, IndexError):
        return Finding("huge pages", "unknown: this system does not say")
    remedy = f"large weights are read more slowly without; as root: echo madvise > {path}" if state == "never" else ""
    return Finding("huge pages", state, remedy)


def _processor() -> Iterator[Finding]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    known = [name for name, flag in _INSTRUCTION_SETS.items() if flag in flags]
    model = info.get("model name") or platform.processor() or platform.machine()
    yield Finding("processor", model)
    yield Finding("instructions", ", ".join(known) or "unknown: this system does not say")
    cores, quota = usable_cores(), cpu_quota()
    limit = "" if quota is None else f", limited to {quota:g} by the control group"
    yield Finding("cores", f"{cores} usable of {os.cpu_count()}{limit}")


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory() -> Finding:
    free = available_memory()
    if free is None:
        return Finding("memory", "unknown: this system does not say")
    remedy = "" if free >= _SMALLEST_MEMORY else "free some, or serve with a smaller --max-seq-len"
    return Finding("memory", f"{show_size(free)} available", remedy)


def _cache(cache_dir: str, verify: bool) -> Iterator[Finding]:
    from octavo.weights.store import ModelStore

    store = ModelStore(cache_dir or None, offline=True)
    place = next(folder for folder in (store.cache_dir, *store.cache_dir.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    held = store.cached_models()
    if not os.access(place, os.W_OK):
        yield Finding(
            "model cache",
            str(store.cache_dir),
            "cannot be written; to fetch a model, set OCTAVO_HOME to a folder that can",
            fatal=not held,
        )
    else:
        remedy = "" if free >= _SMALLEST_DISK else "make room, or set OCTAVO_HOME to a folder on another disk"
        yield Finding("model cache", f"{store.cache_dir} ({show_size(free)} free on its disk)", remedy)
    names = ", ".join(f"{model.name} ({model.size / 1e6:.0f} MB)" for model in held)
    yield Finding("models cached", names or "none yet: the first octavo serve or chat fetches one")
    for model in held if verify else ():
        problem = store.damage(model.name)
        remedy = f"{problem}; the next start fetches it again" if problem else ""
        state = "is damaged" if problem else "has the right SHA-256"
        yield Finding("model file", f"{model.name} {state}", remedy, fatal=bool(problem))
