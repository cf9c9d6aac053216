"""The engine's end of its links: what it runs, and for which front end. No I/O, no clock.

message of a front end -> hear -> the scheduler's inbox          events of a step -> take -> a `Step` for each front end

Where the text is made in a process of its own, what is drawn goes through that: it is told, in the bytes that they came
in, of the messages of front ends that say what a row is, and gets the steps of all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.errors import InvalidInput, shorten
from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.params import check_float
from octavo.core.request import FinishReason, Request
from octavo.serve.links.messages import (
    CHOICE_END,
    MAX_BYTES,
    MAX_ORPHANS,
    REQUEST_END,
    TOKEN,
    ApiHello,
    Cancel,
    Event,
    FromEngine,
    Join,
    Joined,
    Left,
    Link,
    Orphaned,
    Read,
    Refused,
    Shed,
    Step,
    Stop,
    Submit,
    ToEngine,
    pack_logprobs,
    relayed,
)

__all__ = ["Core", "EngineSide", "request_of"]

_KINDS = {EventKind.TOKEN: TOKEN, EventKind.CHOICE_END: CHOICE_END, EventKind.REQUEST_END: REQUEST_END}
_LINK: Link[FromEngine, ToEngine] = Link(ToEngine)
_MAX_TEXT = 4000  # characters of an error that is passed on
_ROOM = MAX_BYTES // 4  # bytes of events in one `Step`, beside the last of them
_EVENT = 64  # bytes of an event without logprobs, at most, as a rule
_ENTRY, _PAIR = 32, 15  # bytes at most of one token's logprobs, and of each alternative beside it


class Core(Protocol):
    """What is needed of the engine: `octavo.engine.core.EngineCore`."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises ``InvalidInput``."""

    def cancel(self, request_id: str, reason: FinishReason = ...) -> None:
        """End a request. Idempotent."""

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: str | int | None) -> None:
        """End a choice after so many tokens. Idempotent."""


@dataclass(eq=False)
class _Peer:
    """A front end that lives."""

    seat: str
    heard: float  # when it last spoke
    runs: dict[int, _Run] = field(default_factory=dict)  # by row of choice 0


@dataclass(eq=False)
class _Run:
    """A request that the engine has."""

    peer: int  # epoch
    row: int  # of choice 0
    request: Request


class EngineSide:
    """Requests of all front ends, by their epochs. ``outbox`` is for whoever does the I/O to send and clear.

    ``make`` builds the scheduler's request out of a `Submit`. ``note`` gets the messages that are for the timeline.
    ``apart``: there is a detokenizer, and without one nothing that is drawn is sent.
    """

    def __init__(
        self,
        core: Core,
        make: Callable[[Submit, float], Request],
        note: Callable[[Read | Shed, float], None] = lambda message, now: None,
        *,
        apart: bool = False,
    ) -> None:
        self.core = core
        self.outbox: list[tuple[int, FromEngine | list[bytes]]] = []  # (epoch of the receiver, message or relay)
        self.through: int | None = 0 if apart else None  # epoch of the detokenizer; 0: none now
        self._make, self._note = make, note
        self._peers: dict[int, _Peer] = {}  # by epoch
        self._dead: set[int] = set()  # epochs that are heard no more
        self._runs: dict[str, _Run] = {}  # by request id
        self._orphans: deque[tuple[str, str]] = deque(maxlen=MAX_ORPHANS)  # (tenant, id): they ended with a front end
        self.num_ended = 0  # requests that were followed to their end, whatever it was

    @property
    def peers(self) -> Sequence[int]:
        """Epochs of the front ends that live."""
        return tuple(self._peers)

    @property
    def num_runs(self) -> int:
        """Requests that are followed."""
        return len(self._runs)

    def parcels(self, own: int) -> Iterator[tuple[int, list[bytes]]]:
        """What is to be sent: the receiver's epoch, and frames; ``own``: the engine's. Empties the outbox."""
        outbox, self.outbox = self.outbox, []
        for epoch, message in outbox:
            frames = message if isinstance(message, list) else _LINK.pack(message, own, epoch)
            if self.through is None or not isinstance(message, (Step, list)):
                yield epoch, frames
            elif self.through:
                yield self.through, relayed(frames, own, self.through)

    def hear(self, sender: int, message: ToEngine, now: float) -> bool:
        """Take in what somebody says. The dead are not heard, nor whoever has not said who it is.

        True: it says what a row is, so the detokenizer has to know of it (`pass_on`).
        """
        if sender in self._dead:
            return False
        if isinstance(message, Join):
            self.through = sender
            self.outbox.append((sender, Joined()))
        if isinstance(message, ApiHello):
            self._seat(sender, message.seat, now)
        peer = self._peers.get(sender)
        if peer is None:
            return False
        peer.heard = now
        if isinstance(message, Submit):
            return self._submit(sender, peer, message, now)
        if isinstance(message, Cancel):
            return self._cancel(peer, message.row)
        if isinstance(message, Stop):
            self._stop(peer, message)
        elif isinstance(message, (Read, Shed)):
            self._note(message, now)
        return isinstance(message, ApiHello)

    def pass_on(self, frames: list[bytes]) -> None:
        """Have the detokenizer, if there is one, told of a message in the bytes that it came in."""
        if self.through:
            self.outbox.append((self.through, frames))

    def gone(self, epoch: int) -> None:
        """Somebody has died, and is never heard again: what a front end asked for is cancelled."""
        self._dead.add(epoch)
        self.through = 0 if self.through == epoch else self.through
        peer = self._peers.pop(epoch, None)
        if peer is not None:
            orphans = tuple((run.request.tenant, run.request.request_id) for run in peer.runs.values())[-MAX_ORPHANS:]
            self._orphans.extend(orphans)
            self.outbox += [(other, Orphaned(orphans)) for other in self._peers if orphans]
            self._cancel_all(peer)
            if self.through:
                self.outbox.append((self.through, Left(epoch)))

    def overslept(self, now: float) -> None:
        """It was we who were away: what others said meanwhile is still to be heard."""
        for peer in self._peers.values():
            peer.heard = now

    def end_silent(self, now: float, limit: float) -> None:
        """Whoever has said nothing for more than ``limit`` seconds counts as dead."""
        for epoch, peer in list(self._peers.items()):
            if now - peer.heard > limit:
                self.gone(epoch)

    def take(self, events: Iterable[TokenEvent]) -> None:
        """Put the events of a step into the outbox: one message for each front end that they concern."""
        drawn: dict[int, tuple[list[int], list[int], list[int]]] = {}
        if isinstance(events, StepEvents):
            self._add_drawn(events, drawn)
            events = events.others
        others: dict[int, list[Event]] = {}
        for event in events:
            run = self._runs.get(event.request_id)
            if run is not None:
                others.setdefault(run.peer, []).append(_packed(run, event))
                if event.kind is EventKind.REQUEST_END:
                    self._drop(run)
        for epoch in [*drawn, *(epoch for epoch in others if epoch not in drawn)]:
            rows, indices, tokens = drawn.get(epoch, ((), (), ()))
            first, *more = _in_parts(others.get(epoch, []))
            self.outbox.append((epoch, Step(tuple(rows), tuple(indices), tuple(tokens), first)))
            self.outbox += [(epoch, Step((), (), (), part)) for part in more]

    # -- inside

    def _add_drawn(self, events: StepEvents, drawn: dict[int, tuple[list[int], list[int], list[int]]]) -> None:
        for branch, index, token in zip(events.branches, events.indices, events.token_ids, strict=True):
            request_id, choice = branch.key
            run = self._runs.get(request_id)
            if run is None:
                continue
            columns = drawn.get(run.peer)
            if columns is None:
                columns = drawn[run.peer] = ([], [], [])
            columns[0].append(run.row + choice)
            columns[1].append(index)
            columns[2].append(token)

    def _seat(self, epoch: int, seat: str, now: float) -> None:
        for other, peer in list(self._peers.items()):
            if peer.seat == seat and other < epoch:
                self.gone(other)
        if epoch not in self._peers and self._orphans:
            self.outbox.append((epoch, Orphaned(tuple(self._orphans))))
        self._cancel_all(self._peers.setdefault(epoch, _Peer(seat, now)))

    def _submit(self, epoch: int, peer: _Peer, message: Submit, now: float) -> bool:
        if message.row in peer.runs:
            return False  # the message came twice
        try:
            request = self._make(message, now)
            _check_room(request)
            self.core.submit(request, now)
        except InvalidInput as error:
            value = error.value if isinstance(error.value, int | float | bool) else shorten(error.value)
            remedy = error.remedy[:_MAX_TEXT]
            self.outbox.append((epoch, Refused(message.row, error.field[:_MAX_TEXT], value, remedy)))
            return False
        peer.runs[message.row] = self._runs[request.request_id] = _Run(epoch, message.row, request)
        return True

    def _cancel(self, peer: _Peer, row: int) -> bool:
        run = peer.runs.get(row)
        if run is None:
            return False
        self._drop(run)
        self.core.cancel(run.request.request_id, FinishReason.CANCELLED)
        return True

    def _cancel_all(self, peer: _Peer) -> None:
        for run in list(peer.runs.values()):
            self._runs.pop(run.request.request_id, None)
            self.num_ended += 1
            self.core.cancel(run.request.request_id, FinishReason.CANCELLED)
        peer.runs.clear()

    def _stop(self, peer: _Peer, message: Stop) -> None:
        for run in peer.runs.values():
            choice = message.row - run.row
            if 0 <= choice < len(run.request.branches):
                self.core.stop(run.request.request_id, choice, message.num_tokens, message.reason)
                return

    def _drop(self, run: _Run) -> None:
        self.num_ended += 1
        self._runs.pop(run.request.request_id, None)
        self._peers[run.peer].runs.pop(run.row, None)


def request_of(message: Submit, now: float, *, model: str, namespace: str, eos_token_ids: Sequence[int]) -> Request:
    """The scheduler's request: new, or as far as it had come. Raises ``InvalidInput``."""
    request = Request(
        message.request_id,
        message.prompt,
        message.params,
        tenant=message.tenant,
        priority=message.priority,
        bulk=message.bulk,
        adapter=message.adapter,
        arrival=now - message.waited,
        model=model,
        namespace=namespace,
        eos_token_ids=eos_token_ids,
    )
    request.seed = message.seed
    if message.outputs or message.ended:
        _go_on(request, message)
    return request


def _go_on(request: Request, message: Submit) -> None:
    """Give the choices what is known of them; those that have ended stay so."""
    if not len(message.outputs) == len(message.ended) == len(request.branches):
        raise InvalidInput("outputs", f"{len(message.outputs)} lists", f"give one for each of {len(request.branches)}")
    for branch, outputs, ended in zip(request.branches, message.outputs, message.ended, strict=True):
        branch.token_ids.extend(outputs)
        branch.num_delivered_tokens = len(outputs)
        branch.prompt_logprobs_delivered = bool(outputs)
        if ended:
            branch.finish(FinishReason.STOP)
    if len(message.mu) not in (0, len(request.branches)):
        raise InvalidInput("mu", f"{len(message.mu)} numbers", f"give one for each of {len(request.branches)}, or none")
    for branch, mu in zip(request.branches, message.mu, strict=False):
        branch.mu = check_float("mu", mu, -1e18, 1e18)


def _check_room(request: Request) -> None:
    """Raises ``InvalidInput`` where the logprobs of one choice's prompt could fill a message."""
    params, tokens = request.params, len(request.prompt_token_ids)
    room = MAX_BYTES - _ROOM
    pairs = (params.prompt_logprobs or 0) + 1 + len(params.logprob_token_ids)
    if params.prompt_logprobs is not None and tokens * (_ENTRY + _PAIR * pairs) > room:
        remedy = f"ask for fewer alternatives: those of a prompt of {tokens} tokens take more than {room} bytes"
        raise InvalidInput("prompt_logprobs", params.prompt_logprobs, remedy)


def _in_parts(events: Sequence[Event]) -> list[tuple[Event, ...]]:
    """The events of a step in their order, as many together as a message holds; always one part, if an empty one."""
    parts: list[list[Event]] = [[]]
    taken = 0
    for event in events:
        if taken > _ROOM:
            parts.append([])
            taken = 0
        parts[-1].append(event)
        taken += _EVENT + len(event.hidden)
        for entry in (event.logprobs, *(event.prompt_logprobs or ())):
            taken += _ENTRY + (0 if entry is None else _PAIR * (len(entry[3]) + len(entry[4])))
    return [tuple(part) for part in parts]


def _packed(run: _Run, event: TokenEvent) -> Event:
    prompt = event.prompt_logprobs
    return Event(
        run.row + (0 if event.kind is EventKind.REQUEST_END else event.choice),
        _KINDS[event.kind],
        event.index,
        -1 if event.token_id is None else event.token_id,
        event.num_output_tokens,
        event.num_cached_tokens,
        None if event.finish_reason is None else str(getattr(event.finish_reason, "value", event.finish_reason)),
        event.stop_reason,
        None if event.error is None else event.error[:_MAX_TEXT],
        pack_logprobs(event.logprobs),
        None if prompt is None else tuple(pack_logprobs(entry) for entry in prompt),
        event.spent,
        event.hidden,
    )
