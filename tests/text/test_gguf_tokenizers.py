"""Tokenizers from GGUF metadata: right ids by definition, and bad vocabularies refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_builders import (
    SPACE_MARK_PIECES,
    byte_level_metadata,
    merged,
    naive_byte_level,
    space_mark_metadata,
    trained,
)

from octavo.core.errors import InvalidInput
from octavo.tokenizers import Tokenizer, from_gguf_metadata
from octavo.tokenizers.fast import byte_alphabet
from octavo.tokenizers.gguf import derive_merges
from octavo.tokenizers.gguf_vocab import read_vocabulary

WORDS = st.text(alphabet="thecas1", max_size=12)
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("thecas 12\n'▁<|im_end|>"), st.characters(codec="utf-8")), max_size=30
)


@given(WORDS)
def test_byte_level_ids_are_those_of_the_definition(byte_level: Tokenizer, word: str) -> None:
    letters = "".join(character for character in word if not character.isdigit())
    assert byte_level.encode(letters) == naive_byte_level(letters)


@given(st.text(alphabet="theca s", max_size=14))
def test_space_mark_ids_are_those_of_the_definition(space_mark: Tokenizer, text: str) -> None:
    vocabulary = read_vocabulary(space_mark_metadata(), byte_level=False)
    pieces = merged(list(("▁" + text).replace(" ", "▁")) if text else [], derive_merges(vocabulary))
    assert space_mark.encode(text) == [1, *(vocabulary.ids[piece] for piece in pieces)]


def test_special_text_taken_for_plain_text_is_cut_and_merged_like_any_text() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<the>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3]
    tokenizer = from_gguf_metadata(metadata)
    expected = [index for piece in ("a", "<", "the", ">", "hat") for index in naive_byte_level(piece)]
    assert tokenizer.encode("a<the>hat", parse_special=False) == expected
    assert tokenizer.token_to_id("<the>") in tokenizer.encode("a<the>hat")


def test_a_special_token_that_merges_can_spell_is_spelled_out() -> None:
    metadata = byte_level_metadata()
    index = metadata["tokenizer.ggml.tokens"].index("the")
    metadata["tokenizer.ggml.token_type"][index] = 3
    tokenizer = from_gguf_metadata(metadata)
    assert tokenizer.encode("the") == [index]
    assert tokenizer.encode("the", parse_special=False) == [i for letter in "the" for i in naive_byte_level(letter)]


def test_derived_merges_rank_by_score_then_by_the_longer_left_part() -> None:
    vocabulary = read_vocabulary(space_mark_metadata(), byte_level=False)
    merges = derive_merges(vocabulary)
    rank = {piece: index for index, piece in enumerate(SPACE_MARK_PIECES)}
    every = [(p[:cut], p[cut:]) for p in SPACE_MARK_PIECES for cut in range(len(p) - 1, 0, -1)]
    known = [pair for pair in every if pair[0] in rank and pair[1] in rank]
    assert merges == sorted(known, key=lambda pair: (rank[pair[0] + pair[1]], -len(pair[0])))


@given(TEXTS)
def test_every_text_comes_back(byte_level: Tokenizer, space_mark: Tokenizer, text: str) -> None:
    for tokenizer, expected in ((byte_level, text), (space_mark, text.replace("▁", " "))):
        for parse_special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected
            assert parse_special or not any(map(tokenizer.is_special, ids))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 2024's  b", ["a", " 2024", "'s", " ", " b"]),
        ("smollm", "a 2024's  b", ["a", " ", "2", "0", "2", "4", "'s", " ", " b"]),
        ("llama-bpe", "a 2024'S\n\n b", ["a", " ", "202", "4", "'S", "\n\n", " b"]),
        ("qwen2", "a 2024's\n\n b", ["a", " ", "2", "0", "2", "4", "'s", "\n\n", " b"]),
        ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("default", "a+1234, b", ["a", "+", "123", "4", ",", " b"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_way(pre: str, text: str, pieces: list[str]) -> None:
    from octavo.tokenizers.pretokenize import pre_rule

    alphabet = byte_alphabet()
    cut = [piece for piece, _ in pre_rule(pre).build().pre_tokenize_str(text)]
    assert [bytes(alphabet[c] for c in piece).decode() for piece in cut] == pieces


def test_qwen2_brings_text_to_nfc_and_others_leave_it() -> None:
    decomposed = "e\u0301"
    assert (
        from_gguf_metadata(byte_level_metadata(pre="qwen2")).decode(
            from_gguf_metadata(byte_level_metadata(pre="qwen2")).encode(decomposed)
        )
        == "\u00e9"
    )
    smollm = from_gguf_metadata(byte_level_metadata())
    assert smollm.decode(smollm.encode(decomposed)) == decomposed


def test_turn_ends_and_named_ids_are_eos() -> None:
    assert from_gguf_metadata(byte_level_metadata(eos_token_id=0, eot_token_id=5)).eos_ids == (0, 5, 2)


def test_bos_is_added_where_the_file_or_the_kind_says_so() -> None:
    assert from_gguf_metadata(byte_level_metadata()).encode("a")[:1] != [1]
    assert from_gguf_metadata(byte_level_metadata(add_bos_token=True)).encode("a")[:1] == [1]
    assert from_gguf_metadata(byte_level_metadata(pre="llama-bpe", add_bos_token=None)).encode("a")[:1] == [1]
    assert from_gguf_metadata(space_mark_metadata(add_bos_token=False)).encode("a")[:1] != [1]
    assert from_gguf_metadata(byte_level_metadata(add_eos_token=True)).encode("a")[-1:] == [2]


def test_a_leading_space_is_added_unless_the_file_says_no() -> None:
    assert from_gguf_metadata(space_mark_metadata()).encode("at", add_special_tokens=False) != from_gguf_metadata(
        space_mark_metadata(add_space_prefix=False)
    ).encode("at", add_special_tokens=False)
    assert from_gguf_metadata(space_mark_metadata(add_space_prefix=False)).decode([3 + 256 + 1 + 1]) == " t"


def test_identity_is_the_content() -> None:
    first, again = from_gguf_metadata(byte_level_metadata()), from_gguf_metadata(byte_level_metadata())
    assert first.identity == again.identity
    changed: list[dict[str, Any]] = [{"pre": "gpt-2"}, {"eos_token_id": 0}, {"add_bos_token": True}, {"merges": []}]
    assert len({first.identity, *(from_gguf_metadata(byte_level_metadata(**c)).identity for c in changed)}) == 5
    template = byte_level_metadata() | {"tokenizer.chat_template": "x"}
    assert from_gguf_metadata(template).identity != first.identity


def test_ids_outside_the_vocabulary(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""
    assert byte_level.id_to_token(byte_level.vocab_size) is None
    with pytest.raises(InvalidInput, match="token_id"):
        byte_level.decode([-1])


TOKENS = len(trained()[0])
_BYTE_LEVEL: list[tuple[dict[str, Any], str]] = [
    ({"model": "bert"}, "tokenizer.ggml.model"),
    ({"model": None}, "tokenizer.ggml.model"),
    ({"pre": "unheard-of"}, "tokenizer.ggml.pre"),
    ({"pre": 7}, "tokenizer.ggml.pre"),
    ({"tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
    ({"tokens": []}, "tokenizer.ggml.tokens"),
    ({"tokens": ["a"] * TOKENS}, "tokenizer.ggml.tokens[0]"),
    ({"tokens": [""] + ["a"] * (TOKENS - 1)}, "tokenizer.ggml.tokens[0]"),
    ({"tokens": [5] * TOKENS}, "tokenizer.ggml.tokens[0]"),
    ({"token_type": [1]}, "tokenizer.ggml.token_type"),
    ({"token_type": [9] * TOKENS}, "tokenizer.ggml.token_type"),
    ({"token_type": "x" * TOKENS}, "tokenizer.ggml.token_type"),
    ({"merges": [trained()[1][0], "t"]}, "tokenizer.ggml.merges[1]"),
    ({"merges": ["t zzz"]}, "tokenizer.ggml.merges[0]"),
    ({"merges": [3]}, "tokenizer.ggml.merges[0]"),
    ({"merges": 3}, "tokenizer.ggml.merges"),
    ({"bos_token_id": TOKENS}, "tokenizer.ggml.bos_token_id"),
    ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id"),
    ({"eos_token_id": 2**63}, "tokenizer.ggml.eos_token_id"),
    ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id"),
    ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token"),
]


@pytest.mark.parametrize(("change", "field"), _BYTE_LEVEL, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_byte_level_vocabulary_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_gguf_metadata(byte_level_metadata(**change))
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


def _space_mark_tokens(**replaced: str) -> list[str]:
    tokens = list(space_mark_metadata()["tokenizer.ggml.tokens"])
    for at, token in replaced.items():
        tokens[int(at[1:])] = token
    return tokens


COUNT = len(_space_mark_tokens())
_SPACE_MARK: list[tuple[dict[str, Any], str]] = [
    ({"scores": None}, "tokenizer.ggml.scores"),
    ({"scores": [0.0]}, "tokenizer.ggml.scores"),
    ({"scores": [float("nan")] * COUNT}, "tokenizer.ggml.scores[0]"),
    ({"scores": ["1"] * COUNT}, "tokenizer.ggml.scores[0]"),
    ({"tokens": _space_mark_tokens(_4="<0x-1>")}, "tokenizer.ggml.tokens[4]"),
    ({"tokens": _space_mark_tokens(_4="<0x1FF>")}, "tokenizer.ggml.tokens[4]"),
    ({"tokens": _space_mark_tokens(_4="<0x00>")}, "tokenizer.ggml.tokens[3]"),
    ({"token_type": [1] * 4 + [6] + [1] * (COUNT - 5)}, "tokenizer.ggml.token_type"),
]


@pytest.mark.parametrize(("change", "field"), _SPACE_MARK, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_space_mark_vocabulary_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_gguf_metadata(space_mark_metadata(**change))
    assert caught.value.field == field


@pytest.mark.parametrize("template", [7, "x" * (1 << 20) + "y"])
def test_a_template_that_is_no_text_or_too_long_is_refused(template: object) -> None:
    with pytest.raises(InvalidInput, match="chat_template"):
        from_gguf_metadata(byte_level_metadata() | {"tokenizer.chat_template": template})


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="surrogate"):
        byte_level.encode("a\ud800")


ODD = st.sampled_from(
    [None, -1, 2**63, "", [], ["a"], {}, 1.5, True, float("inf"), b"z", "<0x-1>", " ", "a b", "\ud800"]
)
DAMAGE = st.tuples(st.booleans(), st.integers(0, 11), st.none() | st.integers(0, 400), ODD)


@given(st.lists(DAMAGE, min_size=1, max_size=2))
@settings(max_examples=300)
def test_a_damaged_vocabulary_is_refused_or_works(damages: list[tuple[bool, int, int | None, object]]) -> None:
    metadata = byte_level_metadata() if damages[0][0] else space_mark_metadata()
    for _, number, at, odd in damages:
        key = list(metadata)[number % len(metadata)]
        value = metadata[key]
        if at is None or not isinstance(value, list) or not value:
            metadata[key] = odd
        else:
            value[at % len(value)] = odd
    try:
        tokenizer = from_gguf_metadata(metadata)
    except InvalidInput:
        return
    ids = tokenizer.encode("the cat 12 é<|im_end|>", parse_special=False, add_special_tokens=False)
    assert all(0 <= index < tokenizer.vocab_size and not tokenizer.is_special(index) for index in ids)
