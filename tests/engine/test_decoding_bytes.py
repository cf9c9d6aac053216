"""Promise 1 over all of decoding at once, on `reference`: text, tokens and logprobs of every request are those of the
request alone on an engine that guesses nothing, jumps nowhere, caches nothing and has room. See decoding_plans.py.

`OCTAVO_COMBINATIONS` says how many are drawn.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from decoding_asks import FEATURES, asked, by_residual, goes_with
from decoding_plans import DraftModelPlay, make_stage, play_all
from engine_harness import FORGETFUL, MODELS

COMBINATIONS = int(os.environ.get("OCTAVO_COMBINATIONS", "100"))
DANGERS = (
    *(
        "drafts",
        "drafts of two",
        "trees",
        "trees of grammars",
        "drafts of adapters",
        "drafts of grammars",
        "adapters",
        "beams",
        "overlap",
        "copies",
        "swaps",
    ),
    *("fail before", "fail after", "forced preemption", "preemptions", "restored", "died verifying"),
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "decoding.md"


def test_all_of_decoding_at_once(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = [make_stage(model, adapter_folder, asks=40, page_sizes=(1, 2, 4, 16)) for model in sorted(MODELS)]
    play_all(stages, COMBINATIONS, seen)
    assert seen["played"] == COMBINATIONS
    # a guard that never met its danger proves nothing
    assert COMBINATIONS < 100 or all(seen[danger] for danger in DANGERS), seen


def test_forgetting_beside_all_of_decoding(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = [make_stage(model, adapter_folder, asks=12, page_sizes=(1, 2, 4, 16)) for model in sorted(FORGETFUL)]
    play_all(stages, max(24, COMBINATIONS // 4), seen)
    kinds = ("compactions", "compactions of drafts", "compactions of beams", "compactions of adapters")
    assert all(seen[danger] for danger in (*kinds, "overlap", "preemptions", "fail after", "restored")), seen


def test_a_draft_model_beside_all_of_decoding(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = [make_stage(model, adapter_folder, asks=8, page_sizes=(1, 2, 4, 16)) for model in sorted(MODELS)]
    play_all(stages, 6, seen, DraftModelPlay)
    assert all(
        seen[danger] for danger in ("drafts", "drafts of grammars", "drafts of adapters", "overlap", "restored")
    ), seen


def test_both_verifiers_beside_all_of_decoding(adapter_folder: Any) -> None:
    """Every second request is drawn by the residual verifier."""
    seen: Counter[str] = Counter()
    stages = [make_stage(model, adapter_folder, asks=8, page_sizes=(1, 2, 4, 16)) for model in sorted(MODELS)]
    for stage in stages:
        stage.asks = [by_residual(ask) if i % 2 else ask for i, ask in enumerate(stage.asks)]
        assert sum(ask.params.speculative_verifier == "residual" for ask in stage.asks) > 1
    play_all(stages, 6, seen)
    assert all(seen[danger] for danger in ("drafts", "drafts of adapters", "overlap", "restored")), seen


def told_in_docs() -> set[frozenset[str]]:
    """The pairs that docs/decoding.md says are refused: | `one` | `other`, `another` | why |."""
    section = DOCS.read_text().split("## What goes with what")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", section, re.MULTILINE)
    return {frozenset((one, other)) for one, others in rows for other in re.findall(r"`([a-z_]+)`", others)}


def test_what_does_not_go_together_is_refused_by_name_and_told() -> None:
    """Every pair of features, in every way: it is played (above), or refused with a field of the pair and a remedy."""
    found = set()
    for one, other in itertools.combinations(FEATURES, 2):
        errors = [goes_with(asked(a, b)) for a, b in itertools.product(FEATURES[one], FEATURES[other])]
        if any(errors):
            found.add(frozenset((one, other)))
            named = {name for ways in (FEATURES[one], FEATURES[other]) for way in ways for name in way}
            assert all(error is None or (error.field in named and error.remedy) for error in errors), (one, other)
    assert found == told_in_docs()
