"""Pieces of incremental text join to the whole text and never hold a broken character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import OctavoError
from octavo.decoding import IncrementalDetokenizer
from octavo.tokenizers import Tokenizer

CUTS = st.lists(st.integers(0, 5), max_size=30)


def pieces(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """What comes out when `ids` are pushed in groups of the given sizes, then one by one."""
    found, at = [], 0
    for size in [*cuts, *([1] * len(ids))]:
        found.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*found, detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    found = pieces(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), ids, cuts)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(found) == whole
    # a replacement character appears only where the whole text has one, so never for a character still to come
    assert sum(piece.count("\ufffd") for piece in found) == whole.count("\ufffd")


@given(st.binary(max_size=30), CUTS, st.booleans())
def test_any_bytes(raw_bytes: Tokenizer, raw: bytes, cuts: list[int], skip: bool) -> None:
    check(raw_bytes, list(raw), cuts, skip)


@given(st.text(max_size=12), CUTS)
def test_valid_text_is_never_broken(raw_bytes: Tokenizer, text: str, cuts: list[int]) -> None:
    found = pieces(IncrementalDetokenizer(raw_bytes), list(text.encode()), cuts)
    assert "".join(found) == text
    assert text.startswith("".join(found[:-1]))


@given(st.lists(st.integers(0, 330), max_size=30), CUTS, st.booleans())
def test_small_vocabularies(
    byte_level: Tokenizer, space_mark: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    check(byte_level, ids, cuts, skip)
    check(space_mark, [index % space_mark.vocab_size for index in ids], cuts, skip)


@pytest.mark.weights
@settings(max_examples=200)
@given(st.lists(st.integers(0, 262_143), max_size=40), CUTS, st.booleans())
def test_real_vocabularies(smollm: Tokenizer, gemma: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    check(gemma, ids, cuts, skip)
    check(smollm, [index % smollm.vocab_size for index in ids], cuts, skip)
    check(gemma, [238 + index % 256 for index in ids], cuts, skip)  # its byte tokens


@given(st.lists(st.integers(0, 277), max_size=10), st.lists(st.integers(0, 277), max_size=4))
def test_the_leading_space_stays_after_a_visible_prompt(space_mark: Tokenizer, ids: list[int], tail: list[int]) -> None:
    found = "".join(pieces(IncrementalDetokenizer(space_mark, tail), ids, []))
    visible = any(space_mark.token_bytes(index) for index in tail)
    raw = b"".join(space_mark.token_bytes(index) for index in ids).decode("utf-8", "replace")
    assert found == (raw if visible else raw.removeprefix(" "))


def test_it_is_a_fold_that_ends_once(raw_bytes: Tokenizer) -> None:
    ids = list("né".encode())
    first, again = IncrementalDetokenizer(raw_bytes), IncrementalDetokenizer(raw_bytes)
    shown = first.push(ids[:1]) + first.push(ids[1:2])
    assert (shown, again.push(ids[:2])) == ("n", "n")
    assert first.push(ids[2:]) == again.push(ids[2:]) == "é"
    assert first.num_chars == 2
    assert first.push([0xE2]) == ""
    assert (first.finish(), first.finish()) == ("\ufffd", "")
    with pytest.raises(OctavoError):
        first.push([65])
