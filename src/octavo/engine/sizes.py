"""What a configuration comes to for a model: limits of the scheduler, bytes of the memory plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.core.scheduler import SchedulerConfig
from octavo.decoding.grammar.compiler import most_bytes
from octavo.decoding.speculation import DraftLimits
from octavo.engine.config import EngineConfig
from octavo.engine.disk_pages import buffered_pages
from octavo.engine.memory import MemoryNeeds, MemoryPlan, available_memory, plan_memory
from octavo.engine.parts import page_bytes
from octavo.models.config import ModelConfig

__all__ = ["draft_limits", "num_draft_pages", "plan_for", "scheduling_for"]

DEFAULT_KV_CAP = 2 << 30  # bytes of pages that nobody asked for
_BYTES_PER_VALUE = {"reference": 32}  # a float object and its pointer; others: float32


def scheduling_for(config: EngineConfig, max_seq_len: int) -> SchedulerConfig:
    """The scheduler's share of an engine configuration."""
    return SchedulerConfig(
        max_batched_tokens=config.max_batched_tokens,
        max_running_requests=config.max_running_requests,
        max_prefill_chunk=config.max_prefill_chunk,
        max_seq_len=max_seq_len,
        max_token_gap_ms=config.max_token_gap_ms,
        preemption=config.preemption,
        policy=config.policy,
        policies=config.policy_settings(),
    )


def draft_limits(config: EngineConfig, draft: ModelConfig, max_seq_len: int) -> DraftLimits:
    """The largest step of a draft model beside a model whose sequences are that long at most."""
    return DraftLimits(
        max_batched_tokens=config.max_batched_tokens,
        max_running_requests=config.max_running_requests,
        max_seq_len=min(max_seq_len, draft.max_position_embeddings),
        max_prefill_chunk=config.max_prefill_chunk,
    )


def num_draft_pages(plan: MemoryPlan, draft: Any) -> int:
    """Pages of a draft model that take as many tokens as those of the plan."""
    return plan.num_pages // plan.num_groups * len(draft.kv_groups())


def plan_for(
    config: EngineConfig, model: Any, backend_name: str, max_seq_len: int, draft: Any | None = None
) -> MemoryPlan:
    """The memory plan of a model (``octavo.models`` object) on a backend, beside a ``draft`` model there. Raises
    ``InvalidInput`` if it cannot fit.
    """
    width = _BYTES_PER_VALUE.get(backend_name, 4)
    activations, logits = _step_bytes(config, model, width, scheduling_for(config, max_seq_len))
    needs = MemoryNeeds(
        weights=_weight_bytes(model, width),
        activations=activations,
        workspace=logits + _mass_bytes(model.config, max_seq_len, config.max_running_requests, width),
        page_bytes=page_bytes(model, config.page_size) * width // 4,
        adapters=_adapter_bytes(config, model, width),
        drafts=config.draft_bytes(max_seq_len),
        grammars=most_bytes(model.config.vocab_size) if model.config.eos_token_ids else 0,
    )
    if draft is not None:
        step = _step_bytes(config, draft, width, draft_limits(config, draft.config, max_seq_len))
        pages = page_bytes(draft, config.page_size) * width // 4 * len(draft.kv_groups())
        needs = replace(
            needs,
            draft_model=_weight_bytes(draft, width) + sum(step),
            draft_page_bytes=-(-pages // len(model.kv_groups())),
        )
    groups = model.kv_groups()
    chunk = config.max_prefill_chunk if config.eviction else None  # what is forgotten needs no page
    return plan_memory(
        needs,
        page_size=config.page_size,
        num_groups=len(groups),
        sequence_pages=sum(group.most_columns(max_seq_len, config.page_size, chunk) for group in groups),
        max_seq_len=max_seq_len,
        max_sequences=config.max_running_requests,
        kv_memory=config.kv_bytes,
        host_memory=config.host_kv_bytes,
        disk_buffers=min(buffered_pages(needs.page_bytes), config.host_kv_bytes // needs.page_bytes)
        if config.disk_kv
        else 0,
        memory_fraction=config.memory_fraction,
        default_cap=DEFAULT_KV_CAP,
        available=available_memory(),
    )


def _weight_bytes(model: Any, width: int) -> int:
    if hasattr(model, "weight_bytes"):
        return int(model.weight_bytes())
    return width * sum(map(math.prod, model.weight_shapes().values()))


def _adapter_bytes(config: EngineConfig, model: Any, width: int) -> int:
    """Bytes of all places for adapters."""
    if hasattr(model, "adapter_bytes"):
        return int(model.adapter_bytes())
    return width * config.adapter_room.num_values(model.projections())


def _mass_bytes(c: ModelConfig, max_seq_len: int, running: int, width: int) -> int:
    """What it takes to choose what stays of the longest sequence (masses, and their order by size), and what is kept of
    each that runs.
    """
    if c.voting is None:
        return 0
    seen, kept = max_seq_len, 0
    if c.voting.every:
        seen = min(seen, c.voting.capacity + 2 * c.voting.block)
        kept = 2 * running * seen
    return width * c.num_layers * c.num_kv_heads * (6 * seen + kept)


def _step_bytes(config: EngineConfig, model: Any, width: int, limits: Any) -> tuple[int, int]:
    """Activations of the largest step, and its logits: what a compiled model will take; else about so."""
    if hasattr(model, "step_bytes"):
        activations, logits = model.step_bytes(limits, config.page_size)
        return activations, logits
    c: ModelConfig = model.config
    widest = max(c.intermediate_size, c.moe_intermediate_size * c.experts_per_token, c.num_heads * c.head_dim)
    tokens, running = config.max_batched_tokens, config.max_running_requests
    rows = min(tokens + running, running * 3)
    return width * tokens * (4 * c.hidden_size + 3 * widest), width * rows * c.vocab_size
