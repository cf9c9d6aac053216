"""The real vocabularies give the ids that other implementations give, on 2,048 strings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from corpus import COUNT, digest, golden_strings

from octavo.tokenizers import Tokenizer

STRINGS = golden_strings()


def golden(name: str) -> dict[str, Any]:
    data = json.loads(gzip.decompress((Path(__file__).parent / "data" / f"{name}.json.gz").read_bytes()))
    assert data["strings"] == digest(STRINGS), "the strings are not those that the goldens were made from"
    assert len(data["ids"]) == COUNT >= 2000
    return data


def different(tokenizer: Tokenizer, expected: list[list[int]], *, parse_special: bool) -> list[str]:
    found = [tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special) for text in STRINGS]
    return [text for text, ours, theirs in zip(STRINGS, found, expected, strict=True) if ours != theirs]


@pytest.mark.weights
def test_smollm2_gives_the_golden_ids_with_special_text_as_tokens_and_as_text(smollm: Tokenizer) -> None:
    data = golden("smollm")
    assert different(smollm, data["ids"], parse_special=True) == []
    assert different(smollm, data["plain_ids"], parse_special=False) == []
    assert data["ids"] != data["plain_ids"]


@pytest.mark.weights
def test_gemma_gives_the_original_ids(gemma: Tokenizer) -> None:
    assert different(gemma, golden("gemma")["ids"], parse_special=True) == []


@pytest.mark.weights
def test_gemma_puts_one_bos_before_a_text(gemma: Tokenizer) -> None:
    assert gemma.encode("Hello") == [2, *gemma.encode("Hello", add_special_tokens=False)]
    assert gemma.encode("<bos>Hello") == gemma.encode("Hello")
    assert gemma.encode("<bos>", parse_special=False)[:1] == [2]
    assert len(gemma.encode("<bos>", parse_special=False)) > 2


@pytest.mark.weights
def test_plain_text_never_becomes_a_special_token_and_comes_back_whole(smollm: Tokenizer, gemma: Tokenizer) -> None:
    # SmolLM2's vocabulary lacks some control bytes; SentencePiece cannot tell U+2581 from a space
    missing = {byte for byte in range(0x20) if not smollm.encode(chr(byte))}
    for tokenizer, lost in ((smollm, {chr(byte) for byte in missing}), (gemma, {"▁"})):
        for text in STRINGS:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert not any(tokenizer.is_special(index) for index in ids)
            if lost.isdisjoint(text):
                assert tokenizer.decode(ids) == text
    assert len(missing) < 16
