"""The standard-library tokenizer of the tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.tokenizers import Tokenizer, from_dict

ROOT = Path(__file__).parent.parent.parent
CHARACTERS = {"vocab": ["<s>", "</s>", "?", *"abc "], "bos": "<s>", "eos": ["</s>"], "unk": "?", "add_bos": True}
WORDS = {"kind": "words", "vocab": ["<s>", "</s>", "one", "two", "three"], "bos": "<s>", "eos": "</s>"}


@given(st.text(alphabet="abc ", max_size=20))
def test_characters_come_back(text: str) -> None:
    tokenizer = from_dict(CHARACTERS)
    assert tokenizer.encode(text)[0] == 0
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.sampled_from(["one", "two", "three"]), max_size=8))
def test_words_come_back(words: list[str]) -> None:
    tokenizer = from_dict(WORDS)
    assert tokenizer.decode(tokenizer.encode(" ".join(words))) == " ".join(words)


@given(st.text(alphabet=st.one_of(st.sampled_from("<end>"), st.characters(codec="utf-8")), max_size=20))
def test_bytes_come_back(raw_bytes: Tokenizer, text: str) -> None:
    assert raw_bytes.decode(raw_bytes.encode(text), skip_special_tokens=False) == text
    assert raw_bytes.encode(text, parse_special=False) == list(text.encode())


def test_special_text_is_a_token_only_where_asked() -> None:
    tokenizer = from_dict(CHARACTERS)
    assert tokenizer.encode("a</s>b", add_special_tokens=False) == [3, 1, 4]
    assert tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=False) == [3, 2, 2, 2, 2, 4]
    assert tokenizer.decode([3, 1, 4]) == "ab"
    assert tokenizer.decode([3, 1, 4], skip_special_tokens=False) == "a</s>b"


def test_an_unknown_piece_without_unk_is_refused() -> None:
    with pytest.raises(InvalidInput, match="four"):
        from_dict(WORDS).encode("one four")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "syllables"}, "tokenizer.kind"),
        ({"vocab": []}, "tokenizer.vocab"),
        ({"vocab": "abc"}, "tokenizer.vocab"),
        ({"vocab": ["<s>", "</s>", "?", "a", "a"]}, "tokenizer.vocab[4]"),
        ({"vocab": ["<s>", "</s>", "?", ""]}, "tokenizer.vocab[3]"),
        ({"bos": "x"}, "tokenizer.bos"),
        ({"eos": ["x"]}, "tokenizer.eos"),
        ({"unk": 3}, "tokenizer.unk"),
        ({"special": ["x"]}, "tokenizer.special"),
        ({"colour": 1}, "tokenizer.colour"),
    ],
)
def test_a_bad_description_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_dict(CHARACTERS | change)
    assert caught.value.field == field


def test_identity_is_the_content() -> None:
    same = from_dict(json.loads(json.dumps(CHARACTERS)))
    assert from_dict(CHARACTERS).identity == same.identity
    changes: list[dict[str, Any]] = [{"add_bos": False}, {"chat_template": "x"}, {"unk": "a"}]
    assert len({same.identity, *(from_dict(CHARACTERS | change).identity for change in changes)}) == 4


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from octavo.tokenizers import from_dict;"
        "import octavo.decoding, octavo.tokenizers.chat;"
        "print(from_dict({'vocab': ['a', 'b']}).encode('ab'), 'tokenizers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "[0, 1] False"
