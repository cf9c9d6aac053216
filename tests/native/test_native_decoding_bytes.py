"""Promise 1 over all of decoding at once, on `native`, in every weight format and KV type that is served: see
decoding_plans.py. `OCTAVO_COMBINATIONS` says how many are drawn.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from decoding_asks import by_residual
from decoding_plans import DraftModelPlay, Stage, make_stage, play_all
from engine_harness import MODELS
from native_harness import PAIRS
from test_decoding_bytes import DANGERS

COMBINATIONS = int(os.environ.get("OCTAVO_COMBINATIONS", "400"))


def stages_of(adapter_folder: Any, asks: int) -> list[Stage]:
    """One for each weight format and KV type."""
    return [
        make_stage(
            sorted(MODELS)[number % 2],
            adapter_folder,
            asks=asks,
            page_sizes=(16, 32),
            backend="native",
            format=kind,
            kv_dtype=kv_dtype,
            threads=2 if number == 3 else 1,
        )
        for number, (kind, kv_dtype) in enumerate(PAIRS)
    ]


def test_all_of_decoding_at_once(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = stages_of(adapter_folder, 25)
    play_all(stages, COMBINATIONS, seen)
    assert seen["played"] == COMBINATIONS
    assert COMBINATIONS < 300 or all(seen[danger] for danger in DANGERS), seen


def test_a_draft_model_and_both_verifiers_beside_all_of_decoding(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = stages_of(adapter_folder, 4)
    for stage in stages:
        stage.asks = [by_residual(ask) if i % 2 else ask for i, ask in enumerate(stage.asks)]
    play_all(stages, 2 * len(stages), seen, DraftModelPlay)
    assert all(seen[danger] for danger in ("drafts", "drafts of adapters", "overlap", "restored")), seen
