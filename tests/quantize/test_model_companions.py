"""What lies beside the weights: a tokenizer out of GGUF metadata encodes as before; a folder's files are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.tokenizers.fast import byte_alphabet
from octavo.tokenizers.load import from_folder, from_gguf_metadata
from octavo.weights.quant.outputs import copy_companions

TEXTS = ("the thing, then", " two  spaces", "naïve <end> 数", "<end>", "")


def byte_level() -> dict[str, Any]:
    tokens = [*byte_alphabet(), "th", "the", "<end>", "<begin>"]
    return {
        "model": "gpt2",
        "pre": "default",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": ["t h", "th e"],
        "bos_token_id": len(tokens) - 1,
        "eos_token_id": len(tokens) - 2,
    }


def space_mark() -> dict[str, Any]:
    pieces = ["<unk>", "<begin>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "t", "h", "th", "▁", "▁th", "e"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    return {
        "model": "llama",
        "tokens": pieces,
        "token_type": kinds,
        "scores": [0.0] * 259 + [-5.0, -6.0, -1.0, -7.0, -2.0, -8.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.mark.parametrize("vocabulary", [byte_level(), space_mark()], ids=["byte-level", "space-mark"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_tokenizer_leaves_gguf_as_it_was(vocabulary: dict[str, Any], add_bos: bool, tmp_path: Path) -> None:
    vocabulary = vocabulary | {"add_bos_token": add_bos}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    before = from_gguf_metadata(metadata)
    copy_companions(tmp_path / "x.gguf", tmp_path, metadata)
    after = from_folder(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = before.encode(text, add_special_tokens=special)
            assert after.encode(text, add_special_tokens=special) == ids
            assert after.decode(ids) == before.decode(ids)
    assert (after.bos_id, after.eos_ids) == (before.bos_id, before.eos_ids)
    assert after.chat_template == before.chat_template and dict(after.special_tokens) == dict(before.special_tokens)


def test_a_folder_gives_its_small_files(tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "b"
    for folder in (source, out):
        folder.mkdir()
    for name in ("tokenizer.json", "LICENSE", "model.safetensors", "run.py"):
        (source / name).write_text(json.dumps(name))
    copy_companions(source, out, None)
    assert sorted(path.name for path in out.iterdir()) == ["LICENSE", "tokenizer.json"]
