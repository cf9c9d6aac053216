"""Requests that are held back while their grammar is compiled: none is lost or doubled, and when it came is known."""

from __future__ import annotations

import threading
from typing import Any

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.serve.links.messages import ApiHello, Cancel, Submit
from octavo.serve.roles.held import HeldSubmits


class Grammars:
    """A compiler that waits to be let go on, and has room for so many."""

    def __init__(self, room: int = 9) -> None:
        self.room, self.num_opened = room, 0
        self.known: set[Grammar | None] = {None}
        self.go = threading.Semaphore(0)
        self.core: Any = self  # as well
        self.grammars = self

    def open(self) -> None:
        self.num_opened += 1

    def knows(self, params: SamplingParams) -> bool:
        return params.grammar in self.known

    def is_ready_for(self, params: SamplingParams) -> bool:
        return self.knows(params) and (params.grammar is None or self.room > 0)

    def compile(self, params: SamplingParams) -> None:
        assert self.go.acquire(timeout=10) and params.grammar is not None
        self.known.add(params.grammar)


def asked(row: int, pattern: str | None) -> Submit:
    params = SamplingParams(grammar=None if pattern is None else Grammar("regex", pattern))
    return Submit(row=row, request_id=f"r{row}", prompt=(1,), params=params, seed=0)


def settle(held: HeldSubmits) -> None:
    """All that the compiler was let do is done."""
    for one in list(held._held.values()):
        one.compiling.result(timeout=10)


def test_who_waits_for_a_grammar_comes_back_once_with_the_time_that_it_came() -> None:
    grammars = Grammars()
    held = HeldSubmits(grammars.core)
    assert not held.takes(1, asked(0, None), [b"plain"], 1.0) and not held
    assert held.takes(1, asked(1, "a"), [b"one"], 2.0) and held.takes(2, asked(1, "b"), [b"two"], 3.0)
    assert held.takes(1, asked(1, "a"), [b"again"], 4.0)  # a message that came twice
    assert held.takes(1, asked(2, "c"), [b"left"], 5.0) and held.takes(1, Cancel(row=2), [], 6.0)
    assert not held.takes(1, Cancel(row=9), [], 6.0)
    assert held and list(held.ready()) == []
    grammars.go.release(3)
    settle(held)
    assert list(held.ready()) == [[b"one"], [b"two"]] and held.since == {"r1": 3.0}
    assert not held.takes(1, asked(1, "a"), [b"one"], 7.0) and not held and list(held.ready()) == []


def test_what_a_front_end_that_is_gone_asked_for_does_not_come_back() -> None:
    grammars = Grammars()
    held = HeldSubmits(grammars.core)
    for sender, pattern in ((1, "a"), (2, "b"), (3, "c")):
        assert held.takes(sender, asked(sender, pattern), [b"%d" % sender], 1.0)
    held.gone(1)
    assert not held.takes(2, ApiHello(seat="api-0"), [], 2.0)
    grammars.go.release(3)
    settle(held)
    assert list(held.ready()) == [[b"3"]] and held.since == {"r3": 1.0}


def test_who_finds_no_room_waits_for_it_and_is_compiled_again_if_it_was_forgotten_meanwhile() -> None:
    grammars = Grammars(room=1)
    held = HeldSubmits(grammars.core)
    for row, pattern in ((1, "a"), (2, "b")):
        assert held.takes(1, asked(row, pattern), [b"%d" % row], 1.0)
    grammars.go.release(2)
    settle(held)
    for frames in held.ready():
        assert frames == [b"1"]
        grammars.room -= 1  # it has been taken in
    assert held and list(held.ready()) == []
    grammars.known.remove(asked(2, "b").params.grammar)
    assert list(held.ready()) == []
    grammars.room += 1
    grammars.go.release()
    settle(held)
    assert list(held.ready()) == [[b"2"]] and not held


def test_what_the_first_grammar_needs_is_read_once_and_before_it() -> None:
    grammars = Grammars()
    held = HeldSubmits(grammars.core)
    held.get_ready()
    held.get_ready()
    assert held.takes(1, asked(1, "a"), [b"one"], 1.0)
    grammars.go.release()
    settle(held)
    assert grammars.num_opened == 1
