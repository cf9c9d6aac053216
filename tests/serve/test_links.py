"""The protocol between processes: nothing is lost, nothing comes twice, whoever dies whenever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from link_world import FACTS, World

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind, TokenEvent
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.serve.links import engine_side, wire
from octavo.serve.links import messages as m
from octavo.serve.links.api_side import MAX_DEATHS, ApiSide
from octavo.serve.links.engine_side import EngineSide, request_of
from octavo.serve.links.supervision import End, Kill, Rules, Start, Supervision, Tell


def test_any_process_may_die_at_any_event() -> None:
    worlds = [World(seed).play() for seed in range(30)]
    assert sum(world.num_resumed for world in worlds) > 30  # the deaths came in the middle of something


def test_any_process_may_die_where_the_text_is_made_apart() -> None:
    worlds = [World(seed, kills=12, full=True).play() for seed in range(30)]
    assert sum(world.num_resumed for world in worlds) > 30


def test_a_request_that_kills_engines_takes_nobody_along() -> None:
    worlds = [World(seed, kills=0, requests=10, apis=1, poison=0.3).play() for seed in range(10)]
    ends = {stream.poison: set() for world in worlds for stream in world.streams}
    for world in worlds:
        for stream in world.streams:
            ends[stream.poison] |= set(stream.ends)
    assert ends == {True: {"error"}, False: {"stop", "length"}}


# -- messages

LOGPROBS = m.pack_logprobs(TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, float("-inf"))), ()))
PARAMS = SamplingParams(seed=2**64 - 1, logit_bias={3: 1.5}, stop=("é",), logprobs=2)
SAMPLES: list[tuple[Any, Any]] = [
    (m.ToEngine, m.ApiHello("api-0")),
    (m.ToEngine, m.Submit(1, "r", (1, 2), PARAMS, 2**64 - 1, "t", "s", -3, 0.5, ((7,), ()), (False, True))),
    (m.ToEngine, m.Cancel(4)),
    (m.ToEngine, m.Stop(4, 2, "END")),
    (m.ToEngine, m.Explain(7, "r", "t")),
    (m.FromEngine, m.Explained(7, b"[]")),
    (m.ToEngine, m.Shed("r", "full", 429, 1.5)),
    (m.FromEngine, m.Step((1,), (0,), (96,), (m.Event(2, m.TOKEN, 0, 5, logprobs=LOGPROBS, prompt_logprobs=(None,)),))),
    (m.FromEngine, m.Refused(1, "prompt", 3, "give less")),
    (m.FromEngine, m.Stats({"steps": 1.0})),
    (m.ToSupervisor, m.Ready(FACTS)),
    (m.ToChild, m.Up("engine", 3, "engine-3", FACTS)),
    (m.FromText, m.Route(7)),
    (m.Texts, m.Texts(("é", None, ("", 3, "END")), ("",))),
]


@pytest.mark.parametrize("kinds, message", SAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_comes_as_it_went_and_only_to_whom_it_was_sent(kinds: Any, message: Any) -> None:
    link: m.Link[Any, Any] = m.Link(kinds)
    frames = link.pack(message, 7, 9)
    assert link.unpack(frames, 9) == (7, message)
    assert link.unpack(frames, 8) is None  # another life of the same process
    assert link.unpack(link.pack(message, 7), 8) == (7, message)


@given(st.sampled_from(SAMPLES), st.data())
def test_bytes_that_are_no_message_are_refused(sample: tuple[Any, Any], data: Any) -> None:
    link: m.Link[Any, Any] = m.Link(sample[0])
    header, body = link.pack(sample[1], 1)
    broken = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frames = data.draw(st.sampled_from([[header], [header, body, b""], [b"octv" + bytes(20), body], [header, broken]]))
    try:
        link.unpack([bytes(frame) for frame in frames], 1)
    except m.ProtocolError:
        return
    assert len(frames) == 2 and frames[1] is broken  # another message of the same schema


def test_limits_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    link: m.Link[Any, Any] = m.Link(m.ToEngine)
    for bad in (
        m.ApiHello("x" * 257),
        m.Submit(1, "r", (-1,), SamplingParams(), 1),
        m.Submit(1, "r", (1,), SamplingParams(), 1, outputs=((1,),) * 65),
        m.Submit(-1, "r", (1,), SamplingParams(), 1),
    ):
        with pytest.raises(m.ProtocolError, match="schema"):
            link.unpack(link.pack(bad, 1), 1)
    forged = SamplingParams()
    object.__setattr__(forged, "temperature", float("nan"))
    with pytest.raises(m.ProtocolError, match="temperature"):
        link.unpack(link.pack(m.Submit(1, "r", (1,), forged, 1), 1), 1)
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    newer = link.pack(m.Cancel(1), 1)
    monkeypatch.undo()
    with pytest.raises(m.ProtocolError, match=f"version {wire.VERSION + 1}"):
        link.unpack(newer, 1)
    monkeypatch.setattr(wire, "MAX_BYTES", 100)
    large = m.Submit(1, "r", tuple(range(200)), SamplingParams(), 1)
    with pytest.raises(m.ProtocolError, match="at most 100"):
        link.pack(large, 1)


# -- a front end

ASKED = SamplingParams(max_tokens=9, seed=1)


def front_end(*names: str) -> ApiSide:
    side = ApiSide("api-0")
    for name in names:
        side.submit(Request(name, (1, 2), ASKED), "", 0.0)
    return side


def sent(side: ApiSide, kind: Any) -> list[Any]:
    return [message for message in side.outbox if isinstance(message, kind)]


def drawn(side: ApiSide, row: int, *tokens: int, first: int = 0) -> list[int]:
    """Tokens of a row arrive; those that are told."""
    indices = tuple(range(first, first + len(tokens)))
    events = side.hear(side.engine, m.Step((row,) * len(tokens), indices, tokens), 0.0)
    return [event.token_id for event in events if event.token_id is not None]


def test_what_kills_every_engine_is_given_up_and_who_comes_on_is_not() -> None:
    side = front_end("other", "poison", "third")
    for life in range(1, MAX_DEATHS + 1):
        side.engine_up(life, 0.0)
        (row, *_) = (message.row for message in sent(side, m.Submit) if message.request_id == "other")
        assert drawn(side, row, life, first=life - 1) == [life]
        asked = [message.request_id for message in sent(side, m.Submit)]
        assert asked == (["other", "poison", "third"] if life < MAX_DEATHS else ["other", "poison"])
        told = side.engine_down()
        assert [event for event in told if life < MAX_DEATHS] == []
    assert [(e.request_id, e.kind, e.finish_reason) for e in told] == [
        ("poison", EventKind.CHOICE_END, "error"),
        ("poison", EventKind.REQUEST_END, "error"),
    ]
    side.engine_up(9, 0.0)
    (again,) = sent(side, m.Submit)
    assert (again.request_id, again.outputs, again.ended) == ("other", ((1, 2, 3),), (False,))


def test_suspects_follow_each_other_as_each_has_shown_that_it_can_be_run() -> None:
    side = front_end("a", "b", "c", "d")
    for life in (1, 2, 3):
        side.outbox.clear()
        side.engine_up(life, 0.0)
        if life < 3:
            side.engine_down()
    side.submit(Request("new", (1, 2), ASKED), "", 0.0)
    side.cancel("c")  # before its turn
    order = []
    for leaves in (False, True, False, False):
        (now,) = sent(side, m.Submit)
        order.append(now.request_id)
        side.outbox.clear()
        side.cancel(now.request_id) if leaves else drawn(side, now.row, 7)
    assert order == ["a", "b", "d", "new"]
    side.submit(Request("later", (1, 2), ASKED), "", 0.0)
    assert [message.request_id for message in sent(side, m.Submit)] == ["later"]


def test_lost_messages_are_noticed_and_the_request_begins_anew_behind_what_is_known() -> None:
    side = front_end("a")
    side.engine_up(1, 0.0)
    row = sent(side, m.Submit)[0].row
    assert drawn(side, row, 10, 11) == [10, 11]
    side.outbox.clear()
    assert drawn(side, row, 13, first=3) == []
    cancel, again = side.outbox
    assert cancel == m.Cancel(row) and again.outputs == ((10, 11),)
    assert again.row != row and again.request_id == "a~1"  # the engine remembers the first name
    assert drawn(side, row, 12, first=2) == [] and drawn(side, again.row, 12, first=2) == [12]
    side.outbox.clear()
    ends = (
        m.Event(again.row, m.CHOICE_END, num_output_tokens=9, finish_reason="length"),
        m.Event(again.row, m.REQUEST_END),
    )
    assert list(side.hear(1, m.Step((), (), (), ends), 0.0)) == []  # six tokens are missing
    assert [type(message) for message in side.outbox] == [m.Cancel, m.Submit]


def test_beams_are_searched_for_again_and_what_they_had_begun_to_say_is_not_told_twice() -> None:
    side = ApiSide("api-0")
    side.submit(Request("a", (1, 2), SamplingParams(n=2, use_beam_search=True)), "", 0.0)
    side.engine_up(1, 0.0)
    assert drawn(side, sent(side, m.Submit)[0].row, 10, 11) == [10, 11]
    side.engine_down()
    side.outbox.clear()
    side.engine_up(2, 0.0)
    (again,) = sent(side, m.Submit)
    assert again.outputs == () == again.ended
    assert drawn(side, again.row, 10, 11, 12) == [12]


def test_what_mirostat_allows_goes_to_the_next_engine() -> None:
    side = ApiSide("api-0")
    params = SamplingParams(n=2, mirostat=2, mirostat_eta=0.5, max_tokens=9)
    side.submit(Request("a", (1, 2), params), "", 0.0)
    side.engine_up(1, 0.0)
    (first,) = sent(side, m.Submit)
    said = tuple(m.Event(first.row + 1, m.TOKEN, i, 7, i + 1, logprobs=(7, -0.25 * i, 1, (), ())) for i in range(3))
    assert len(side.hear(1, m.Step((), (), (), said), 0.0)) == 3 and first.mu == ()
    side.engine_down()
    side.outbox.clear()
    side.engine_up(2, 0.0)
    (again,) = sent(side, m.Submit)
    mu = 10.0
    for i in range(3):
        mu = params.mirostat_after(mu, -0.25 * i)
    assert again.mu == (10.0, mu) and again.outputs == ((), (7, 7, 7))


def test_a_stop_ends_a_choice_here_and_there() -> None:
    side = front_end("a")
    side.engine_up(1, 0.0)
    row = sent(side, m.Submit)[0].row
    drawn(side, row, 10, 11, 12)
    side.stop("a", 0, 2, "END")
    side.stop("a", 0, 2, "END")
    assert sent(side, m.Stop) == [m.Stop(row, 2, "END")]
    assert [(e.kind, e.stop_reason, e.num_output_tokens) for e in side.take()] == [
        (EventKind.CHOICE_END, "END", 2),
        (EventKind.REQUEST_END, "END", 2),
    ]
    assert side.num_open == 0 and drawn(side, row, 13, first=3) == []


def test_another_engine_is_not_heard_and_what_has_ended_is_not_asked_for_again() -> None:
    side = ApiSide("api-0")
    side.submit(Request("a", (1, 2), SamplingParams(max_tokens=9, seed=1, n=2)), "", 0.0)
    side.engine_up(4, 0.0)
    row = sent(side, m.Submit)[0].row
    end = m.Event(row, m.CHOICE_END, num_output_tokens=1, finish_reason="length")
    assert list(side.hear(3, m.Step((row,), (0,), (10,), (end,)), 0.0)) == []
    side.hear(3, m.Stats({"steps": 1.0}), 0.0)
    assert side.stats == {}
    assert len(side.hear(4, m.Step((row,), (0,), (10,), (end,)), 0.0)) == 2
    side.engine_up(5, 0.0)
    (again,) = sent(side, m.Submit)
    assert (again.outputs, again.ended) == (((10,), ()), (True, False))
    side.outbox.clear()
    side.cancel("a")
    assert side.outbox == [m.Cancel(again.row)] and not (side._rows or side._asked or side.num_open)


def test_what_cannot_be_sent_is_refused_here() -> None:
    side = front_end("a")
    with pytest.raises(InvalidInput, match="cache_salt"):
        side.submit(Request("b", (1,), ASKED), "x" * 5000, 0.0)
    with pytest.raises(InvalidInput, match="request_id"):
        side.submit(Request("a", (1,), ASKED), "", 0.0)
    assert side.num_open == 1


# -- an engine


class Calls:
    """An engine's core that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.requests: list[Request] = []

    def submit(self, request: Request, now: float) -> None:
        self.told.append(("submit", request.request_id))
        self.requests.append(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.told.append(("cancel", request_id))

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: int | str | None) -> None:
        self.told.append(("stop", request_id, choice, num_output_tokens))

    def take(self) -> list[Any]:
        """What it was told since the last time."""
        told, self.told = self.told, []
        return told


def engine_with(*apis: int) -> tuple[EngineSide, Calls]:
    """An engine that these front ends have greeted, each in a seat of its own."""
    core = Calls()
    side = EngineSide(core, lambda m, now: request_of(m, now, model="", namespace="", eos_token_ids=()))
    for epoch in apis:
        side.hear(epoch, m.ApiHello(f"seat {epoch}"), 0.0)
    return side, core


def asked(row: int, name: str, **more: Any) -> m.Submit:
    return m.Submit(row, name, (1, 2), SamplingParams(n=2), 1, **more)


def test_an_engine_runs_each_request_once_and_only_for_the_living() -> None:
    side, core = engine_with(2, 3)
    side.hear(9, asked(1, "stranger"), 0.0)  # it has not said who it is
    side.hear(2, asked(1, "a"), 0.0)
    side.hear(2, asked(1, "a"), 0.0)  # twice
    side.hear(3, asked(1, "b"), 0.0)
    side.hear(3, asked(7, "c"), 0.0)
    assert core.take() == [("submit", "a"), ("submit", "b"), ("submit", "c")]
    side.hear(2, m.Stop(2, 4, "x"), 0.0)
    side.hear(2, m.Stop(3, 4, "x"), 0.0)  # nobody's
    side.hear(3, m.Cancel(7), 0.0)
    side.hear(3, m.Cancel(7), 0.0)
    assert core.take() == [("stop", "a", 1, 4), ("cancel", "c")]
    side.gone(2)
    assert side.outbox[-1] == (3, m.Orphaned((("", "a"),)))
    side.hear(2, m.ApiHello("seat 2"), 0.0)
    side.hear(2, asked(5, "late"), 0.0)
    assert core.take() == [("cancel", "a")] and side.peers == (3,)
    side.hear(4, m.ApiHello("seat 3"), 5.0)  # another life in the same seat
    assert core.take() == [("cancel", "b")] and side.peers == (4,) and side.num_runs == 0
    assert side.outbox[-1] == (4, m.Orphaned((("", "a"), ("", "b"))))
    side.hear(4, asked(1, "d"), 5.0)
    side.end_silent(15.0, 10.0)
    assert side.peers == (4,)
    side.end_silent(15.1, 10.0)
    assert core.take() == [("submit", "d"), ("cancel", "d")] and side.peers == ()
    assert side.num_ended == 4


def test_a_request_goes_on_from_where_it_was() -> None:
    side, core = engine_with(2)
    side.hear(2, asked(1, "a", outputs=((5, 6), (7,)), ended=(False, True), waited=2.0), 10.0)
    (request,) = core.requests
    assert [branch.output_token_ids for branch in request.branches] == [[5, 6], [7]]
    assert [branch.num_delivered_tokens for branch in request.branches] == [2, 1]
    assert request.live_branches == request.branches[:1] and request.seed == 1 and request.arrival == 8.0
    side.hear(2, asked(5, "b", outputs=((5,),), ended=(False,)), 10.0)
    known = {"outputs": ((5,), ()), "ended": (False, False)}
    side.hear(2, asked(7, "c", **known, mu=(1.5,)), 10.0)
    side.hear(2, asked(9, "d", **known, mu=(1.5, float("nan"))), 10.0)
    refused = [(epoch, message.row, message.field) for epoch, message in side.outbox]
    assert refused == [(2, 5, "outputs"), (2, 7, "mu"), (2, 9, "mu")]
    side.hear(2, asked(11, "e", **known, mu=(1.5, 2.5)), 10.0)
    assert [branch.mu for branch in core.requests[-1].branches] == [1.5, 2.5]


def scored(row: int, tokens: int, pairs: int) -> TokenEvent:
    top = tuple((2**31 - 1, -1.25) for _ in range(pairs))
    entry = TokenLogprobs(2**31 - 1, -1.25, 2**31 - 1, top)
    return TokenEvent("a", EventKind.TOKEN, row, 0, 1, prompt_logprobs=(None, *[entry] * (tokens - 1)))


@example(tokens=60, pairs=21, choices=1)
@example(tokens=40, pairs=21, choices=40)
@given(tokens=st.integers(1, 60), pairs=st.integers(0, 21), choices=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_logprobs_of_many_choices_go_in_as_many_messages_as_they_take(tokens: int, pairs: int, choices: int) -> None:
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(wire, "MAX_BYTES", 1 << 14)
        limits.setattr(engine_side, "MAX_BYTES", 1 << 14)
        limits.setattr(engine_side, "_ROOM", 1 << 12)
        side, core = engine_with(2)
        params = SamplingParams(n=choices, prompt_logprobs=max(0, pairs - 1))
        side.hear(2, m.Submit(1, "a", (1,) * tokens, params, 1), 0.0)
        if side.outbox:
            assert side.outbox[0][1].field == "prompt_logprobs" and not core.take()  # type: ignore[union-attr]
            assert tokens * (32 + 15 * pairs) > 3 << 12
            return
        side.take([scored(choice, tokens, pairs) for choice in range(choices)])
        link: m.Link[Any, Any] = m.Link(m.FromEngine)
        found = [link.unpack(frames, 2) for _, frames in side.parcels(1)]
        rows = [event.row for _, step in filter(None, found) for event in step.events]
        assert rows == list(range(1, choices + 1))


@given(tokens=st.integers(1, 60), pairs=st.integers(0, 21), choices=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_all_that_beams_have_said_goes_in_as_many_messages_as_it_takes(tokens: int, pairs: int, choices: int) -> None:
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(wire, "MAX_BYTES", 1 << 13)
        limits.setattr(engine_side, "_ROOM", 1 << 12)
        side, _ = engine_with(2)
        side.hear(2, m.Submit(1, "a", (1,), SamplingParams(n=choices, use_beam_search=True), 1), 0.0)
        entry = TokenLogprobs(2**31 - 1, -1.25, 2**31 - 1, ((2**31 - 1, -1.25),) * pairs)
        side.take(
            TokenEvent("a", EventKind.TOKEN, choice, index, 2**31 - 1, entry if pairs else None)
            for choice in range(choices)
            for index in range(tokens)
        )
        link: m.Link[Any, Any] = m.Link(m.FromEngine)
        found = [link.unpack(frames, 2) for _, frames in side.parcels(1)]
        told = [(event.row, event.index) for _, step in filter(None, found) for event in step.events]
        assert told == [(1 + choice, index) for choice in range(choices) for index in range(tokens)]


# -- the supervisor

RULES = Rules(
    silence=30.0, first_word=60.0, first_pause=0.1, longest_pause=5.0, settled=30.0, most_false_starts=5, drain=10.0
)


def started(plan: Supervision) -> dict[str, int]:
    """Seats that were started since the last look, with their epochs."""
    found = {action.seat: action.epoch for action in plan.actions if isinstance(action, Start)}
    plan.actions.clear()
    return found


def served() -> tuple[Supervision, dict[str, int]]:
    plan = Supervision(apis=1, rules=RULES)
    plan.tick(0.0)
    seats = started(plan)
    plan.heard(seats["api-0"], m.Beat(), 1.0)
    plan.heard(seats["engine"], m.Ready(FACTS, "there"), 1.0)
    assert plan.actions == [Tell(seats["api-0"], m.Up("engine", seats["engine"], "there", FACTS))]
    plan.heard(seats["api-0"], m.Ready(), 1.0)
    plan.actions.clear()
    assert plan.is_serving
    return plan, seats


def test_pauses_grow_and_a_good_life_ends_them() -> None:
    plan, seats = served()
    now, pauses = 2.0, []
    epoch = seats["engine"]
    for life in range(9):
        plan.exited(epoch, -9, now)
        died = now
        while not (seats := started(plan)):
            now += 0.05
            plan.tick(now)
            plan.heard(2, m.Beat(), now)
        pauses.append(round(now - died, 1))
        epoch = seats["engine"]
        plan.heard(epoch, m.Ready(FACTS), now)
        now += 31.0 if life == 7 else 1.0
        plan.heard(2, m.Beat(), now)
        plan.heard(epoch, m.Beat(), now)
    assert pauses[0] == 0.0 and pauses[1:3] == [0.1, 0.2] and pauses[7] == 5.0
    assert pauses[8] == 0.0


def test_whoever_slept_calls_nobody_silent_for_it() -> None:
    plan, seats = served()
    plan.overslept(500.0)
    plan.tick(530.0)
    assert plan.actions == []
    plan.heard(seats["api-0"], m.Beat(), 530.0)
    plan.tick(530.1)
    assert plan.actions == [Kill(seats["engine"])]
    side, _ = engine_with(2)
    side.overslept(500.0)
    side.end_silent(530.0, 30.0)
    assert side.peers == (2,)
    side.end_silent(530.1, 30.0)
    assert side.peers == ()


def test_who_is_silent_is_ended_and_not_heard_again() -> None:
    plan, seats = served()
    plan.heard(seats["api-0"], m.Beat(), 31.5)
    plan.tick(31.5)
    assert plan.actions == [Kill(seats["engine"])]
    plan.heard(seats["engine"], m.Beat(), 32.0)
    plan.tick(40.0)
    assert plan.actions == [Kill(seats["engine"])]
    plan.exited(seats["engine"], -9, 40.0)
    assert Tell(seats["api-0"], m.Gone("engine", seats["engine"])) in plan.actions
    engine = started(plan)["engine"]
    plan.heard(seats["api-0"], m.Beat(), 99.0)
    plan.tick(100.0)
    assert plan.actions == []  # a first word may take longer
    plan.heard(seats["api-0"], m.Beat(), 101.0)
    plan.tick(101.0)
    plan.heard(engine, m.Ready(FACTS), 102.0)  # too late
    assert plan.actions == [Kill(engine)]


def test_what_cannot_start_says_why_and_what_never_starts_is_given_up() -> None:
    plan = Supervision(apis=1, rules=RULES)
    plan.tick(0.0)
    seats = started(plan)
    problem = m.Failed("model", "x", "there is none")
    plan.heard(seats["engine"], problem, 1.0)
    plan.exited(seats["engine"], 2, 1.0)
    assert plan.actions == [Kill(seats["api-0"]), End(2, problem)]
    plan, seats = served()
    now, ended = 2.0, []
    while not ended:
        plan.exited(plan._engine.epoch, 1, now)
        now += 10.0
        plan.heard(seats["api-0"], m.Beat(), now)
        plan.tick(now)
        ended = [action for action in plan.actions if isinstance(action, End)]
        assert now < 200.0
    assert ended[0].code == 1


def test_what_an_operator_has_set_is_told_to_the_next_front_end() -> None:
    plan, seats = served()
    orders = m.Orders(True, "error")
    plan.heard(seats["api-0"], orders, 2.0)
    plan.exited(seats["api-0"], -9, 3.0)
    plan.actions = [action for action in plan.actions if isinstance(action, Start)]
    api = started(plan)["api-0"]
    plan.heard(api, m.Beat(), 4.0)
    assert plan.actions[0] == Tell(api, orders) and isinstance(plan.actions[1].message, m.Up)


def replaced(plan: Supervision, seats: dict[str, int]) -> dict[str, int]:
    """Another model is asked for: who was there ends, and who begins."""
    plan.heard(seats["api-0"], m.Replace("other"), 5.0)
    assert plan.actions == [Tell(seats["engine"], m.Drain()), Tell(seats["api-0"], m.Drain())]
    plan.actions.clear()
    plan.exited(seats["engine"], 0, 6.0)
    engine = started(plan)
    plan.heard(engine["engine"], m.Ready(FACTS, "there"), 6.5)
    assert not plan.actions  # the front end that is about to end is not told of it
    plan.exited(seats["api-0"], 0, 7.0)
    return {**engine, **started(plan)}


def test_another_model_is_loaded_by_others() -> None:
    plan, seats = served()
    replaced(plan, seats)
    assert plan.model == "other" and plan._former is None


def started_with(plan: Supervision) -> list[tuple[str, str]]:
    """Who is started, with which model."""
    found = [(action.seat, action.model) for action in plan.actions if isinstance(action, Start)]
    plan.actions = [action for action in plan.actions if not isinstance(action, Start)]
    return found


@pytest.mark.parametrize("problem", [None, m.Failed("model", "other", "is too large"), m.Failed("", None, "broken")])
def test_a_model_that_cannot_be_loaded_gives_way_to_the_one_before(problem: m.Failed | None) -> None:
    plan, seats = served()
    plan.heard(seats["api-0"], m.Orders(False, "info"), 4.0)
    plan.heard(seats["api-0"], m.Replace("other"), 5.0)
    for seat in ("api-0", "engine"):
        plan.exited(seats[seat], 0, 6.0)
    assert sorted(started_with(plan)) == [("api-0", "other"), ("engine", "other")]
    api, engine = plan._apis[0].epoch, plan._engine.epoch
    plan.heard(api, m.Beat(), 6.0)
    plan.actions.clear()
    if problem is not None:
        plan.heard(engine, problem, 7.0)
    plan.exited(engine, 2, 7.0)
    said = [action.message for action in plan.actions if isinstance(action, Tell)]
    (told,) = [message for message in said if isinstance(message, m.Orders)]
    assert told.log_level == "info" and (problem.remedy if problem else "died") in told.problem
    assert started_with(plan) == [("engine", "")]
    plan.heard(plan._engine.epoch, m.Ready(FACTS, "there"), 8.0)
    plan.heard(api, m.Ready(), 8.0)
    assert plan.is_serving and plan.orders.problem


def test_no_model_is_replaced_while_somebody_is_away() -> None:
    plan, seats = served()
    plan.exited(seats["engine"], -9, 2.0)
    plan.actions.clear()
    plan.heard(seats["api-0"], m.Replace("other"), 3.0)
    (told,) = plan.actions
    assert isinstance(told, Tell) and "later" in told.message.problem and plan.model == ""


def test_a_drain_ends_the_front_ends_first_and_a_second_one_everybody() -> None:
    plan, seats = served()
    plan.drain(5.0)
    assert plan.actions == [Tell(seats["api-0"], m.Drain())]
    plan.exited(seats["engine"], -9, 6.0)  # what is open needs one to the end
    engine = started(plan)["engine"]
    plan.heard(engine, m.Ready(FACTS), 7.0)
    plan.actions.clear()
    plan.exited(seats["api-0"], 0, 8.0)
    assert plan.actions == [Tell(engine, m.Gone("api-0", seats["api-0"])), Tell(engine, m.Drain())]
    plan.exited(engine, 0, 9.0)
    assert plan.actions[-1] == End(0) and started(plan) == {}
    plan, seats = served()
    plan.drain(5.0)
    plan.tick(16.0)  # it does not come to its end
    assert Kill(seats["api-0"]) in plan.actions
    plan.drain(17.0)
    assert plan.actions[-1] == End(0) and Kill(seats["engine"]) in plan.actions


def test_bulk_stays_bulk_in_another_engine() -> None:
    side = ApiSide("api-0")
    side.submit(Request("line", (1, 2), ASKED, bulk=True), "", 0.0)
    for life in (1, 2):
        side.engine_up(life, 0.0)
        (asked,) = sent(side, m.Submit)
        assert asked.bulk and request_of(asked, 0.0, model="", namespace="", eos_token_ids=()).bulk
        drawn(side, asked.row, life, first=life - 1)
        side.engine_down()
        side.outbox.clear()
