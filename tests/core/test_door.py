"""Who is let in, and what the others are told: every limit, its message, and counts that come back to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.admission import Ask, Door, Guest, Limits, Refusal, held_bytes
from octavo.core.forecast import Pace
from octavo.core.params import SamplingParams

PACE = Pace(slots=4, tokens_per_s=100.0)


def enter(
    door: Door,
    tenant: str = "a",
    sequences: int = 1,
    tokens: int = 10,
    held: int = 0,
    now: float = 0.0,
    pace: Pace = PACE,
):
    return door.enter(Ask(tenant, sequences, tokens, held), pace, now)


@pytest.mark.parametrize(
    ("limits", "code", "says"),
    [
        (Limits(sequences=2), "queue_full", "2 sequences run or wait, and 2 may"),
        (Limits(waiting=2), "queue_full", "2 sequences wait"),
        (Limits(queued_tokens=25), "queue_full", "20 prompt tokens wait, and 25 may"),
        (Limits(tenant_waiting=2), "tenant_queue_full", "2 of your sequences wait"),
        (Limits(tenant_tokens=29), "tenant_queue_full", "20 of your prompt tokens wait"),
        (Limits(held_bytes=2500), "memory_full", "2000 bytes"),
        (Limits(first_token_s=0.25), "first_token_late", "would come in 0.3 s"),
    ],
)
def test_each_limit_refuses_with_its_reason(limits, code, says):
    door = Door(limits)
    guests = [enter(door, held=1000) for _ in range(2)]
    assert all(isinstance(guest, Guest) for guest in guests)
    refusal = enter(door, held=1000)
    assert isinstance(refusal, Refusal) and (refusal.code, refusal.retry_after) == (code, 1)
    assert says in refusal.message and "try again in 1 s" in refusal.message
    assert door.refusal(Ask("a", 1, 10, 1000), PACE) == refusal
    other = enter(door, "b", held=1000)
    assert isinstance(other, Guest) == code.startswith("tenant")
    door.leave(guests[0], 1)
    assert isinstance(enter(door, held=1000), Guest)


def test_a_first_token_makes_room_for_those_that_wait():
    door = Door(Limits(waiting=1, sequences=3))
    first = enter(door)
    assert isinstance(enter(door), Refusal)
    assert door.first_token(first, 1, 0.5) == 0.5
    assert door.first_token(first, 2, 0.7) is None
    assert isinstance(enter(door), Guest)


def test_one_that_is_larger_than_a_limit_runs_alone():
    door = Door(Limits(sequences=2, queued_tokens=5, held_bytes=10))
    assert isinstance(enter(door, sequences=8, tokens=99, held=99), Guest)
    assert isinstance(enter(door), Refusal)


def test_a_forecast_refuses_nobody_while_nobody_is_inside():
    """So that a wrong one is corrected in the end."""
    door = Door(Limits(first_token_s=0.05))
    guest = enter(door)
    assert isinstance(guest, Guest) and guest.forecast.seconds == pytest.approx(0.1)
    assert isinstance(enter(door), Refusal)


def test_the_time_to_come_again_is_when_there_is_room():
    door = Door(Limits(sequences=8))
    guests = [enter(door) for _ in range(8)]
    for guest in guests[:5]:
        door.first_token(guest, 0, 0.0)
    door.leave(guests[0], 40)  # stays are 40 steps of half a second, and 4 run: one leaves every 5 s
    pace = Pace(4, 100.0, 40, 0.5)
    enter(door, pace=pace)
    assert enter(door, pace=pace).retry_after == 5
    assert enter(door, sequences=3, pace=pace).retry_after == 15
    late = Door(Limits(first_token_s=2.0))
    enter(late, tokens=1000)
    assert enter(late, tokens=10).retry_after == 9  # it would take 10.1 s


@given(
    visits=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 50), st.sampled_from([0, 1, 2])),
        max_size=30,
    )
)
def test_counts_come_back_to_nothing(visits):
    door, inside = Door(Limits(sequences=12, tenant_tokens=90)), []
    for number, (tenant, sequences, tokens, fate) in enumerate(visits):
        guest = enter(door, tenant, sequences, tokens, tokens, now=float(number))
        if isinstance(guest, Guest):
            inside.append(guest)
            if fate:
                door.first_token(guest, number, number + 0.5)
        if fate == 2 and inside:
            door.leave(inside.pop(0), number + 1)
        waiting = [guest.ask for guest in inside if guest.first_token is None]
        assert door.sequences == sum(guest.ask.sequences for guest in inside)
        assert (door.waiting, door.queued_tokens) == (
            sum(ask.sequences for ask in waiting),
            sum(ask.tokens for ask in waiting),
        )
    for guest in inside:
        door.leave(guest, 99)
    assert (door.sequences, door.waiting, door.queued_tokens, door.held_bytes, door.tenants) == (0, 0, 0, 0, {})


def test_what_a_request_may_come_to_hold():
    plain = held_bytes(100, SamplingParams(max_tokens=50), 1000)
    assert plain == 100 * 150
    assert held_bytes(100, SamplingParams(max_tokens=50, n=3), 1000) == 3 * plain
    assert held_bytes(100, SamplingParams(max_tokens=None), 60) == 100 * 160
    assert held_bytes(100, SamplingParams(max_tokens=50, logprobs=4), 1000) == plain + 150 * 50 * 5
    assert held_bytes(100, SamplingParams(max_tokens=50, prompt_logprobs=1), 1000) == plain + 150 * 100 * 2
    asked = SamplingParams(max_tokens=50, logprob_token_ids=(1, 2))
    assert held_bytes(100, asked, 1000) == plain + 150 * 50 * 3
