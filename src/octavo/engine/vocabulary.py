"""The tokenizer of a model without the model: for processes that run none."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.errors import OctavoError
from octavo.engine.config import EngineConfig

__all__ = ["EarlyTokenizer", "load_tokenizer", "no_collections", "seed_source", "tokenizer_in"]


class EarlyTokenizer:
    """Loaded while the engine loads the model: a process that waits for it has nothing else to do.

    A model that has to be fetched, or that cannot be read, is left to the engine, which says what is wrong with it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._source, self._tokenizer = "", None
        try:
            source = _at_hand(config)
            self._tokenizer = load_tokenizer(source)
            self._source = source
        except (OctavoError, OSError):
            return

    def take(self, source: str) -> Any:
        """The tokenizer of a `LoadedEngine.source`; what was loaded for another one is let go."""
        early, self._tokenizer = self._tokenizer, None
        return load_tokenizer(source) if early is None or source != self._source else early


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a `LoadedEngine.source`."""
    path = Path(source)
    with no_collections():
        if path.suffix == ".json":
            from octavo.engine.fixture import load_fixture

            return load_fixture(path).tokenizer
        if path.is_dir():
            return tokenizer_in(path, None)
        from octavo.weights.names import open_weights

        weights = open_weights(path)
        try:
            return tokenizer_in(path, weights)
        finally:
            weights.close()


def tokenizer_in(path: Path, weights: Any) -> Any:
    """The tokenizer of a folder, or of an open file."""
    from octavo.tokenizers.load import from_folder, from_gguf_metadata

    return from_folder(path) if path.is_dir() else from_gguf_metadata(weights.metadata)


@contextmanager
def no_collections() -> Iterator[None]:
    """A vocabulary is millions of objects without a cycle: looking for one again and again takes a tenth of loading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def seed_source(seed: int) -> Callable[[], int]:
    """Seeds for requests that bring none: a sequence fixed by ``seed``, or a different one in every run for 0."""
    rng = random.Random(seed) if seed else random.SystemRandom()
    return lambda: rng.getrandbits(63)


def _at_hand(config: EngineConfig) -> str:
    """The `LoadedEngine.source` of a model that lies here. Raises `OctavoError` for one that has to be fetched."""
    if config.model.endswith(".json"):
        return str(Path(config.model))
    from octavo.weights.store import ModelStore

    return str(ModelStore(config.cache_dir or None, offline=True).resolve(config.model).path)
