"""The machine card: what a benchmark ran on, and what that machine gave in the same minutes."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.engine.memory import available_memory
from octavo.engine.threads import cpu_quota, usable_cores

__all__ = ["machine_card", "machine_state", "native_engine"]

_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def native_engine(backend: Any) -> Any:
    """The library's engine behind a backend; None for backends without one, of which no limit is measured."""
    return getattr(backend, "engine", None)


def machine_card(backend: Any) -> dict[str, Any]:
    """Processor, memory, system and kernel table; with the native backend also the measured limits and state."""
    info, engine = _cpuinfo(), native_engine(backend)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    card: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "octavo": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": {"usable": usable_cores(), "all": os.cpu_count(), "quota": cpu_quota()},
        "memory_bytes": _memory(),
        "available_bytes": available_memory(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "backend": backend.name,
        "numerics": getattr(backend, "numerics_name", backend.name),
        "native": None,
    }
    if engine is not None:
        card["native"] = _measured(engine)
    return card


def machine_state(backend: Any) -> dict[str, Any] | None:
    """Read rate (GB/s), barrier (ns) and name of the state right now; None without the native backend."""
    engine = native_engine(backend)
    if engine is None:
        return None
    from octavo.backends.native_measure import measure_state

    return asdict(measure_state(engine))


def _measured(engine: Any) -> dict[str, Any]:
    from octavo.backends.native_lib import library
    from octavo.backends.native_measure import measure_limits, measure_state

    limits = measure_limits(engine)
    return {
        "table": engine.isa,
        "tables": library().octavo_isas().decode().split(),
        "threads": engine.threads,
        "read_gb_s": {str(threads): rate for threads, rate in limits.read_gb_s.items()},
        "dots_gop_s": {str(threads): rates for threads, rates in limits.dots_gop_s.items()},
        "state": asdict(measure_state(engine)),
    }


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The first processor of /proc/cpuinfo; nothing on systems without it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
