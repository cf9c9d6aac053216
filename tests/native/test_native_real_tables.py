"""Promise 1 through the engine on `native`: SmolLM2 with every other instruction set that runs here (schedules.py)."""

from __future__ import annotations

import pytest
from native_harness import ISAS
from real_schedules import EVERY, SHORT, play, read_smollm2
from schedules import Checkpoint

from octavo.backends.native_formats import resolve_format
from octavo.backends.native_lib import FORMATS, KV_TYPES


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return read_smollm2()


@pytest.mark.weights
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("isa", [isa for isa in ISAS[1:] if isa != "generic"])
def test_every_format(smollm2: Checkpoint, isa: str, kind: str) -> None:
    """KV types in turn, on one thread: the models of two layers have all of them with every format, on 1 to 4."""
    types = list(KV_TYPES)
    share = {kv_dtype: len(range(i, EVERY, len(types))) for i, kv_dtype in enumerate(types)}
    play(smollm2, kind, isa, share, (1,), few=3, script=SHORT)


@pytest.mark.weights
def test_the_table_for_any_processor(smollm2: Checkpoint) -> None:
    """Thirty layers take it seconds: a word of SmolLM2; everything else of it runs on the models of two layers."""
    play(smollm2, resolve_format("auto"), "generic", {"int8": 1}, (2,), few=1, script=SHORT)
