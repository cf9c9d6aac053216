"""Tokenizers from a model folder give the library's ids and bring what the files beside `tokenizer.json` say."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_builders import TURN_MARKS, byte_level_metadata, tokenizer_json, with_bos, write_folder

from octavo.core.errors import InvalidInput
from octavo.tokenizers import from_folder, from_gguf_metadata

TEXTS = st.text(alphabet=st.one_of(st.sampled_from("the cas12\n<|im_end|>"), st.characters(codec="utf-8")), max_size=25)
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def _space_mark_json() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    mark = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return tokenizer_json(
        added_tokens=[{"id": index, "content": pieces[index], **flags} for index in range(3)],
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]},
        pre_tokenizer=None,
        post_processor=with_bos("<s>", 1),
        decoder={"type": "Sequence", "decoders": [mark, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        model={
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": ["▁ a"],
        },
    )


@given(TEXTS)
@shared_folder
def test_ids_and_text_are_the_librarys(folder: Path, text: str) -> None:
    from tokenizers import Tokenizer

    ours, theirs = from_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert not any(map(ours.is_special, ours.encode(text, parse_special=False)))


def test_byte_fallback_ids_and_text_are_the_librarys(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "tokenizer.json").write_text(json.dumps(_space_mark_json()), encoding="utf-8")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = from_folder(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a b", " a  日本 b", "a</s> b", "\n", ""):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        assert ids[0] == 1
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ours.encode(text, parse_special=False)) == text
    assert ours.strip_leading_space


def test_the_folder_and_the_gguf_form_of_one_tokenizer_agree(folder: Path) -> None:
    hub, gguf = from_folder(folder), from_gguf_metadata(byte_level_metadata())
    for text in ("the cat's  hat 1234", "<|im_start|>the<|im_end|>", "naïve\x00 日本"):
        for parse_special in (True, False):
            assert hub.encode(text, parse_special=parse_special) == gguf.encode(text, parse_special=parse_special)


def test_special_tokens_come_from_the_small_files(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "T"}
    write_folder(
        tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [2, 0]}, config={"eos_token_id": 9}
    )
    tokenizer = from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (1, (2, 0, 9), "T")
    assert tokenizer.special_tokens == {token: index for index, token in enumerate(TURN_MARKS)}
    (tmp_path / "chat_template.jinja").write_text("J")
    assert from_folder(tmp_path).chat_template == "J"
    assert from_folder(tmp_path).identity != tokenizer.identity


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    tokenizer = from_folder(write_folder(tmp_path, tokenizer_config={"chat_template": named}))
    assert tokenizer.chat_template == "D"
    assert tokenizer.traits.named_templates["tool_use"] == "U"


def test_bos_rules(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(post_processor=with_bos("<|im_start|>", 1))))

    def first(**config: Any) -> int:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", **config}))
        return from_folder(tmp_path).encode("the")[0]

    assert first() == 1
    assert first(add_bos_token=False, tokenizer_class="PreTrainedTokenizerFast") == 1
    assert first(add_bos_token=False, tokenizer_class="LlamaTokenizerFast") != 1
    assert from_folder(tmp_path).encode("<|im_start|>the")[:2] == from_folder(tmp_path).encode("<|im_start|>the")[:2]


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(post_processor=with_bos("<|im_start|>", 1))))
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("<|im_start|>the") == tokenizer.encode("the")
    assert tokenizer.encode("<|im_start|>the", parse_special=False)[:2] != [1, 1]
    assert tokenizer.encode("<|im_start|>the", parse_special=False)[0] == 1


TWICE = tokenizer_json()
TWICE["model"] = TWICE["model"] | {"vocab": TWICE["model"]["vocab"] | {"the": 7, "zzz": 7}}
_BAD: list[tuple[str, object, str]] = [
    ("tokenizer.json", "{", "tokenizer.json"),
    ("tokenizer.json", {"version": "9"}, "tokenizer.json"),
    ("tokenizer.json", TWICE, "tokenizer.json"),
    ("tokenizer.json", tokenizer_json(decoder=None), "decoder"),
    ("tokenizer.json", tokenizer_json(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder"),
    ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
    ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json"),
    ("tokenizer_config.json", {"bos_token": "nowhere"}, "bos_token"),
    ("tokenizer_config.json", {"eos_token": 5}, "eos_token"),
    ("tokenizer_config.json", {"chat_template": [{"name": 1}]}, "chat_template"),
    ("tokenizer_config.json", {"chat_template": 4}, "chat_template"),
    ("generation_config.json", {"eos_token_id": -1}, "generation_config.json eos_token_id"),
    ("config.json", {"eos_token_id": ["2"]}, "config.json eos_token_id"),
]


@pytest.mark.parametrize(("name", "content", "field"), _BAD)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, content: object, field: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        from_folder(tmp_path)
    assert field in caught.value.field


def test_a_folder_without_tokenizer_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="UTF-8"):
        from_folder(tmp_path)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    tokenizer, text = from_folder(folder), "the cas 12 " * 100_000
    begun, turns = threading.Event(), 0
    thread = threading.Thread(target=lambda: (begun.set(), tokenizer.encode(text)))
    thread.start()
    begun.wait()
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    assert turns > 1000
