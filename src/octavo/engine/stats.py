"""The numbers that an engine shows to its operator, as plain floats."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.gap import GapControl
from octavo.core.host_tier import HostTier
from octavo.decoding.grammar import GrammarCompiler
from octavo.decoding.speculation import Speculator
from octavo.engine.core import EngineCore
from octavo.engine.forcing import Forcing
from octavo.engine.tiers import Tiers

__all__ = ["engine_stats"]


def engine_stats(core: EngineCore) -> Mapping[str, float]:
    """Gauges and counters of an engine, between two steps. Costs the same however much has been served."""
    metrics, scheduler = core.metrics, core.scheduler
    pages, prefix = core.kv.allocator.counts(), core.kv.prefix.stats
    last = metrics.steps[-1] if metrics.steps else None
    running = max(1, scheduler.num_running)
    wasted = 0 if last is None or not scheduler.num_running else last.wasted_slots
    waste_bytes = wasted * metrics.page_bytes // metrics.page_size
    return {
        "num_running": scheduler.num_running,
        "max_running": scheduler.config.max_running_requests,
        "prefill_tokens_per_s": scheduler.prefill_rate(),
        "num_waiting": scheduler.num_waiting,
        "pages_total": pages.total,
        "pages_free": pages.free,
        "pages_cached": pages.cached,
        "pages_referenced": pages.referenced,
        "pages_ticketed": pages.ticketed,
        "step_seconds": 0.0 if last is None else last.ended - last.started,
        "mean_step_seconds": scheduler.step_model.step_seconds,
        "last_step_ended": 0.0 if last is None else last.ended,
        "steps": metrics.num_steps,
        "rollbacks": metrics.num_failed_steps,
        "preemptions": metrics.preemptions,
        "preemptions_swap": metrics.swapped,
        "preemptions_recompute": metrics.preemptions - metrics.swapped,
        "scheduled_tokens": metrics.scheduled_tokens,
        "output_tokens": metrics.output_tokens,
        "sequence_bytes/kv": pages.referenced * metrics.page_bytes / running,
        "sequence_bytes/fragmentation": waste_bytes / running,
        "sequence_bytes/temporary": metrics.temporary_bytes / running if scheduler.num_running else 0,
        "kv_fragmentation": min(1.0, waste_bytes / max(1, pages.referenced * metrics.page_bytes)),
        "token_gaps_above_bound": metrics.gaps.num_above,
        **({} if scheduler.gap is None else gap_stats(scheduler.gap)),
        "prefix_queries_tokens": prefix.query_units,
        "prefix_hit_tokens": prefix.hit_units,
        **({} if core.grammars is None else grammar_stats(core.grammars, core.forcing)),
        **({} if core.speculator is None else draft_stats(core.speculator, core.propose_seconds)),
        **({} if core.tiers is None else tier_stats(core.tiers, core.kv.host)),
    }


def grammar_stats(grammars: GrammarCompiler, forcing: Forcing | None) -> Mapping[str, float]:
    """What following grammars took, and what it spared."""
    return {
        "grammar_queries": 0 if forcing is None else forcing.num_asked,
        "grammar_misses": grammars.num_compiled,
        "grammar_compile_seconds": grammars.seconds,
        "grammar_forced_tokens": 0 if forcing is None else forcing.num_forced,
    }


def draft_stats(speculator: Speculator, propose_seconds: float) -> Mapping[str, float]:
    """What became of guessed tokens, what it cost and what it saved."""
    stats, control = speculator.stats, speculator.control
    told: dict[str, float] = {"draft_steps": stats.steps, "draft_seconds/propose": propose_seconds}
    told["draft_seconds/read"] = speculator.proposer.catch_up_seconds
    told["drafts_off"] = float(bool(speculator.fault))
    told |= {"draft_tokens": stats.drafted, "accepted_draft_tokens": stats.accepted}
    if control is None:
        return told
    return told | {"draft_seconds/verify": control.verify_seconds, "draft_seconds/saved": control.saved_seconds}


def tier_stats(tiers: Tiers, host: HostTier) -> Mapping[str, float]:
    """What host memory and disk hold, what moved, and what did not come back."""
    disk, size = tiers.disk, tiers.host.page_bytes
    in_memory, on_disk = host.num_used
    told: dict[str, float] = {
        "host_pages_total": host.num_pages,
        "host_pages_used": in_memory,
        "host_bytes_out": size * tiers.pages_out,
        "host_bytes_in": size * tiers.pages_in,
        "tier_queries_tokens": host.stats.query_units,
        "tier_hit_tokens": host.stats.hit_units,
        "restore_failures/memory": tiers.pages_bad,
    }
    if disk is None:
        return told
    told |= {"disk_pages_total": host.disk_pages, "disk_pages_used": on_disk}
    told |= {"disk_bytes_out": size * disk.pages_written, "disk_bytes_in": size * disk.pages_read}
    told |= {f"restore_failures/{reason}": count for reason, count in list(disk.failures.items())}
    return told | {f"disk_write_failures/{reason}": count for reason, count in list(disk.write_failures.items())}


def gap_stats(gap: GapControl) -> Mapping[str, float]:
    """What the bound on token gaps does, and its price."""
    return {
        "gap_bound_s": gap.bound,
        "gap_margin_s": gap.margin,
        "gap_steps_limited": gap.steps_limited,
        "gap_steps_hopeless": gap.steps_hopeless,
        "gap_tokens_held_back": gap.tokens_held_back,
        "gap_seconds_lost": gap.seconds_lost,
    }
