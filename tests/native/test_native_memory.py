"""The plan's activations and logits are those that a program takes, to the byte."""

from __future__ import annotations

import pytest
from native_harness import compiled
from tiny_checkpoints import CASES

from octavo.core.scheduler import SchedulerConfig


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kind", "kv_dtype", "threads"), [("fp32", "fp32", 1), ("w8g64", "int8", 2), ("w4g32", "bf16", 3)]
)
def test_what_is_planned_is_what_is_taken(name: str, kind: str, kv_dtype: str, threads: int) -> None:
    loaded = compiled(name, kind, kv_dtype, threads=threads)
    model = loaded.model
    for scheduling in (
        SchedulerConfig(),
        SchedulerConfig(max_batched_tokens=96, max_running_requests=7, max_seq_len=64),
    ):
        activations, logits = model.step_bytes(scheduling, 32)
        groups = model.kv_groups()
        pool = model.backend.allocate_kv(len(groups), 32, groups)
        model.make_room(pool, scheduling)
        assert activations + logits == pool.programs[model].num_bytes
        assert 0 < logits < activations + logits
    assert model.weight_bytes() == pytest.approx(model.backend.engine.weight_bytes, rel=0.001, abs=64 * 200)
