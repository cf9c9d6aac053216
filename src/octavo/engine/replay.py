"""Replaying a recorded epoch: the scheduler alone, or with its model as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.errors import InvalidInput
from octavo.core.facts import kv_of, scheduler_config_of
from octavo.core.replay import Difference, Replayer, scheduler_for
from octavo.engine.beams import with_moves
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.loader import load_parts
from octavo.engine.parts import build_core
from octavo.engine.recorder import Epoch
from octavo.engine.threads import limit_threads

__all__ = ["ReplayReport", "replay_epoch"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class ReplayReport:
    """What became of a replay; ``difference`` None: everything came out as recorded."""

    epoch: int
    num_events: int
    num_steps: int
    num_tokens: int
    ran_model: bool
    is_whole: bool  # the recording was closed
    difference: Difference | None


def replay_epoch(epoch: Epoch, *, run_model: bool = False, model: str = "", say: Say = print) -> ReplayReport:
    """Give a fresh scheduler the recorded inputs. ``run_model``: its tokens are drawn again, else they are recorded.

    ``model`` names the model where it lies elsewhere now. Raises ``InvalidInput`` for a recording of another version,
    and for what the loader refuses.
    """
    facts = epoch[0]["facts"]
    core = _core_of(facts, model, say) if run_model else None
    scheduler = scheduler_for(facts) if core is None else core.scheduler
    replayer = Replayer(scheduler, None if core is None else partial(_run, core))
    for event in epoch[1:]:
        if core is not None and event["kind"] == "adapter":
            _replay_adapter(core, event)
        if not replayer.feed(event):
            break
    return ReplayReport(
        epoch[0]["epoch"],
        replayer.num_events,
        replayer.num_steps,
        replayer.num_tokens,
        run_model,
        epoch[-1]["kind"] == "end",
        replayer.difference,
    )


def _replay_adapter(core: EngineCore, event: Mapping[str, Any]) -> None:
    """Load or unload an adapter as recorded. Raises ``InvalidInput`` where its folder holds something else now."""
    if event["action"] == "unload":
        core.unload_adapter(event["name"])
        return
    read = core.served_adapters.read(event["path"])
    if read.digest != event["digest"]:
        remedy = "it does not hold what it held then: bring that back, or replay without the model"
        raise InvalidInput(f"adapter {event['name']}", event["path"], remedy)
    core.load_adapter(event["name"], event["path"], read)


def _run(core: EngineCore, decision: ScheduleDecision) -> StepResult:
    return with_moves(decision, core.executor(decision), core.scheduler.get)


def _core_of(facts: Mapping[str, Any], model: str, say: Say) -> EngineCore:
    """The recorded engine again, with as many pages."""
    if "engine" not in facts:
        raise InvalidInput("recording", "no engine", "it was made by a scheduler alone: replay it without the model")
    if facts["kv"].get("disk_pages"):
        remedy = "what its disk tier held is not in the recording: replay it without the model"
        raise InvalidInput("recording", "an engine with disk_kv", remedy)
    known = {item.name for item in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in facts["engine"].items() if name in known})
    config = replace(config, record="", model=model or config.model)
    limit_threads(config.threads, say)
    parts = load_parts(config)
    if parts.numerics_id != facts.get("numerics_id"):
        say("this engine rounds differently from the recorded one (another numerics id): tokens may differ")
    kv = kv_of(facts)
    core = build_core(
        parts,
        num_pages=kv.allocator.num_pages,
        page_size=kv.page_size,
        scheduling=scheduler_config_of(facts),
        prefix_cache=kv.enable_prefix_cache,
        host_pages=0 if kv.host is None else kv.host.num_pages,
        adapters=config.adapter_room,
    )
    core.load_adapters(config.lora_folders(), say)
    return core
