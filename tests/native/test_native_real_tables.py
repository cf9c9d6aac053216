"""Promise 1 through the engine on `native`: SmolLM2 with every other instruction set that runs here (schedules.py).

Depth repeats the same records, so that only the default format runs through all thirty layers on each of them.
"""

from __future__ import annotations

import functools

import pytest
from native_harness import ISAS
from real_schedules import EVERY, SHORT, play, read_smollm2
from schedules import Checkpoint

from octavo.backends.native_formats import resolve_format
from octavo.backends.native_lib import FORMATS, KV_TYPES

FEW_LAYERS = 4
LEAST_LAYERS = 2  # for the table of any processor, which takes ten times as long
OTHERS = [isa for isa in ISAS[1:] if isa != "generic"]


@functools.lru_cache(maxsize=2)
def smollm2(layers: int = 30) -> Checkpoint:
    return read_smollm2(layers)


def in_turn() -> dict[str, int]:
    """Schedules of each KV type: the models of two layers have all of them with every format, on 1 to 4 threads."""
    types = list(KV_TYPES)
    return {kv_dtype: len(range(i, EVERY, len(types))) for i, kv_dtype in enumerate(types)}


@pytest.mark.weights
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("isa", OTHERS)
def test_every_format(isa: str, kind: str) -> None:
    play(smollm2(FEW_LAYERS), kind, isa, in_turn(), (1,), few=3, script=SHORT)


@pytest.mark.weights
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_on_the_table_for_any_processor(kind: str) -> None:
    play(smollm2(LEAST_LAYERS), kind, "generic", in_turn(), (1,), few=2, script=SHORT)


@pytest.mark.weights
@pytest.mark.parametrize("isa", OTHERS)
def test_default_format_through_all_layers(isa: str) -> None:
    play(smollm2(), resolve_format("auto"), isa, in_turn(), (1,), few=3, script=SHORT)
