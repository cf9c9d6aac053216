"""One choice's text: stops, the token at which they were complete, endings, offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.decoding import OutputProcessor, TextDelta, describe_logprobs, token_text
from octavo.tokenizers import Tokenizer

END = 256


def run(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[list[TextDelta], OutputProcessor]:
    processor = OutputProcessor(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    deltas = [processor.push(index) for index in ids]
    return [*deltas, processor.finish()], processor


@given(
    st.lists(st.one_of(st.sampled_from([*b"ab", END]), st.sampled_from(list("é".encode()))), max_size=25),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
def test_text_and_truncation_are_those_of_the_definition(
    raw_bytes: Tokenizer, ids: list[int], stops: list[str], min_tokens: int, include: bool, ignore_eos: bool
) -> None:
    deltas, processor = run(
        raw_bytes,
        ids,
        stop=tuple(stops),
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
    )
    kept, text, reason, truncate_at = ids, None, None, None
    for count in range(1, len(ids) + 1):  # the definition, by decoding the whole text after every token
        ended = ids[count - 1] == END and not ignore_eos and count > min_tokens
        before, now = (_complete(raw_bytes, ids[:n], last=n == count and ended) for n in (count - 1, count))
        found = [
            (end, -len(stop), stop)
            for end in range(len(before) + 1, len(now) + 1)
            for stop in stops
            if now[:end].endswith(stop) and count > min_tokens
        ]
        if found:
            end, size, reason = min(found)
            kept, text, truncate_at = ids[:count], now[: end if include else end + size], count
            break
        if ended:
            kept, text = ids[:count], now
            break
    shown = "".join(delta.text for delta in deltas)
    if text is None:
        assert shown == raw_bytes.decode(ids)
    else:
        assert shown == text
        assert processor.num_tokens == len(kept)
        assert [index for delta in deltas for index in delta.token_ids] == kept
    assert deltas[-1].finished
    assert (deltas[-1].stop_reason, deltas[-1].truncate_at) == (reason, truncate_at)


def _complete(tokenizer: Tokenizer, ids: list[int], *, last: bool) -> str:
    """The text of `ids` without a character whose end may still come."""
    import codecs

    raw = b"".join(tokenizer.token_bytes(index) for index in ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final=last)


def test_a_stop_string_names_the_token_at_which_it_was_complete(raw_bytes: Tokenizer) -> None:
    deltas, processor = run(raw_bytes, list(b"xSTOPyz"), stop=("STOP",))
    assert [delta.text for delta in deltas] == ["x", "", "", "", "", "", "", ""]
    assert deltas[4] == TextDelta("", (ord("P"),), 4, True, "STOP", 5)
    assert deltas[5].token_ids == () and deltas[5].finished and deltas[5].truncate_at == 5
    assert processor.num_tokens == 5
    assert run(raw_bytes, list(b"xSTOPyz"), stop=("STOP",), include_stop_str_in_output=True)[0][4].text == "STOP"


def test_what_ends_a_text_is_no_text(raw_bytes: Tokenizer) -> None:
    eos, _ = run(raw_bytes, [65, END, 66])
    assert ([d.text for d in eos], eos[1].finished, eos[1].stop_reason) == (["A", "", "", ""], True, None)
    stop_id, _ = run(raw_bytes, [65, 66, 67], stop_token_ids=(66,))
    assert ([d.text for d in stop_id], stop_id[1].stop_reason) == (["A", "", "", ""], 66)
    shown, _ = run(raw_bytes, [65, 66], stop_token_ids=(66,), include_stop_str_in_output=True)
    assert shown[1].text == "B"
    ignored, _ = run(raw_bytes, [65, END, 66], ignore_eos=True)
    assert "".join(d.text for d in ignored) == "AB"
    visible, _ = run(raw_bytes, [65, END, 66], ignore_eos=True, skip_special_tokens=False)
    assert "".join(d.text for d in visible) == "A<end>B"


def test_min_tokens_keeps_stops_from_ending(raw_bytes: Tokenizer) -> None:
    deltas, _ = run(raw_bytes, list(b"aSaSa"), stop=("S",), min_tokens=2)
    assert "".join(delta.text for delta in deltas) == "aSa"
    assert deltas[-1].truncate_at == 4
    assert OutputProcessor(raw_bytes, SamplingParams(min_tokens=1)).push(END).finished is False


def test_held_back_text_comes_at_the_end(raw_bytes: Tokenizer) -> None:
    deltas, processor = run(raw_bytes, [*b"aST", 0xC3], stop=("STOP",))
    assert [delta.text for delta in deltas] == ["a", "", "", "", "ST\ufffd"]
    assert processor.finished
    assert processor.finish().text == ""


@given(st.lists(st.integers(0, END), max_size=20), st.integers(0, 20))
def test_replay_is_the_same_fold(raw_bytes: Tokenizer, ids: list[int], cut: int) -> None:
    params = SamplingParams(stop=("AB", "\n"))
    first, again = OutputProcessor(raw_bytes, params), OutputProcessor(raw_bytes, params)
    before = "".join(first.push(index).text for index in ids[:cut])
    assert again.replay(ids[:cut]) == before
    assert [first.push(i) for i in ids[cut:]] == [again.push(i) for i in ids[cut:]]
    assert first.finish() == again.finish()


@given(
    st.lists(st.one_of(st.integers(0, END), st.sampled_from(list("é€".encode()))), max_size=20),
    st.sampled_from([(), ("AB",)]),
)
def test_a_plain_push_is_a_push_or_leaves_it_alone(raw_bytes: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> None:
    params = SamplingParams(stop=stop, min_tokens=3)
    plain, whole = OutputProcessor(raw_bytes, params), OutputProcessor(raw_bytes, params)
    for index in ids:
        text = plain.push_plain(index)
        assert (text is None) == (bool(stop) or index == END or whole.finished)
        shown = whole.push(index)
        assert (plain.push(index).text if text is None else text) == shown.text
        assert (plain.num_tokens, plain.finished) == (whole.num_tokens, whole.finished)
    assert plain.finish() == whole.finish()


def test_offsets_and_logprob_entries(raw_bytes: Tokenizer) -> None:
    deltas, _ = run(raw_bytes, [*"aéb".encode()])
    assert [delta.offset for delta in deltas[:-1]] == [0, 1, 1, 2]
    entry = describe_logprobs(raw_bytes, TokenLogprobs(97, -0.5, 1, ((97, -0.5), (0xC3, -2.0)), ((END, -9.0),)), 7)
    assert (entry.token.text, entry.token.bytes, entry.logprob, entry.rank, entry.offset) == ("a", b"a", -0.5, 1, 7)
    assert [(token.text, value) for token, value in entry.top] == [("a", -0.5), ("\ufffd", -2.0), ("<end>", -9.0)]
    assert token_text(raw_bytes, 0xC3).bytes == b"\xc3"


def test_the_models_eos_ids_replace_the_tokenizers(raw_bytes: Tokenizer) -> None:
    processor = OutputProcessor(raw_bytes, SamplingParams(), eos_ids=[65])
    assert not processor.push(END).finished
    assert processor.push(65).finished


@pytest.mark.weights
def test_a_real_vocabulary_streams_whole_characters(smollm: Tokenizer) -> None:
    text = "👩‍👩‍👧 日本語 naïve\nUser: no"
    ids = smollm.encode(text)
    deltas, _ = run(smollm, ids, stop=("\nUser:",))
    assert "".join(delta.text for delta in deltas) == "👩‍👩‍👧 日本語 naïve"
    assert all("\ufffd" not in delta.text for delta in deltas)
