"""Promise 1 over all of decoding at once, on `native`, in every weight format and KV type that is served: see
decoding_plans.py. `OCTAVO_COMBINATIONS` says how many are drawn.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from decoding_plans import make_stage, play_all
from engine_harness import MODELS
from native_harness import PAIRS
from test_decoding_bytes import DANGERS

COMBINATIONS = int(os.environ.get("OCTAVO_COMBINATIONS", "400"))


def test_all_of_decoding_at_once(adapter_folder: Any) -> None:
    seen: Counter[str] = Counter()
    stages = [
        make_stage(
            sorted(MODELS)[number % 2],
            adapter_folder,
            asks=25,
            page_sizes=(16, 32),
            backend="native",
            format=kind,
            kv_dtype=kv_dtype,
            threads=2 if number == 3 else 1,
        )
        for number, (kind, kv_dtype) in enumerate(PAIRS)
    ]
    play_all(stages, COMBINATIONS, seen)
    assert seen["played"] == COMBINATIONS
    assert COMBINATIONS < 300 or all(seen[danger] for danger in DANGERS), seen
