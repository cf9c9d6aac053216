"""A draft model beside the model of an engine: what it must share with it, and the pages that it gets."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.core.errors import InvalidInput
from octavo.decoding.speculation import DraftModelProposer
from octavo.engine.config import EngineConfig
from octavo.engine.memory import MemoryPlan
from octavo.engine.parts import ModelParts
from octavo.engine.sizes import draft_limits, num_draft_pages
from octavo.models.config import ModelConfig

__all__ = ["check_draft", "draft_proposer"]

_FIELD = "speculative_config.model"


def check_draft(name: str, draft: ModelConfig, model: ModelConfig) -> None:
    """Raises ``InvalidInput`` for a draft model whose token ids cannot be those of the model."""
    if draft.vocab_size != model.vocab_size:
        ids = f"it has {draft.vocab_size} token ids and the model has {model.vocab_size}"
        raise InvalidInput(_FIELD, name, f"{ids}; take a model of the same family")


def draft_proposer(
    config: EngineConfig,
    draft: ModelParts,
    parts: ModelParts,
    plan: MemoryPlan,
    max_seq_len: int,
    clock: Callable[[], float] = time.monotonic,
) -> DraftModelProposer:
    """Drafts for the sequences of ``parts`` out of ``draft``, in the pages of the plan. Raises ``InvalidInput`` for
    other tokens.
    """
    check_draft(draft.name, draft.config, parts.config)
    if getattr(draft.tokenizer, "identity", "") != getattr(parts.tokenizer, "identity", ""):
        raise InvalidInput(_FIELD, draft.name, "its tokenizer is another one than the model's; take one of the same")
    return DraftModelProposer(
        draft.model,
        draft.backend,
        draft.weights,
        num_pages=num_draft_pages(plan, draft.model),
        page_size=config.page_size,
        limits=draft_limits(config, draft.config, max_seq_len),
        prefix_cache=config.prefix_cache,
        clock=clock,
    )
