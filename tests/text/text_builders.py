"""Small vocabularies, built by the tests themselves."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.tokenizers.fast import byte_alphabet

TURN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "the cat's hat, the 12 cats' hats\n",
    "def f(x): return x + 1  # naïve café",
    "the then there   these 2024!",
    "日本語 日本 語",
]


@cache
def trained() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens in order of id, and merges, of a byte-level BPE trained on a few lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=TURN_MARKS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return tuple(tokens), tuple(merges)


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of `trained`; `changes` replace keys under `tokenizer.ggml.`, None removes one."""
    tokens, merges = trained()
    ggml: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(tokens),
        "merges": list(merges),
        "token_type": [3] * len(TURN_MARKS) + [1] * (len(tokens) - len(TURN_MARKS)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return _keyed(ggml | changes)


_WITH_MARK = ["▁the", "▁t", "▁", "▁a", "▁at", "▁▁▁", "▁▁"]
SPACE_MARK_PIECES = [*_WITH_MARK, "he", "th", "t", "h", "e", "a", "at", "c", "cat", "hat", "s"]


def space_mark_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece-style vocabulary: specials, all bytes, a user-defined piece, scored pieces."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "<sep>", *SPACE_MARK_PIECES]
    count = len(SPACE_MARK_PIECES)
    ggml: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (len(tokens) - count) + [-float(index) for index in range(count)],
        "token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * count,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _keyed(ggml | changes)


def _keyed(ggml: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}


def write_folder(folder: Path, **files: Any) -> Path:
    """A model folder: `tokenizer.json` of `trained` in SmolLM2's layout, and JSON files given by name."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """The content of a `tokenizer.json`; `changes` replace top-level parts."""
    tokens, merges = trained()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(TURN_MARKS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, cut]},
        "post_processor": None,
        "decoder": cut,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": list(merges)},
    }
    return parts | changes


def with_bos(token: str, token_id: int) -> dict[str, Any]:
    """A post-processor that puts a BOS before a text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [special, text], "pair": [special, text], "special_tokens": tokens}


def naive_byte_level(text: str) -> list[int]:
    """Ids of one pre-tokenized piece by the definition: the earliest merge of the list, leftmost, again and again."""
    tokens, merges = trained()
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    symbols = [alphabet[byte] for byte in text.encode()]
    return [tokens.index(symbol) for symbol in merged(symbols, [tuple(merge.split(" ")) for merge in merges])]


def merged(symbols: list[str], merges: list[tuple[str, ...]]) -> list[str]:
    """Byte-pair merging by its definition, quadratic."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            return symbols
        at = min(found)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
