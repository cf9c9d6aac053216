"""The supervisor: starts the processes of a layout, watches them, starts again who has died, and ends them in order.

It holds the listening socket, so that a front end that dies takes no port with it; it knows no model and no request.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import zmq

from octavo.core.errors import InvalidInput, OctavoError
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig
from octavo.serve.links.messages import Link, ProtocolError, Question, ToChild, ToSupervisor
from octavo.serve.links.supervision import API, ENGINE, End, Kill, Rules, Start, Supervision, Tell
from octavo.serve.notify import READY, STOPPING, notify
from octavo.serve.roles.child import Settings
from octavo.serve.roles.sockets import (
    CONTROL,
    Place,
    epoch_of,
    identity_of,
    is_main_voice,
    private_place,
    receive,
    send,
)
from octavo.serve.signals import ending_signals
from octavo.serve.words import complain

if TYPE_CHECKING:
    from octavo.serve.roles.gate import KeptRegister

__all__ = ["serve_apart"]

_LOOK_MS = 500  # between looks at the clock; half of a sign of life
_LOOK_SOON_MS = 20  # while somebody is away
# a program of one line, so that the folder it is started in is no place to import from
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from octavo.serve.roles.child import main; main(sys.argv[1])"


def serve_apart(
    engine: EngineConfig, config: ServeConfig, listener: socket.socket, url: str, say: Callable[[str], None]
) -> None:
    """Serve with the processes of the layout until SIGINT or SIGTERM.

    Raises ``InvalidInput`` for a model that cannot run, and ``SystemExit`` if the processes do not stay alive.
    """
    with private_place(config.link_address) as place, _wakeup() as wakeup:
        supervisor = _Supervisor(_Shop(engine, config, listener, place), wakeup)

        def serving() -> None:
            name = config.served_model_name or supervisor.plan.model_name
            say(f"Octavo serves {name} at {url} (Ctrl-C stops it)")
            notify(READY)

        supervisor.on_serving = serving
        supervisor.run()
    say("stopped")


@dataclass(frozen=True)
class _Shop:
    """What the processes are given."""

    engine: EngineConfig
    config: ServeConfig
    listener: socket.socket
    place: Place

    def start(self, seat: str, epoch: int, model: str, control: str) -> subprocess.Popen[bytes]:
        """Start a process for a seat; its standard input ends when this process does."""
        takes_clients = seat.startswith(API)
        descriptor = self.listener.fileno() if takes_clients else -1
        engine = replace(self.engine, model=model) if model else self.engine
        config = self.config  # what is for all front ends together is divided, if nobody counts it for all
        if takes_clients:
            config = replace(config, max_connections=max(1, config.max_connections // config.apis))
        settings = Settings(seat, epoch, str(self.place.folder), control, engine, config, descriptor)
        site = ["-S"] if sys.flags.no_site else []
        process = subprocess.Popen(
            [sys.executable, *site, "-c", _PROGRAM, f"octavo-{seat}", *map(os.path.abspath, sys.path)],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor] if takes_clients else [],
            start_new_session=True,  # Ctrl-C is for the supervisor
        )
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it has died already, which is seen soon
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()
        return process


class _Supervisor:
    def __init__(self, shop: _Shop, wakeup: socket.socket) -> None:
        self.shop, self._wakeup = shop, wakeup
        rules = Rules(silence=shop.config.silence_timeout, drain=shop.config.shutdown_timeout + 5.0)
        full = shop.config.resolved_layout == "full"
        self.plan = Supervision(
            shop.config.apis, rules=rules, detokenizers=int(full), tokenizers=full * shop.config.tokenizers
        )
        self.link: Link[ToChild, ToSupervisor] = Link(ToSupervisor)
        self.on_serving: Callable[[], None] = lambda: None
        self._said = False  # that it serves
        self._looked = time.monotonic()  # who lives
        self._register = _kept_register(shop.config) if full else None
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by epoch
        self._seats: dict[int, str] = {}  # of these
        self._known: set[int] = set()  # epochs that an answer reaches
        self._address = ""  # where they reach us
        self._end: End | None = None

    def run(self) -> None:
        """Until all has come to its end."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control, self._address = self.shop.place.bound(context, CONTROL)
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        try:
            while self._end is None:
                self._turn(poller)
        finally:
            self._kill_all()
            context.destroy(linger=0)
        problem = self._end.problem
        if problem is not None and problem.field:
            raise InvalidInput(problem.field, problem.value, problem.remedy)
        if problem is not None:
            raise OctavoError(problem.remedy)
        if self._end.code:
            raise SystemExit(self._end.code)

    def _turn(self, poller: zmq.Poller) -> None:
        self._listen()
        now = time.monotonic()
        if now - self._looked > max(2e-3 * _LOOK_MS, self.plan.rules.silence / 3):
            self.plan.overslept(now)
        self._looked = now
        self.plan.tick(now)
        self._act()
        if self._end is None:
            poller.poll(_LOOK_MS if self.plan.is_serving else _LOOK_SOON_MS)
        self._hear_signals()
        self._bury()
        self._act()

    def _act(self) -> None:
        while self.plan.actions:
            action = self.plan.actions.pop(0)
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Kill):
                self._kill(action.epoch)
            elif isinstance(action, Tell):
                self._tell(action)
            else:
                self._end = action
        if self.plan.is_serving and not self._said:
            self._said = True
            self.on_serving()

    def _start(self, action: Start) -> None:
        try:
            self._children[action.epoch] = self.shop.start(action.seat, action.epoch, action.model, self._address)
        except OSError as error:  # no memory, no more processes: what there is later
            complain(f"{action.seat} cannot be started: {error.strerror or error}")
            self.plan.exited(action.epoch, 1, time.monotonic())
        else:
            self._seats[action.epoch] = action.seat

    def _tell(self, action: Tell) -> None:
        frames = [identity_of(action.epoch), *self.link.pack(action.message, 0, action.epoch)]
        try:
            send(self._control, frames)
        except zmq.ZMQError:  # it has just died: its end is seen next
            self._known.discard(action.epoch)

    def _kill(self, epoch: int) -> None:
        child = self._children.get(epoch)
        if child is not None:
            child.kill()

    def _listen(self) -> None:
        while (frames := receive(self._control)) is not None:
            epoch = epoch_of(frames[0])
            if is_main_voice(frames[0]):
                self._known.add(epoch)
            self._hear(epoch, frames[1:])

    def _hear(self, epoch: int, frames: Sequence[bytes]) -> None:
        try:
            found = self.link.unpack(frames, 0)
        except ProtocolError as error:
            complain(f"process {epoch}: {error}")
            self._kill(epoch)
            return
        if found is None or found[0] != epoch or epoch not in self._known:
            return
        if isinstance(found[1], Question):
            self._ask_register(epoch, found[1])
        else:
            self.plan.heard(epoch, found[1], time.monotonic())

    def _ask_register(self, epoch: int, question: Question) -> None:
        """A front end's question; of the dead none is heard."""
        if self._register is None or epoch not in self._children:
            return
        try:
            answer = self._register.answer(epoch, question)
        except ProtocolError as error:
            complain(f"process {epoch}: {error}")
            self._kill(epoch)
            return
        if answer is not None:
            self._tell(Tell(epoch, answer))

    def _hear_signals(self) -> None:
        try:
            numbers = self._wakeup.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in ending_signals():
                notify(STOPPING)
                self.plan.drain(time.monotonic())

    def _bury(self) -> None:
        for epoch, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                self._listen()  # its last words
                del self._children[epoch]
                _close(child)
                seat = self._seats.pop(epoch)
                (self.shop.place.folder / f"{seat}-{epoch}").unlink(missing_ok=True)  # the socket that it listened on
                expected = self.plan.is_ending
                if expected and seat != ENGINE:
                    self.shop.listener.close()  # nobody will answer: say so
                if self._register is not None:
                    self._register.register.gone(epoch)
                self.plan.exited(epoch, code, time.monotonic())
                if not expected and not self._has_reason():
                    complain(f"{seat} has ended with {code}")

    def _has_reason(self) -> bool:
        """Whether all ends with a reason that will be said instead."""
        return any(isinstance(action, End) and action.problem for action in self.plan.actions)

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
            _close(child)


def _kept_register(config: ServeConfig) -> KeptRegister:
    """What it takes is imported where there is one."""
    from octavo.serve.roles.gate import KeptRegister

    return KeptRegister(config.limits())


def _close(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        child.stdin.close()


@contextmanager
def _wakeup() -> Iterator[socket.socket]:
    """A socket that gets the number of each signal as it comes: those that end a server, and that a child has ended."""
    numbers = (*ending_signals(), signal.SIGCHLD)
    ears, mouth = socket.socketpair()
    ears.setblocking(False)
    mouth.setblocking(False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    old = signal.set_wakeup_fd(mouth.fileno())
    try:
        yield ears
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        ears.close()
        mouth.close()
