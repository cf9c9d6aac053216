"""Tokenizers that the text tests share. The real ones come from the model store."""

from __future__ import annotations

import pytest
from text_builders import byte_level_metadata, space_mark_metadata

from octavo.tokenizers import Tokenizer, from_dict, from_gguf_metadata


def _stored(name: str) -> Tokenizer:
    from octavo.weights.gguf import GgufFile
    from octavo.weights.store import ModelStore

    return from_gguf_metadata(GgufFile(ModelStore().resolve(name).path).metadata)


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return _stored("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma() -> Tokenizer:
    return _stored("gemma-3-270m")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A tiny byte-level BPE with turn marks."""
    return from_gguf_metadata(byte_level_metadata())


@pytest.fixture(scope="session")
def space_mark() -> Tokenizer:
    """A tiny SentencePiece-style vocabulary with byte fallback that puts a space before a text."""
    return from_gguf_metadata(space_mark_metadata())


@pytest.fixture(scope="session")
def raw_bytes() -> Tokenizer:
    """Ids 0 to 255 are the bytes; 256 is a special token."""
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["<end>"]
    return from_dict({"kind": "bytes", "vocab": vocab, "eos": ["<end>"]})
