"""The front end's end of the link to the engine: every request is held here until its last event is out.

    submit, cancel, stop -> outbox -> engine -> hear -> events, in order, each once
                                        X
                    engine_down, engine_up: what is open is submitted again, with the tokens that are known

All that decides a request's tokens (prompt, parameters, seed, tokens so far) is in its `Request`, so another engine
with the same numerics goes on with the tokens that the first one would have drawn. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.request import Branch, FinishReason, Request, RequestState
from octavo.serve.links.messages import (
    REQUEST_END,
    TOKEN,
    Adapters,
    ApiHello,
    Cancel,
    Event,
    FromEngine,
    LoadAdapter,
    Read,
    Refused,
    Stats,
    Step,
    Stop,
    Submit,
    ToEngine,
    unpack_logprobs,
)

__all__ = ["ApiSide"]

MAX_DEATHS = 3  # engines in a row that a request may see die without a token
SUSPECT_AFTER = 2  # after so many of any request, each waits until the one before it has shown that it can be run
MAX_SALT = 4096  # characters
_FATAL = "the engine died {} times in a row while it ran this request"
_ENDED_WELL = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})


@dataclass(eq=False)
class _Open:
    """A request that has not ended."""

    request: Request
    salt: str
    row: int = 0  # of its first choice, in the engine that has it; 0: none
    known: int = 0  # output tokens when it was asked for
    deaths: int = 0  # of engines in a row, without a token in between
    engine: int = 0  # that it was last asked of
    attempt: int = 0  # times that it was begun anew there: an engine remembers the names that it has run
    cached: int | None = None  # prompt tokens from the prefix cache, as first told


class ApiSide:
    """Requests of one front end. ``outbox`` is for whoever does the I/O to send to ``engine``, in order, and clear.

    ``hear``, ``engine_down`` and ``take`` return events, oldest first; each event is returned once.
    """

    def __init__(self, seat: str) -> None:
        self.seat = seat
        self.engine = 0  # epoch of the engine that serves; 0: none
        self.outbox: list[ToEngine] = []
        self.refusals: list[tuple[str, InvalidInput]] = []  # requests that ended so, for whoever tells their readers
        self.stats: dict[str, float] = {}
        self.num_resumed = 0
        self.adapters: tuple[tuple[str, str, str, int], ...] = ()  # as an engine told last: name, folder, digest, rank
        self._open: dict[str, _Open] = {}  # by request id, in order of arrival
        self._rows: dict[int, Branch] = {}  # that are followed
        self._asked: dict[int, _Open] = {}  # by row of choice 0
        self._next_row = 1
        self._found: list[TokenEvent] = []  # by ourselves, not yet taken
        self._lost: dict[int, _Open] = {}  # of which messages are missing, by row of choice 0
        self._suspects: deque[_Open] = deque()  # that wait to be tried, one after the other
        self._trial: _Open | None = None  # who is tried now
        self._now = 0.0  # when the engine was last heard

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # -- the front end asks

    def submit(self, request: Request, salt: str, now: float) -> None:
        """Have a request run, now or when there is an engine; its seed must be set. Raises ``InvalidInput``."""
        if request.request_id in self._open:
            raise InvalidInput("request_id", request.request_id, "a request with this id is still running")
        if len(salt) > MAX_SALT:
            raise InvalidInput("cache_salt", f"{len(salt)} characters", f"give at most {MAX_SALT}")
        entry = self._open[request.request_id] = _Open(request, salt)
        if self._trial is not None:
            self._suspects.append(entry)
        elif self.engine:
            self._ask(entry, now)

    def cancel(self, request_id: str) -> None:
        """Nobody wants a request any more: no event of it follows. Idempotent."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._close(entry)
            self._say(entry, Cancel(entry.row))

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: int | str | None) -> None:
        """A stop string was found: the choice ends here and now. Idempotent; without effect on one that has ended."""
        entry = self._open.get(request_id)
        if entry is None or not entry.request.branches[choice].is_live:
            return
        branch = entry.request.branches[choice]
        branch.truncate_at(num_output_tokens)
        self._say(entry, Stop(entry.row + choice, num_output_tokens, stop_reason))
        self._end_choice(entry, branch, FinishReason.STOP, stop_reason)
        if not entry.request.live_branches:
            self._close(entry)
            self._found.append(_told(branch, EventKind.REQUEST_END))

    def was_read(self, request_id: str) -> None:
        """The reader of a request has taken all of it."""
        if self.engine:
            self.outbox.append(Read(request_id))

    def choice_of(self, row: int) -> tuple[str, int] | None:
        """Request and choice that are followed under a row."""
        branch = self._rows.get(row)
        return None if branch is None else branch.key

    def take(self) -> Sequence[TokenEvent]:
        """Ends that `stop` came to."""
        found, self._found = self._found, []
        return found

    # -- the engine speaks, or falls silent

    def engine_up(self, epoch: int, now: float) -> Sequence[TokenEvent]:
        """An engine serves: everything that is open goes to it, first come first."""
        events = self.engine_down()
        self.engine, self._now = epoch, now
        self.outbox.append(ApiHello(self.seat))
        self.outbox += [LoadAdapter(0, name, path, digest) for name, path, digest, _ in self.adapters]
        if any(entry.deaths >= SUSPECT_AFTER for entry in self._open.values()):
            self._suspects.extend(self._open.values())
            self._try_next_suspect()
        else:
            for entry in self._open.values():
                self._ask(entry, now)
        return events

    def engine_down(self) -> Sequence[TokenEvent]:
        """The engine has died. What saw too many die, without a token in between, is the cause: it is given up.

        Who runs beside it sees as many die, so when two are dead each is tried alone, before the next one comes.
        """
        self.engine, self._trial = 0, None
        self._suspects.clear()
        self.outbox.clear()
        self._rows.clear()
        self._asked.clear()
        self._lost.clear()
        for entry in list(self._open.values()):
            if entry.row:
                entry.deaths = entry.deaths + 1 if _num_tokens(entry) == entry.known else 1
                entry.row = 0
            if entry.deaths >= MAX_DEATHS:
                self._give_up(entry)
        return self.take()

    def hear(self, sender: int, message: FromEngine, now: float) -> Sequence[TokenEvent]:
        """Take a message in. What another engine says than the one that serves is dropped."""
        if sender != self.engine:
            return ()
        self._now = now
        if isinstance(message, Step):
            return self._step(message, now)
        if isinstance(message, Stats):
            self.stats = message.values
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Adapters):
            self.adapters = message.served
        return ()

    # -- inside

    def _say(self, entry: _Open, message: ToEngine) -> None:
        """Tell the engine that has a request, if one has it."""
        if entry.row:
            self.outbox.append(message)

    def _ask(self, entry: _Open, now: float) -> None:
        """Send a request to the engine, under rows of its own."""
        request, branches = entry.request, entry.request.branches
        entry.attempt = entry.attempt + 1 if entry.engine == self.engine else 0
        entry.engine = self.engine
        entry.row, entry.known = self._next_row, _num_tokens(entry)
        self._next_row += len(branches)
        self._asked[entry.row] = entry
        for branch in request.live_branches:
            self._rows[entry.row + branch.choice] = branch
        begun = entry.known > 0 or len(request.live_branches) < len(branches)
        begun = begun and not request.gang  # which tells nothing before its end: it runs again from its start
        self.num_resumed += begun
        self.outbox.append(
            Submit(
                entry.row,
                request.request_id + (f"~{entry.attempt}" if entry.attempt else ""),
                request.prompt_token_ids,
                request.params,
                request.seed or 0,
                tenant=request.tenant,
                salt=entry.salt,
                priority=request.priority,
                waited=max(0.0, now - request.arrival),
                outputs=tuple(tuple(branch.output_token_ids) for branch in branches) if begun else (),
                ended=tuple(not branch.is_live for branch in branches) if begun else (),
                bulk=request.bulk,
                adapter=request.adapter,
                mu=tuple(branch.mu for branch in branches) if begun and request.params.mirostat else (),
            )
        )

    def _try_next_suspect(self) -> None:
        """Have one more run, if the one before has shown that it can be run."""
        while self.engine and self._trial is None and self._suspects:
            entry = self._suspects.popleft()
            if self._open.get(entry.request.request_id) is entry:
                self._trial = entry
                self._ask(entry, self._now)

    def _acquit(self, entry: _Open) -> None:
        if entry is self._trial:
            self._trial = None
            self._try_next_suspect()

    def _close(self, entry: _Open) -> None:
        self._open.pop(entry.request.request_id, None)
        self._unfollow(entry)
        self._acquit(entry)

    def _unfollow(self, entry: _Open) -> None:
        self._asked.pop(entry.row, None)
        self._lost.pop(entry.row, None)
        for branch in entry.request.branches:
            self._rows.pop(entry.row + branch.choice, None)

    def _end_choice(
        self,
        entry: _Open,
        branch: Branch,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: str | None = None,
    ) -> None:
        self._rows.pop(entry.row + branch.choice, None)
        _end(branch, reason, stop_reason, error)
        self._found.append(_told(branch, EventKind.CHOICE_END, error=error))

    def _give_up(self, entry: _Open) -> None:
        live = entry.request.live_branches
        for branch in live:
            self._end_choice(entry, branch, FinishReason.ERROR, None, _FATAL.format(entry.deaths))
        self._close(entry)
        self._found.append(_told(live[0], EventKind.REQUEST_END))

    def _refuse(self, refusal: Refused) -> None:
        entry = self._asked.get(refusal.row)
        if entry is not None:
            self._close(entry)
            error = InvalidInput(refusal.field, refusal.value, refusal.remedy)
            self.refusals.append((entry.request.request_id, error))

    def _step(self, step: Step, now: float) -> Sequence[TokenEvent]:
        branches: list[Branch] = []
        indices: list[int] = []
        tokens: list[int] = []
        for row, index, token in zip(step.rows, step.indices, step.tokens, strict=True):
            branch = self._rows.get(row)
            if branch is not None and self._fits(branch, index):
                branch.token_ids.append(token)
                branches.append(branch)
                indices.append(index)
                tokens.append(token)
        others = list(self._others(step.events))
        for entry in list(self._lost.values()):
            self._ask_again(entry, now)
        if self._trial is not None and _num_tokens(self._trial) > self._trial.known:
            self._acquit(self._trial)
        return StepEvents(branches, indices, tokens, others) if branches else others

    def _fits(self, branch: Branch, index: int) -> bool:
        """Whether a token is the next one. It may have been told before; one that lies further on tells of a loss."""
        known = len(branch.token_ids) - branch.num_prompt_tokens
        if index > known:
            self._note_loss(branch)
        return index == known

    def _note_loss(self, branch: Branch) -> None:
        entry = self._open[branch.key[0]]
        self._lost[entry.row] = entry

    def _ask_again(self, entry: _Open, now: float) -> None:
        """Messages were lost: the engine begins anew behind what is known."""
        self._say(entry, Cancel(entry.row))
        self._unfollow(entry)
        self._ask(entry, now)

    def _others(self, events: Iterable[Event]) -> Iterable[TokenEvent]:
        for event in events:
            if event.kind == REQUEST_END:
                entry = self._asked.get(event.row)
                if entry is not None and not entry.request.live_branches:
                    self._close(entry)
                    yield _told(entry.request.branches[0], EventKind.REQUEST_END, spent=event.spent)
                elif entry is not None:
                    self._lost[entry.row] = entry
                continue
            branch = self._rows.get(event.row)
            if branch is not None:
                found = self._token(branch, event) if event.kind == TOKEN else self._choice_end(branch, event)
                if found is not None:
                    yield found

    def _token(self, branch: Branch, event: Event) -> TokenEvent | None:
        if not self._fits(branch, event.index):
            return None
        branch.token_ids.append(event.token)
        logprobs = None if event.logprobs is None else TokenLogprobs(*event.logprobs)
        if logprobs is not None:
            branch.surprised_by(logprobs.logprob)
        more = {"index": event.index, "token_id": event.token, "logprobs": logprobs, "spent": event.spent}
        return self._completed(branch, event, EventKind.TOKEN, more)

    def _choice_end(self, branch: Branch, event: Event) -> TokenEvent | None:
        if event.num_output_tokens > branch.num_output_tokens:
            self._note_loss(branch)
            return None
        self._rows.pop(event.row)
        _end(branch, FinishReason(event.finish_reason or "unknown"), event.stop_reason, event.error)
        return self._completed(branch, event, EventKind.CHOICE_END, {"error": event.error, "hidden": event.hidden})

    def _completed(self, branch: Branch, event: Event, kind: EventKind, more: dict[str, Any]) -> TokenEvent:
        """The event with what is told once for a request, by whichever engine tells it first."""
        entry = self._open[branch.key[0]]
        if entry.cached is None:
            entry.cached = event.num_cached_tokens
        told = _told(branch, kind, **more)
        told.num_cached_tokens = entry.cached
        if event.prompt_logprobs is not None and not branch.prompt_logprobs_delivered:
            branch.prompt_logprobs_delivered = True
            told.prompt_logprobs = unpack_logprobs(event.prompt_logprobs)
        return told


def _num_tokens(entry: _Open) -> int:
    return sum(branch.num_output_tokens for branch in entry.request.branches)


def _end(branch: Branch, reason: FinishReason, stop_reason: int | str | None, error: str | None) -> None:
    if reason in _ENDED_WELL:
        branch.finish(reason, stop_reason)
    else:
        branch.abandon(RequestState.FAILED if error else RequestState.CANCELLED, reason, error)


def _told(branch: Branch, kind: EventKind, **more: Any) -> TokenEvent:
    """An event of a choice, as the front end knows it."""
    reason = branch.finish_reason
    return TokenEvent(
        branch.key[0],
        kind,
        branch.choice,
        finish_reason=None if reason is None else reason.value,
        stop_reason=branch.stop_reason,
        num_prompt_tokens=branch.num_prompt_tokens,
        num_output_tokens=branch.num_output_tokens,
        **more,
    )
