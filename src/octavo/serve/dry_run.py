"""`octavo serve --dry-run`: what a server would hold in memory and on disk, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.engine.loader import plan_engine
from octavo.engine.memory import parse_size, show_size
from octavo.serve.config import ServeConfig

__all__ = ["PROCESS_BYTES", "dry_run"]

# private memory of each process beside what the plan counts, a tokenizer of 49,152 tokens included, rounded up
PROCESS_BYTES = {
    "single": {"server": 100 << 20},
    "compact": {"supervisor": 30 << 20, "front end": 80 << 20, "engine": 90 << 20},
    "full": {"supervisor": 30 << 20, "front end": 80 << 20, "detokenizer": 70 << 20, "engine": 90 << 20},
}


def dry_run(engine: EngineConfig, server: ServeConfig, say: Callable[[str], None]) -> None:
    """Say the whole plan. Raises ``InvalidInput`` for what does not fit, and for a model that is not here."""
    layout = server.resolved_layout
    plan = plan_engine(replace(engine, offline=True), say=say)
    requests = parse_size(server.max_request_memory, "max_request_memory")
    say(plan.describe())
    say(f"beside it, with --layout {layout}")
    rows = {"requests": requests, **PROCESS_BYTES[layout]}
    for name, size in rows.items():
        say(f"  {name:<12}{show_size(size):>11}")
    if engine.disk_kv:
        say(f"  {'disk tier':<12}{engine.disk_kv_memory:>11}  on the disk of {engine.disk_kv}")
    whole = plan.total + sum(rows.values())
    known = plan.available is not None
    say(
        f"  {'whole':<12}{show_size(whole):>11}" + (f"  of {show_size(plan.available or 0)} available" if known else "")
    )
    if plan.available is not None and whole > plan.available:
        over = show_size(whole - plan.available)
        remedy = f"is {over} too little; lower --kv-memory, --host-kv-memory or --max-request-memory, or free memory"
        raise InvalidInput("memory", f"{show_size(plan.available)} available", remedy)
