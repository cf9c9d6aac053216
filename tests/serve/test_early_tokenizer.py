"""A front end's tokenizer, loaded before the engine has said what it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import InvalidInput
from octavo.engine import vocabulary
from octavo.engine.config import EngineConfig
from octavo.engine.vocabulary import EarlyTokenizer, load_tokenizer

TINY = str(Path(__file__).parents[2] / "fixtures" / "tiny_model.json")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def counted(source: str) -> Any:
        told.append(source)
        return load_tokenizer(source)

    monkeypatch.setattr(vocabulary, "load_tokenizer", counted)
    return told


def test_is_loaded_once_if_the_engine_runs_the_same(loads: list[str]) -> None:
    early = EarlyTokenizer(EngineConfig(model=TINY))
    assert early.take(TINY).vocab_size == load_tokenizer(TINY).vocab_size
    assert loads == [TINY]
    assert early.take(TINY).vocab_size and loads == [TINY, TINY]  # it is given away once


def test_another_model_brings_its_own(loads: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(Path(TINY).read_bytes())
    EarlyTokenizer(EngineConfig(model=TINY)).take(str(other))
    assert loads == [TINY, str(other)]


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "no such model", "nobody/nothing", "missing.json"])
def test_what_is_not_here_is_left_to_the_engine(loads: list[str], tmp_path: Path, model: str) -> None:
    early = EarlyTokenizer(EngineConfig(model=model, cache_dir=str(tmp_path)))
    assert early.take(TINY).vocab_size
    with pytest.raises((InvalidInput, OSError)):
        early.take("missing.json")
