"""Thoughts and answer, split at marks in text cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.decoding.answer import AnswerForm, AnswerReader
from octavo.decoding.pieces import Call, Whole, whole
from octavo.decoding.reasoning import FORMATS, ReasoningFormat, format_named, format_of
from octavo.decoding.reasoning.counter import ThoughtCounter
from octavo.decoding.tools import DIALECTS, written
from octavo.tokenizers.simple import SimpleTokenizer

THINK = FORMATS["think"]


def read(form: AnswerForm, pieces: Sequence[str]) -> Whole:
    reader = AnswerReader(form)
    return whole([piece for part in pieces for piece in reader.push(part)] + reader.finish())


@pytest.mark.parametrize("marks", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_are_apart_wherever_the_text_is_cut(marks: ReasoningFormat, is_open: bool) -> None:
    inside, answer = "a < b\n\n<thin k>, so", "Yes.\n<think> is a mark.\n"
    said = f"{'' if is_open else marks.opens}\n{inside}\n{marks.closes}\n\n{answer}"
    form, expected = AnswerForm(marks, is_open), Whole(answer, inside)
    assert read(form, list(said)) == read(form, [said]) == expected
    assert all(read(form, [said[:place], said[place:]]) == expected for place in range(len(said)))
    again = AnswerForm(marks, True)  # a model that writes the mark once more
    assert read(again, list(marks.opens + inside + marks.closes + answer)) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "</th", "think>"]), max_size=8), st.booleans()
)
def test_any_text_is_split_the_same_however_it_is_cut(parts: list[str], is_open: bool) -> None:
    said, form = "".join(parts), AnswerForm(THINK, is_open)
    found = read(form, [said])
    assert read(form, list(said)) == read(form, parts) == found
    if not found.reasoning and "think>" not in said and not is_open:
        assert found.content == said


def test_thoughts_that_do_not_end_are_thoughts() -> None:
    assert read(AnswerForm(THINK), ["<think>", "a </think", " b"]) == Whole("", "a </think b")
    assert read(AnswerForm(THINK), ["  <thi"]) == Whole("  <thi")
    assert read(AnswerForm(THINK, True), [" a\n"]) == Whole("", "a")


def test_calls_are_looked_for_behind_the_thoughts() -> None:
    call = written(DIALECTS["hermes"], [Call("f", "{}")])
    form = AnswerForm(THINK, False, DIALECTS["hermes"], ("f",))
    assert read(form, list(f"<think>{call}</think>\n\nSo:\n{call}")) == Whole("So:", call, [Call("f", "{}")])


def test_calls_beyond_the_first_are_left_out_where_one_is_asked_for() -> None:
    calls = [Call("f", '{"a": 1}'), Call("f", '{"a": 2}')]
    form = AnswerForm(tools=DIALECTS["hermes"], names=("f",), most_calls=1)
    assert read(form, list(written(DIALECTS["hermes"], calls))) == Whole(calls=calls[:1])


def test_a_template_tells_its_marks() -> None:
    assert format_of("{% if thinking %}<think>\n") is THINK and format_of("a") is None
    assert format_named("qwen3") is THINK and format_of("[THINK]") is FORMATS["mistral"]
    assert THINK.is_open("x<think>\n") and not THINK.is_open("<think>\n\n</think>\n\n")
    with pytest.raises(InvalidInput, match="think"):
        format_named("no")


SPELLED = ["<", "think>", "</think>", "</thi", "nk>", "a", " ", "\n", "k>\nA", "<think>a", "<0xC3>", "<0xA9>", "<eos>"]
TOKENS = SimpleTokenizer(SPELLED, kind="bytes", eos=["<eos>"], special=["</think>"])
IDS = st.lists(st.integers(0, len(SPELLED) - 1), max_size=12)


@given(IDS, st.booleans(), st.booleans(), st.integers(0, 12))
def test_tokens_of_thought_are_counted_up_to_the_one_that_closes_them(
    ids: list[int], is_open: bool, skip: bool, cut: int
) -> None:
    def count(groups: list[list[int]]) -> int:
        counter = ThoughtCounter(THINK, TOKENS, is_open=is_open, skip_special=skip)
        for group in groups:
            counter.push(group)
        return counter.count

    texts = [TOKENS.decode(ids[:size], skip_special_tokens=skip) for size in range(len(ids) + 1)]
    begins = len(texts[-1]) - len(texts[-1].lstrip(" \n"))
    has_thoughts = is_open or texts[-1].startswith("<think>", begins)
    inside = begins + len("<think>") if texts[-1].startswith("<think>", begins) else begins
    closed = (size for size, text in enumerate(texts) if "</think>" in text[inside:])
    expected = next(closed, len(ids)) if has_thoughts else 0
    assert count([ids]) == count([[token] for token in ids]) == count([ids[:cut], ids[cut:]]) == expected
