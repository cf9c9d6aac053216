"""Pages that several sequences name are read once for all, long sequences by several threads: bits as alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from model_harness import Array, Loaded, forward
from native_harness import ISAS, compiled, prompt, run

from octavo.backends.native_program import StepLimits

SIZE = 16
PREFIX = 1056  # tokens: two chunks of 512 and 2 pages
LENGTHS = (
    PREFIX + 3,
    PREFIX + 40,
    PREFIX + 17,
    530,
    PREFIX + 1,
)  # all begin alike; the fourth ends early
COMMON = prompt("common", PREFIX)
PROMPTS = [COMMON[:length] + prompt(f"own {i}", max(0, length - PREFIX)) for i, length in enumerate(LENGTHS)]


def step(loaded: Loaded, table: Array, pool: Any, spans: dict[int, Sequence[int]]) -> Array:
    """One step of some sequences, each over a range of its positions: logits of the last ones."""
    ids = [PROMPTS[s][position] for s, span in spans.items() for position in span]
    at = [position for span in spans.values() for position in span]
    batch = loaded.ops.batch(ids, at, [len(span) for span in spans.values()], table[:, list(spans)].tolist(), pool)
    return np.array(forward(loaded, batch))


@pytest.mark.parametrize(("name", "kind", "kv_dtype"), [("qwen3", "fp32", "bf16"), ("gemma3-long", "w8g64", "int8")])
@pytest.mark.parametrize("isa", [ISAS[0], ISAS[-1]])
def test_shared_pages_give_the_bits_of_each_sequence_alone(isa: str, name: str, kind: str, kv_dtype: str) -> None:
    alone = compiled(name, kind, kv_dtype, isa)
    expected = [run(alone, [ids], [[len(ids)]])[0][-1] for ids in PROMPTS]
    tails = {s: range(PREFIX, length - 1) for s, length in enumerate(LENGTHS) if length > PREFIX + 1}
    for threads in (1, 2, 3):
        loaded = compiled(name, kind, kv_dtype, isa, threads)
        groups = loaded.model.kv_groups()
        shape = (len(groups), len(LENGTHS), -(-max(LENGTHS) // SIZE))
        pool = loaded.ops.allocate_kv(int(np.prod(shape)), SIZE, groups)
        loaded.model.open(pool, StepLimits(1200, 8, 1200))
        table = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        table[:, :, : PREFIX // SIZE] = table[:, :1, : PREFIX // SIZE]
        step(loaded, table, pool, {0: range(PREFIX)})
        step(loaded, table, pool, tails)
        got = step(loaded, table, pool, {s: range(length - 1, length) for s, length in enumerate(LENGTHS)})
        for sequence, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert np.array_equal(a, b), (threads, sequence)
