"""From events to lives: each step with its beginning and end, each request with what its time went into.

A request's time is cut where its state changes and charged, piece by piece, to one cause: so the causes add up to the
time from its arrival to its end, whatever they are. Of a request with several choices the furthest one decides.

    arrival |arriving| submit |queued, pages, prefix| admit |prefill, decode, held| last step |detokenize| text |client|
                              |<---- preempted -----|<-- preempt

Works on what `Timeline` or a recording gives. Where nobody measured a step, it lasts from its plan to its commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CAUSES", "History", "Life", "Span", "StepView", "history_of"]

CAUSES = {
    "grammar": "its grammar was compiled, or what it allows next was not known yet",
    "arriving": "it came while a step was running and had to wait for its end",
    "queued": "others were served: all slots taken, no tokens left in the step, or behind one that waits for pages",
    "pages": "first in the queue, without pages",
    "prefix": "another request was computing the beginning of its prompt",
    "prefill": "steps that computed its prompt",
    "decode": "steps that drew its tokens",
    "held": "it had a slot and was left out of the step",
    "preempted": "it lost its pages and waited to come back",
    "recompute": "steps that computed again what it had lost",
    "failed": "steps that it was in and that were taken back",
    "detokenize": "its tokens became text and went to its reader",
    "between": "the engine was between two steps",
    "client": "all was done, and the client had not taken it yet",
}
_WAITING = {"kv": "pages", "prefix": "prefix", "grammar": "grammar"}
_OF_CHOICES = ("wait", "admit", "preempt", "finish", "cancel")
_RANK = {"decode": 3, "recompute": 2, "prefill": 1}  # of causes in one step


@dataclass
class Span:
    """A stretch of a request's life, from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    cause: str


@dataclass
class StepView:
    """One step as recorded. ``end`` is when its tokens were known to all."""

    number: int
    start: float
    end: float
    names: list[str]  # requests of the rows, plain decodes first
    shares: list[int]  # tokens of each row
    reasons: list[str]  # of the rows after the plain decodes
    waiting: int
    running: int
    free: int
    model: float = 0.0  # seconds of it
    tokens: list[int | None] = field(default_factory=list)  # the first of each row
    more: dict[int, int] = field(default_factory=dict)  # by row: how many it came to besides
    failed: str = ""  # the error that it was taken back for

    def drafts(self, row: int) -> int:
        """Guesses among the tokens of a row: a decode has one token besides."""
        place = row - len(self.names) + len(self.reasons)
        return self.shares[row] - 1 if place >= 0 and self.reasons[place].startswith("decode") else 0


@dataclass
class Life:
    """One request."""

    request: str
    arrival: float
    prompt: int
    tenant: str = ""
    end: float | None = None  # None: still alive
    reason: str = ""
    error: str = ""
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0
    cached: int = 0  # tokens of the prompt, when it was first admitted
    chunks: int = 0
    steps: int = 0  # that decoded
    outputs: int = 0  # tokens, all choices
    drafted: int = 0  # tokens guessed ahead and verified
    accepted: int = 0  # of them, those that were drawn
    drafts_off: str = ""  # why guessing ended before it did, if that failed
    gang: bool = False  # its moves say how many tokens there are, not its rows
    sums: dict[str, float] = field(default_factory=dict)  # seconds by cause
    spans: list[Span] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)  # requests whose prefix it waited for
    preempted_by: list[str] = field(default_factory=list)
    at: float = 0.0  # charged up to here

    @property
    def wall(self) -> float:
        """Seconds from arrival to the end, or to the last that is known."""
        return (self.at if self.end is None else self.end) - self.arrival

    def charge(self, until: float, cause: str, drawn: str | None = None) -> None:
        """Put the time up to ``until`` on a cause; ``drawn``: as part of another's span."""
        if until <= self.at:
            return
        self.sums[cause] = self.sums.get(cause, 0.0) + until - self.at
        drawn = drawn or cause
        if self.spans and self.spans[-1].cause == drawn:
            self.spans[-1].end = until
        else:
            self.spans.append(Span(self.at, until, drawn))
        self.at = until


@dataclass
class History:
    """All steps, in order, and all requests, by arrival in the queue."""

    steps: list[StepView] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    refused: list[Mapping[str, Any]] = field(default_factory=list)


def history_of(events: Iterable[Mapping[str, Any]]) -> History:
    """The history that the events of one epoch tell."""
    teller = _Teller()
    for event in events:
        teller.tell(event)
    teller.close_step()
    return teller.history


@dataclass
class _Choices:
    """Where the choices of a request stand: None, running; else the cause for which it waits."""

    life: Life
    states: dict[int, str | None]

    @property
    def waiting(self) -> str | None:
        """The cause for which all of it waits; None while a choice runs."""
        causes = list(self.states.values())
        return None if not causes or None in causes else causes[0]


class _Teller:
    """Goes through events and charges time."""

    def __init__(self) -> None:
        self.history = History()
        self._live: dict[str, _Choices] = {}
        self._drafts_off = ""
        self._compiled: dict[str, tuple[float, float]] = {}  # of requests to come: when it was, and its seconds
        self._running: dict[str, Life] = {}
        self._open: StepView | None = None
        self._ahead: dict[int, Mapping[str, Any]] = {}  # steps planned behind it, by number
        self._ended_in_step: list[Life] = []
        self._last: StepView | None = None  # closed, and its
        self._text = 0.0  # seconds until its tokens were text

    def tell(self, event: Mapping[str, Any]) -> None:
        """Take one event; one of a request whose beginning is not known is passed over."""
        action = getattr(self, f"_on_{event['kind']}", None)
        if action is not None and (event["kind"] not in _OF_CHOICES or event["request"] in self._live):
            action(event)

    # ---- requests

    def _on_submit(self, event: Mapping[str, Any]) -> None:
        arrival = min(event["arrival"] or event["t"], event["t"])
        life = Life(event["request"], arrival, event["prompt"], event["tenant"] or "", at=arrival)
        life.drafts_off = self._drafts_off
        compiled, seconds = self._compiled.pop(event["request"], (arrival, 0.0))
        life.charge(min(compiled - seconds, event["t"]), "arriving")
        life.charge(min(compiled, event["t"]), "grammar")
        life.charge(event["t"], "arriving")
        self.history.lives[event["request"]] = life
        self._live[event["request"]] = _Choices(life, dict.fromkeys(range(event["choices"]), "queued"))

    def _on_compiled(self, event: Mapping[str, Any]) -> None:
        self._compiled[event["request"]] = event["t"], event["seconds"]

    def _on_drafts_off(self, event: Mapping[str, Any]) -> None:
        self._drafts_off = event["reason"]
        for choices in self._live.values():
            choices.life.drafts_off = self._drafts_off

    def _on_wait(self, event: Mapping[str, Any]) -> None:
        choices = self._live[event["request"]]
        state = choices.states.get(event["choice"])
        if event["on"] is not None:
            choices.life.awaited.append(event["on"])
        if state is not None and state != "preempted":
            self._turn(choices, event["choice"], _WAITING.get(event["why"], "queued"), event["t"])

    def _on_admit(self, event: Mapping[str, Any]) -> None:
        choices = self._live[event["request"]]
        if event["times"] == 1:
            choices.life.cached = max(choices.life.cached, event["cached"])
        self._turn(choices, event["choice"], None, event["t"])

    def _on_preempt(self, event: Mapping[str, Any]) -> None:
        self._close_done()
        choices = self._live[event["request"]]
        if event["by"] is not None:
            choices.life.preempted_by.append(event["by"])
        self._turn(choices, event["choice"], "preempted", event["t"])

    def _close_done(self) -> None:
        """What comes now comes after the step, which nobody measured: all that ran in it has its tokens."""
        if self._open is not None and (self._open.tokens or self._open.failed):
            self.close_step()

    def _turn(self, choices: _Choices, choice: int, state: str | None, now: float) -> None:
        """A choice takes another state."""
        self._settle(choices, now)
        choices.states[choice] = state
        if choices.waiting is None and choices.states:
            self._running[choices.life.request] = choices.life
        else:
            self._running.pop(choices.life.request, None)

    def _settle(self, choices: _Choices, now: float) -> None:
        """Charge the time up to ``now`` to the state that the request is in."""
        cause = choices.waiting
        if cause is not None:
            choices.life.charge(now, cause)
        else:
            self._pause(choices.life, now)

    def _pause(self, life: Life, now: float) -> None:
        """The time between two steps of a request that runs; in its span, part of what it was doing."""
        drawn = life.spans[-1].cause if life.spans else None
        if self._last is not None and life.at == self._last.end:
            life.charge(min(now, self._last.end + self._text), "detokenize", drawn)
        life.charge(now, "between", drawn)

    def _on_finish(self, event: Mapping[str, Any]) -> None:
        choices = self._live[event["request"]]
        life = choices.life
        runs_on = self._open is not None and choices.waiting is None  # its time ends with the step's
        if not runs_on:
            self._settle(choices, event["t"])
        choices.states.pop(event["choice"], None)
        if choices.states:
            return
        life.reason, life.error = event["finish_reason"] or "", event["error"] or ""
        del self._live[life.request]
        if runs_on:
            self._ended_in_step.append(life)
        else:
            self._running.pop(life.request, None)
            life.end = max(event["t"], life.at)

    def _on_cancel(self, event: Mapping[str, Any]) -> None:
        self._close_done()
        self._on_finish(event)

    def _on_refuse(self, event: Mapping[str, Any]) -> None:
        self.history.refused.append(event)

    def _on_read(self, event: Mapping[str, Any]) -> None:
        life = self.history.lives.get(event["request"])
        if life is not None and life.end is not None:
            life.charge(event["t"], "client")
            life.end = max(life.end, life.at)

    # ---- steps

    def _on_decision(self, event: Mapping[str, Any]) -> None:
        self.close_step()
        self._ahead.clear()
        if event["decodes"] or event["rows"]:
            self._open_step(event, event["t"])

    def _on_ahead(self, event: Mapping[str, Any]) -> None:
        self._ahead[event["step"]] = {**event, "rows": [], "waiting": 0, "running": len(event["decodes"])}

    def _open_step(self, event: Mapping[str, Any], now: float) -> None:
        for name in self._running:
            if name in self._live:
                self._settle(self._live[name], now)
        self._open = StepView(
            event["step"],
            now,
            now,
            [name for name, _ in event["decodes"]] + [row[0] for row in event["rows"]],
            [1] * len(event["decodes"]) + [row[2] for row in event["rows"]],
            [row[3] for row in event["rows"]],
            event["waiting"],
            event["running"],
            event["free"],
        )
        self.history.steps.append(self._open)

    def _reach(self, event: Mapping[str, Any]) -> None:
        """The results of a step that was planned ahead open it: it has run since the one before it ended."""
        ahead = self._ahead.pop(event["step"], None)
        if ahead is not None:
            self.close_step()
            self._open_step(ahead, event["t"])

    def _on_tokens(self, event: Mapping[str, Any]) -> None:
        self._reach(event)
        if self._open is not None:
            self._open.end, self._open.tokens = event["t"], event["tokens"]
            self._open.more = {at: len(rest) for at, rest in event.get("more") or ()}

    def _on_gang(self, event: Mapping[str, Any]) -> None:
        """All members have a token more, whoever drew; or they say in all what `endings` has."""
        if event["request"] in self._live:
            life = self._live[event["request"]].life
            said = sum(len(tokens) for tokens, *_ in event["endings"] or ())
            life.gang, life.outputs = True, said or life.outputs + len(event["tokens"])

    def _on_rollback(self, event: Mapping[str, Any]) -> None:
        self._reach(event)
        if self._open is not None:
            self._open.end, self._open.failed = event["t"], event["error"]

    def _on_measured(self, event: Mapping[str, Any]) -> None:
        if self._open is not None:
            spent = event["plan"] + event["prepare"] + event["model"] + event["commit"]
            self._open.end, self._open.model = self._open.start + 1e-6 * spent, 1e-6 * event["model"]
            self.close_step()

    def _on_delivered(self, event: Mapping[str, Any]) -> None:
        if self._last is None:
            return
        self._text = 1e-6 * event["spent"]
        for life in self._ended_in_step:
            life.charge(self._last.end + self._text, "detokenize")
            life.end = life.at
        self._ended_in_step = []

    def close_step(self) -> None:
        """The step is over: charge it to all that ran, and end those that ended in it."""
        step, self._open = self._open, None
        if step is None:
            return
        causes = _causes(step)
        for name, life in self._running.items():
            self._count(life, step, causes.get(name, "held"))
        self._draw(step)
        for life in self._ended_in_step:
            life.end = life.at
            self._running.pop(life.request, None)
        self._last, self._text = step, 0.0

    def _count(self, life: Life, step: StepView, cause: str) -> None:
        if step.failed and cause != "held":
            cause = "failed"
        life.charge(step.end, cause)
        life.steps += cause == "decode"
        life.chunks += cause in ("prefill", "recompute")

    def _draw(self, step: StepView) -> None:
        """The tokens that a step drew, to their requests."""
        for at, (name, token) in enumerate(zip(step.names, step.tokens, strict=False)):
            life = self._running.get(name)
            if token is None or life is None:
                continue
            more = step.more.get(at, 0)
            life.outputs += 0 if life.gang else 1 + more
            life.accepted += more
            life.drafted += step.drafts(at)
            if life.first_token is None:
                life.first_token = step.end
            elif life.last_token is not None:
                life.longest_gap = max(life.longest_gap, step.end - life.last_token)
            life.last_token = step.end


def _causes(step: StepView) -> dict[str, str]:
    """What the step was for each request in it."""
    plain = len(step.names) - len(step.reasons)
    causes = dict.fromkeys(step.names[:plain], "decode")
    for name, reason in zip(step.names[plain:], step.reasons, strict=True):
        cause = reason.split(" ", 1)[0]
        if _RANK.get(cause, 0) >= _RANK.get(causes.get(name, ""), 0):
            causes[name] = cause if cause in _RANK else "prefill"
    return causes
