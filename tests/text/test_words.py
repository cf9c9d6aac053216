"""Words in parameters as token ids, and loops that end a text."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import byte_level_metadata

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.core.samplers import Repetition
from octavo.decoding import processors
from octavo.decoding.loops import LoopDetector
from octavo.decoding.output import LOOPED, OutputProcessor
from octavo.decoding.words import with_token_ids
from octavo.tokenizers import from_gguf_metadata
from octavo.tokenizers.simple import SimpleTokenizer

TRAINED = from_gguf_metadata(byte_level_metadata())
BYTES = SimpleTokenizer([f"<0x{byte:02X}>" for byte in range(256)] + ["<eos>"], kind="bytes", eos=["<eos>"])


def test_bad_words_are_banned_as_they_stand_and_after_a_space() -> None:
    params = with_token_ids(SamplingParams(bad_words=["cat", " hat", "x y"]), TRAINED)
    texts = [TRAINED.decode(ids) for ids in params.banned_sequences]
    assert texts == ["cat", " cat", " hat", "x y", " x y"] and params.bad_words == () and not params.has_words
    assert with_token_ids(params, TRAINED) is params


def test_breakers_are_the_tokens_that_hold_one() -> None:
    params = with_token_ids(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["\n", "at"]), TRAINED)
    texts = {TRAINED.decode([i]) for i in params.dry_breaker_ids or ()}
    assert texts and all("\n" in text or "at" in text for text in texts) and {"\n", "at", "hat"} <= texts
    assert with_token_ids(SamplingParams(), TRAINED).dry_breaker_ids is None
    with pytest.raises(InvalidInput, match=r"dry_sequence_breakers\[1\]"):
        with_token_ids(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["x", "zzz"]), BYTES)
    tiny = SimpleTokenizer(["a", "b", "<eos>"], kind="bytes", eos=["<eos>"])
    assert with_token_ids(SamplingParams(dry_multiplier=1.0), tiny).dry_breaker_ids == ()


def test_processors_are_what_installed_packages_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="no package here offers one"):
        with_token_ids(SamplingParams(logits_processors=["shy"]), BYTES)
    point = EntryPoint("shy", "math:prod", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda group: [point] if group == processors.GROUP else [])
    assert processors.processor("shy") is math.prod
    params = SamplingParams(logits_processors=["shy"])
    assert with_token_ids(params, BYTES) is params
    with pytest.raises(InvalidInput, match="give one of shy"):
        with_token_ids(SamplingParams(logits_processors=["bold"]), BYTES)
    processors.processor.cache_clear()


def loops(tokens: list[int], wanted: Repetition) -> bool:
    """Whether the last tokens are a pattern, often enough."""
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        if len(tokens) >= size * wanted.min_count and size:
            pattern = tokens[len(tokens) - size :]
            if tokens[len(tokens) - size * wanted.min_count :] == pattern * wanted.min_count:
                return True
    return False


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5), st.integers(1, 3), st.integers(2, 4))
def test_a_loop_is_a_pattern_that_came_often_enough(tokens: list[int], most: int, least: int, count: int) -> None:
    wanted = Repetition(max(most, least), least, count)
    detector = LoopDetector(wanted)
    for end, token in enumerate(tokens, 1):
        assert detector.push(token) == loops(tokens[:end], wanted), tokens[:end]


def test_a_text_ends_where_it_goes_in_circles() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 3}, stop=["abx"])
    reader = OutputProcessor(BYTES, params)
    shown = [reader.push(token) for token in b"so: ababab and so on"]
    assert "".join(delta.text for delta in shown) == "so: ababab"  # "ab" may have become a stop string
    end = shown[9]
    assert (end.finished, end.stop_reason, end.truncate_at, end.token_ids) == (True, LOOPED, 10, (ord("b"),))
    assert reader.num_tokens == 10 and reader.finish().finished


def test_the_first_tokens_may_go_in_circles() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 1, "min_count": 2}, min_tokens=4)
    reader = OutputProcessor(BYTES, params)
    assert [reader.push(token).finished for token in b"aaaaa"] == [False] * 4 + [True]
    assert OutputProcessor(BYTES, params).push_plain(97) is None


def test_replay_ends_as_the_stream_did() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 2})
    streamed, replayed = OutputProcessor(BYTES, params), OutputProcessor(BYTES, params)
    text = "".join(streamed.push(token).text for token in b"xyxyxyxyxy")
    assert replayed.replay(b"xyxyxyxyxy") == text == "xyxyxy" and replayed.finished
