"""Stop strings: whatever the pieces, the whole-text definition decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.decoding import StopMatcher

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.tuples(st.text(alphabet="abc", max_size=4), st.booleans()), max_size=12)


def first_match(text: str, active: list[bool], stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match complete first, the longest of several, completed at an active character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and active[end - 1]:
            return end, max(ending, key=len)
    return None


def may_become_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that properly begins a stop string."""
    sizes = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)


@given(STOPS, PIECES, st.booleans())
def test_it_shows_what_the_definition_shows(stops: list[str], pieces: list[tuple[str, bool]], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    text = "".join(piece for piece, _ in pieces)
    active = [flag for piece, flag in pieces for _ in piece]
    expected = first_match(text, active, stops)
    shown, seen, found = "", "", None
    for piece, flag in pieces:
        emitted, matched = matcher.push(piece, active=flag)
        shown, seen, found = shown + emitted, seen + piece, found or matched
        if found is None:  # nothing is held back that could not become part of a stop string
            assert shown == seen[: len(seen) - may_become_stop(seen, stops)]
    shown += matcher.finish()
    if expected is None:
        assert (shown, found, matcher.matched) == (text, None, None)
        return
    end, stop = expected
    assert (found, matcher.matched) == (stop, stop)
    assert shown == text[: end if include else end - len(stop)]
    assert matcher.push("more") == ("", None)
    assert matcher.finish() == ""


def test_the_match_complete_first_wins_and_then_the_longest() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopMatcher(["bc", "abc"]).push("xabcd") == ("x", "abc")


def test_no_stop_strings_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", 3], "abc"])
def test_bad_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidInput, match="stop"):
        StopMatcher(stops)
