"""The register of who is inside: whoever comes and leaves, and whichever front end dies, nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.admission import Ask, Limits
from octavo.core.forecast import Pace
from octavo.serve import register as r
from octavo.serve.errors import ApiError
from octavo.serve.keys import Key
from octavo.serve.sums import Values, added

PACE = Pace()
KEYS = {name: Key(name, "", requests_per_minute=0, tokens_per_minute=0, concurrent=3) for name in "xy"}


def ask(sequences: int = 1, tokens: int = 0) -> Ask:
    return Ask("x", sequences, tokens)


def arrive(stay: int, name: str, request_id: str, sequences: int = 1) -> r.Arrive:
    return r.Arrive(stay, name, request_id, KEYS[name], ask(sequences), PACE)


FRONTS, STAYS = st.integers(1, 3), st.integers(1, 4)
EVENTS = st.one_of(
    st.tuples(
        FRONTS, st.builds(arrive, STAYS, st.sampled_from("xy"), st.sampled_from(["", "a", "b", "c"]), st.integers(1, 3))
    ),
    st.tuples(
        FRONTS, st.builds(lambda stay, tokens: r.Enter(stay, tokens, ask(1, tokens), PACE), STAYS, st.integers(1, 9))
    ),
    st.tuples(FRONTS, st.builds(r.FirstToken, STAYS, st.integers(0, 9))),
    st.tuples(FRONTS, st.builds(lambda stay: r.Leave(stay, 5, 7, "finished"), STAYS)),
    st.tuples(FRONTS, st.just("dies")),
)


@given(st.lists(EVENTS, max_size=40))
def test_everybody_leaves_and_nothing_stays(events: list[tuple[int, Any]]) -> None:
    register = r.Register(Limits(sequences=5, waiting=4, queued_tokens=20, tenant_waiting=4))
    open_stays: set[tuple[int, int]] = set()
    for now, (front, event) in enumerate(events):
        if event == "dies":
            register.gone(front)
            open_stays = {stay for stay in open_stays if stay[0] != front}
            continue
        if isinstance(event, r.Arrive) and (front, event.stay) in open_stays:
            continue  # a front end gives no number twice
        try:
            register.answer(front, event, float(now))
        except ApiError as error:
            assert error.status in (409, 429)
            continue
        if isinstance(event, r.Arrive):
            open_stays.add((front, event.stay))
        elif isinstance(event, r.Leave):
            open_stays.discard((front, event.stay))
        assert set(register._stays) == open_stays
        assert register.door.sequences <= 5 + 3
    for front in (1, 2, 3):
        register.gone(front)
    door = register.door
    assert (door.sequences, door.waiting, door.queued_tokens, door.held_bytes, door.tenants) == (0, 0, 0, 0, {})
    assert len(register.ledger) == 0 and not register._stays
    assert all(account.inside == 0 for account in register.quotas._accounts.values())


def test_limits_ids_and_quotas_hold_for_all_front_ends_together() -> None:
    register = r.Register(Limits(sequences=2))
    register.answer(1, arrive(1, "x", "a"), 0.0)
    register.answer(1, r.Enter(1, 3, ask(), PACE), 0.0)
    with pytest.raises(ApiError, match="still running"):
        register.answer(2, arrive(1, "x", "a"), 0.0)
    register.answer(2, arrive(1, "y", "a"), 0.0)  # another owner's
    register.answer(2, r.Enter(1, 3, ask(), PACE), 0.0)
    with pytest.raises(ApiError, match="full"):
        register.answer(3, arrive(1, "y", "b"), 0.0)
    register.answer(2, r.Leave(1, 0, 5, "finished"), 1.0)
    register.gone(1)
    told = [register.answer(3, r.Describe(owner, "a"), 2.0)["status"] for owner in "xy"]
    assert told == ["cancelled", "finished"]


def test_counters_of_the_dead_stay_and_their_gauges_go() -> None:
    register = r.Register(Limits())

    def scrape(front: int, count: float) -> tuple[Any, Any]:
        found = register.answer(front, r.Scrape(Values({"n": [(("a",), [count])]}, {"g": [((), [1.0])]})), 0.0)
        return found.counters.get("n"), found.gauges.get("g")

    assert scrape(1, 5.0) == (None, None)
    assert scrape(2, 7.0) == ([(("a",), [5.0])], [((), [1.0])])
    register.gone(1)
    register.gone(1)
    assert scrape(2, 8.0) == ([(("a",), [5.0])], None)
    scrape(3, 1.0)
    register.gone(3)
    assert scrape(2, 9.0) == ([(("a",), [6.0])], None)
    assert added([]) == Values()
