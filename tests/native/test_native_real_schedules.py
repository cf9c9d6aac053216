"""Promise 1 through the engine on `native`: SmolLM2 with the best instruction set of this machine (schedules.py)."""

from __future__ import annotations

import pytest
from native_harness import ISAS
from real_schedules import EVERY, SCHEDULES, play, read_smollm2
from schedules import THREADS, Checkpoint

from octavo.backends.native_formats import resolve_format, resolve_kv_dtype
from octavo.backends.native_lib import FORMATS, KV_TYPES


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return read_smollm2()


@pytest.mark.weights
def test_default_format(smollm2: Checkpoint) -> None:
    kind = resolve_format("auto")
    play(smollm2, kind, ISAS[0], {resolve_kv_dtype("auto", kind): SCHEDULES}, THREADS, few=0)


@pytest.mark.weights
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_and_kv_type(smollm2: Checkpoint, kind: str) -> None:
    """On one thread and on 2, 3 or 4: with every format and KV type all four run on the models of two layers."""
    several = 2 + list(FORMATS).index(kind) % 3
    play(smollm2, kind, ISAS[0], dict.fromkeys(KV_TYPES, EVERY), (1, several, 1, 2 if several == 2 else 1), few=4)
