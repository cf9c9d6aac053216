"""Who lives, who is dead, who is started again and when. No I/O: the clock and what was seen come in as arguments.

    down --(due)--> starting --Ready--> ready --(exit, silence)--> down, and due again after a pause
                        |                 |
                        +----- Drain -----+--> ends, and stays down

The order of a good end: the front ends finish what is open and end, then all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.serve.links.messages import (
    Drain,
    EngineFacts,
    Failed,
    Gone,
    Orders,
    Ready,
    Replace,
    ToChild,
    ToSupervisor,
    Up,
)

__all__ = ["ENGINE", "End", "Kill", "Rules", "Start", "Supervision", "Tell"]

ENGINE, DETOKENIZER, TOKENIZER, API = "engine", "detokenizer", "tokenizer", "api"
# who is told when somebody serves, and who is told of a death, by roles
_MEETS = {API: (ENGINE, DETOKENIZER, TOKENIZER), DETOKENIZER: (ENGINE,), TOKENIZER: (ENGINE,), ENGINE: ()}
_MOURNS = {**_MEETS, TOKENIZER: (), ENGINE: (API, DETOKENIZER)}


@dataclass(frozen=True)
class Rules:
    """Times in seconds."""

    silence: float = 30.0  # without a word from a process, after which it counts as dead
    first_word: float = 60.0  # the same for one that has not spoken yet
    first_pause: float = 0.1  # before a process is started for the third time in a row; the second time at once
    longest_pause: float = 5.0
    settled: float = 30.0  # a life that was ready for so long counts as a good one
    most_false_starts: int = 5  # lives in a row that never were ready
    drain: float = 10.0  # a front end is given this to end what is open, and the engine afterwards


@dataclass(frozen=True)
class Start:
    """Start a process for a seat."""

    seat: str
    epoch: int
    model: str = ""  # another one than the configured


@dataclass(frozen=True)
class Kill:
    """End a process at once."""

    epoch: int


@dataclass(frozen=True)
class Tell:
    """Send a message to a process."""

    epoch: int
    message: ToChild


@dataclass(frozen=True)
class End:
    """All is over."""

    code: int
    problem: Failed | None = None


Action = Start | Kill | Tell | End


@dataclass(eq=False)
class _Seat:
    name: str
    epoch: int = 0  # of who sits there; 0: nobody
    state: str = "down"  # starting, ready, draining
    heard: float | None = None  # when it last spoke; None: not yet
    began: float = 0.0  # the state
    due: float = 0.0  # when the next one is to be started
    failures: int = 0  # lives in a row that were not good
    false_starts: int = 0
    was_ready: bool = False  # in any life
    killed: bool = False  # the one who sits there
    problem: Failed | None = None
    facts: EngineFacts | None = None
    address: str = ""

    @property
    def role(self) -> str:
        """What is done there."""
        return self.name.split("-")[0]

    @property
    def hears(self) -> bool:
        """Whether somebody sits there who can be told something."""
        return bool(self.epoch) and self.heard is not None


@dataclass
class Supervision:
    """One engine, some front ends, and perhaps a detokenizer between them, and tokenizers.

    ``actions`` is for whoever does the I/O to carry out, in order, and clear.
    """

    apis: int
    rules: Rules = field(default_factory=Rules)
    detokenizers: int = 0
    tokenizers: int = 0

    def __post_init__(self) -> None:
        self.actions: list[Action] = []
        self._engine = _Seat(ENGINE)
        self._apis = [_Seat(f"{API}-{i}") for i in range(self.apis)]
        self._backs = [self._engine, *(_Seat(DETOKENIZER) for _ in range(self.detokenizers))]
        self._backs += [_Seat(f"{TOKENIZER}-{i}") for i in range(self.tokenizers)]
        self._epoch = 0
        self._draining = self._ended = False
        self.orders = Orders()  # of the operator
        self.model = ""  # that engines load; empty: the configured one
        self._former: str | None = None  # the one before, until it has been loaded

    @property
    def is_serving(self) -> bool:
        """Everybody is ready."""
        return all(seat.state == "ready" for seat in self._seats)

    @property
    def model_name(self) -> str:
        """Of the engine that serves or served last; empty before the first."""
        return "" if self._engine.facts is None else self._engine.facts.name

    @property
    def is_ending(self) -> bool:
        """It is coming to its end."""
        return self._draining or self._ended

    @property
    def _seats(self) -> Sequence[_Seat]:
        return (*self._backs, *self._apis)

    # -- what was seen

    def tick(self, now: float) -> None:
        """Time passes: start who is due, end who is silent or does not come to its end."""
        if self._ended:
            return
        for seat in self._seats:
            if seat.epoch and not seat.killed and self._is_lost(seat, now):
                self._kill(seat)
            elif not seat.epoch and now >= seat.due and self._is_wanted(seat):
                self._start(seat, now)
        if self._draining:
            self._go_on_draining(now)

    def overslept(self, now: float) -> None:
        """It was we who were away: what others said meanwhile is still to be heard."""
        for seat in self._seats:
            if seat.heard is not None:
                seat.heard = now

    def heard(self, epoch: int, message: ToSupervisor, now: float) -> None:
        """A process has spoken. The dead are not heard."""
        seat = next((seat for seat in self._seats if seat.epoch == epoch and epoch), None)
        if seat is None or seat.killed:
            return
        first, seat.heard = seat.heard is None, now
        if isinstance(message, Failed):
            seat.problem = message
        elif isinstance(message, Ready) and seat.state == "starting":
            self._ready(seat, message, now)
        elif isinstance(message, Orders):
            self.orders = Orders(message.draining, message.log_level, self.orders.problem)
        elif isinstance(message, Replace):
            self._replace(message.model, now)
        if first:
            self._tell_orders(seat)
            for other in self._seats:
                if other.state == "ready" and other is not seat:
                    self._introduce(other, seat)

    def exited(self, epoch: int, code: int, now: float) -> None:
        """A process has ended."""
        seat = next((seat for seat in self._seats if seat.epoch == epoch), None)
        if seat is None or self._ended:
            return
        state, began = seat.state, seat.began
        seat.epoch, seat.state, seat.heard, seat.began = 0, "down", None, now
        self._tell_of_death(seat, epoch)
        if not seat.was_ready and code > 0:  # it cannot be done: somebody has to mend something
            self._end(code, seat.problem)
            return
        good = state == "draining" or (state == "ready" and now - began >= self.rules.settled)
        seat.failures = 0 if good else seat.failures + 1
        seat.false_starts = seat.false_starts + 1 if state == "starting" else 0
        seat.due = now + self._pause(seat.failures)
        if seat is self._engine and state == "starting" and self._former is not None:
            self._go_back(now)
        if seat.false_starts >= self.rules.most_false_starts and not self._draining:
            self._end(1, seat.problem)
        self.tick(now)

    def drain(self, now: float) -> None:
        """Come to an end: the front ends finish what is open. Asked again: end at once."""
        if self._ended:
            return
        if self._draining:
            self._end(0, None)
            return
        self._draining = True
        for seat in self._apis:
            if seat.epoch and seat.heard is not None and seat.was_ready:
                seat.state, seat.began = "draining", now
                self.actions.append(Tell(seat.epoch, Drain()))
            elif seat.epoch:
                self._kill(seat)  # it has not let anybody in
        self._go_on_draining(now)

    # -- another model

    def _replace(self, model: str, now: float) -> None:
        """Everybody ends, and begins again with another model."""
        if self._draining or self._ended or not self.is_serving:
            self._tell_problem("the server is not up as a whole now; try again later")
            return
        self._former, self.model = self.model, model
        for seat in self._seats:
            seat.state, seat.began = "draining", now
            self.actions.append(Tell(seat.epoch, Drain()))

    def _go_back(self, now: float) -> None:
        """The model cannot be loaded: the former one is loaded again, and the operator is told."""
        engine, why = self._engine, self._engine.problem
        self.model, self._former = self._former or "", None
        engine.due, engine.false_starts, engine.failures, engine.problem = now, 0, 0, None
        self._tell_problem("the engine has died" if why is None else f"{why.field} {why.value}: {why.remedy}".strip())

    def _tell_problem(self, problem: str) -> None:
        self.orders = Orders(self.orders.draining, self.orders.log_level, problem[:4000])
        for api in self._apis:
            if api.hears:
                self._tell_orders(api)

    def _tell_orders(self, seat: _Seat) -> None:
        if seat.role == API and self.orders != Orders():
            self.actions.append(Tell(seat.epoch, self.orders))

    # -- inside

    def _is_wanted(self, seat: _Seat) -> bool:
        """Whether somebody is to sit there: while it drains, whoever serves the front ends that are left."""
        return not self._draining or (seat in self._backs and any(api.epoch for api in self._apis))

    def _is_lost(self, seat: _Seat, now: float) -> bool:
        if seat.state == "draining" and now - seat.began > self.rules.drain:
            return True
        if seat.heard is None:
            return now - seat.began > self.rules.first_word
        return now - seat.heard > self.rules.silence

    def _pause(self, failures: int) -> float:
        if failures < 2:
            return 0.0
        return min(self.rules.longest_pause, self.rules.first_pause * 2.0 ** min(failures - 2, 30))

    def _start(self, seat: _Seat, now: float) -> None:
        self._epoch += 1
        seat.epoch, seat.state, seat.began, seat.killed = self._epoch, "starting", now, False
        self.actions.append(Start(seat.name, seat.epoch, self.model))

    def _kill(self, seat: _Seat) -> None:
        seat.killed = True
        self.actions.append(Kill(seat.epoch))

    def _ready(self, seat: _Seat, message: Ready, now: float) -> None:
        seat.state, seat.began, seat.was_ready, seat.problem = "ready", now, True, None
        seat.facts, seat.address, seat.false_starts = message.facts, message.address, 0
        if seat is self._engine and self._former is not None:
            self._former, self.orders = None, Orders(self.orders.draining, self.orders.log_level)
        for other in self._seats:
            if other.hears and other is not seat:
                self._introduce(seat, other)

    def _introduce(self, seat: _Seat, other: _Seat) -> None:
        """Tell a process of one that serves, if it has to do with it."""
        leaves = other.state == "draining" and not self._draining  # its model is not this one
        if seat.role in _MEETS[other.role] and not leaves:
            self.actions.append(Tell(other.epoch, Up(seat.name, seat.epoch, seat.address, seat.facts)))

    def _tell_of_death(self, seat: _Seat, epoch: int) -> None:
        for other in self._seats:
            listens = other.state == "ready" if other is self._engine else other.hears
            if listens and seat.role in _MOURNS[other.role]:
                self.actions.append(Tell(other.epoch, Gone(seat.name, epoch)))

    def _go_on_draining(self, now: float) -> None:
        if any(seat.epoch for seat in self._apis) or self._ended:
            return
        if not any(seat.epoch for seat in self._backs):
            self._end(0, None)
        for seat in self._backs:
            if seat.state == "ready":
                seat.state, seat.began = "draining", now
                self.actions.append(Tell(seat.epoch, Drain()))
            elif seat.state == "starting" and not seat.killed:
                self._kill(seat)

    def _end(self, code: int, problem: Failed | None) -> None:
        for seat in self._seats:
            if seat.epoch and not seat.killed:
                self._kill(seat)
        self._ended = True
        self.actions.append(End(code, problem))
