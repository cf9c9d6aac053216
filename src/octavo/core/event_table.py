"""Every kind of event: what it means, and its fields. The one place where an event is defined.

The timeline takes events of these kinds, recordings are encoded and read by this table, and a test holds the words of
docs/timeline.md against it. A new field goes to the end of its kind, as an optional one; a number is never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from octavo.core.errors import InvalidInput

__all__ = ["BY_CODE", "BY_NAME", "KINDS", "TYPES", "VERSION", "Field", "Kind", "Role", "kind_of"]

VERSION = 2

TYPES = {
    "count": "a whole number from 0",
    "number": "a whole number",
    "seconds": "a floating-point number of seconds",
    "name": "a short text that comes often: a request's id, a word",
    "text": "a text",
    "ids": "a list of whole numbers from 0",
    "tokens": "a list of token ids, None where a row drew none",
    "branches": "a list of [request, choice]",
    "rows": "a list of [request, choice, tokens, reason]",
    "json": "any JSON value",
}


class Role(Enum):
    """What a replay does with an event."""

    INPUT = "input"  # came from outside: it is given again
    DECISION = "decision"  # what the core made of it: it must come out again
    NOTE = "note"  # for people


@dataclass(frozen=True)
class Field:
    """One field: its name, one of ``TYPES``, and whether it may be missing (then it reads as None)."""

    name: str
    type: str
    optional: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of event."""

    code: int  # in recordings
    name: str
    role: Role
    meaning: str
    fields: tuple[Field, ...]


def _kind(code: int, name: str, role: Role, meaning: str, fields: str) -> Kind:
    """``fields`` are words ``name:type``, with a ``?`` behind optional ones."""
    pairs = [word.rstrip("?").split(":") for word in fields.split()]
    optional = [word.endswith("?") for word in fields.split()]
    made = tuple(Field(field, of, may_miss) for (field, of), may_miss in zip(pairs, optional, strict=True))
    return Kind(code, name, role, meaning, made)


_INPUT, _DECISION, _NOTE = Role.INPUT, Role.DECISION, Role.NOTE
KINDS = (
    # what comes from outside
    _kind(
        1, "start", _INPUT, "a process begins to record: all that a replay must build again, in `facts`",
        "process:text epoch:count facts:json",
    ),
    _kind(
        2, "arrive", _INPUT, "a request was accepted into the inbox, with all that it asks for; `t` is its arrival",
        "request:name prompt:ids facts:json",
    ),
    _kind(3, "ask_cancel", _INPUT, "somebody asked for the end of a request", "request:name reason:name"),
    _kind(
        4, "ask_stop", _INPUT, "the text of a choice ends after so many tokens: a stop string was found",
        "request:name choice:count tokens:count stop_reason:json",
    ),
    _kind(
        5, "tokens", _INPUT,
        "a step's results: each row's first token, the others of rows that have `more`, and errors of rows",
        "step:count tokens:tokens drawn:count errors:json? more:json?",
    ),
    _kind(
        6, "rollback", _INPUT, "a step failed and was taken back; `rows` or `corrupt` host pages that its error names",
        "step:count error:text rows:json? corrupt:json?",
    ),
    _kind(
        7, "measured", _INPUT, "the clock's readings of a step, in microseconds; `t` is its end",
        "step:count plan:count prepare:count model:count commit:count",
    ),
    _kind(
        8, "step_model", _INPUT, "the coefficients from which the time of a step is foretold, from now on",
        "coefficients:json",
    ),
    _kind(9, "chosen", _INPUT, "a setting that adapts took another value", "what:name value:json why:text?"),
    _kind(10, "observed", _INPUT, "the scheduler was told how long its last step took", "seconds:seconds"),
    _kind(
        12, "moved", _INPUT, "so many pages came back from a tier in one step, and how long that took",
        "tier:name pages:count seconds:seconds",
    ),
    _kind(13, "lost", _INPUT, "pages of a tier do not hold what was to be written there", "pages:ids"),
    _kind(15, "flush", _INPUT, "the operator had the prefix cache emptied, in all tiers, of what nobody uses", ""),
    _kind(
        16, "drafts", _INPUT, "what choices may draw, for the plan that follows: [request, choice, tokens, parents?]",
        "drafts:json",
    ),
    _kind(
        17, "held", _INPUT, "whom the plan that follows leaves out, as it is not known yet what their grammars allow",
        "held:json",
    ),
    _kind(
        18, "adapter", _INPUT, "an adapter got a name, or lost it (`action`: load, unload); requests go by its digest",
        "action:name name:name path:text digest:name",
    ),
    _kind(11, "end", _INPUT, "the recording was closed: nothing of it is missing", ""),
    _kind(
        14, "gang", _INPUT, "with the results that follow: whom each choice of a gang goes on from, or its `endings`",
        "request:name parents:ids tokens:ids endings:json?",
    ),
    # what the core makes of it
    _kind(
        20, "submit", _DECISION, "a request was taken out of the inbox into the queue",
        "request:name prompt:count choices:count arrival:seconds tenant:name? priority:number?",
    ),
    _kind(
        21, "wait", _DECISION, "what a choice is blocked on from now: kv (pages), prefix (`on` computes it), grammar",
        "request:name choice:count why:name on:name?",
    ),
    _kind(
        22, "admit", _DECISION, "a waiting choice got a slot; `cached` tokens need no computing, `times` admitted",
        "request:name choice:count slot:count cached:count times:count",
    ),
    _kind(
        23, "preempt", _DECISION, "a running choice lost slot and pages, to `by` if to anybody; `how`: swap, or none",
        "request:name choice:count reason:text by:name? how:name?",
    ),
    _kind(
        24, "copy", _DECISION, "pages that the step copies first: a source, its target, and so on",
        "step:count pages:ids",
    ),
    _kind(
        25, "decision", _DECISION, "a step was planned: plain `decodes`, then other `rows`; free pages with it",
        "step:count decodes:branches rows:rows waiting:count running:count free:count budget:count?",
    ),
    _kind(
        26, "stop", _DECISION, "a stop string ended a choice: tokens that count, and those drawn too late to count",
        "request:name choice:count tokens:count late:count",
    ),
    _kind(
        27, "finish", _DECISION, "a choice ended; `error` if it failed",
        "request:name choice:count finish_reason:name? error:text?",
    ),
    _kind(
        28, "cancel", _DECISION, "a choice was cancelled, or ran out of time",
        "request:name choice:count finish_reason:name? error:text?",
    ),
    _kind(
        29, "shed", _DECISION, "a request was dropped before it cost anything, with the reason",
        "request:name reason:text deadline:seconds?",
    ),
    _kind(
        30, "swap_out", _DECISION, "evicted pages move to a tier: a page, its place there, and so on",
        "step:count pages:ids tier:name",
    ),
    _kind(
        31, "swap_in", _DECISION, "a choice that enters gets pages, and so many tokens, back from a tier",
        "request:name choice:count pages:count tokens:count tier:name",
    ),
    _kind(
        32, "charge", _DECISION, "a policy put a cost on a tenant's account, which now stands at `total`",
        "tenant:name cost:seconds total:seconds",
    ),
    _kind(
        33, "ahead", _DECISION, "the step behind the one in flight was planned: plain `decodes`, their tokens to come",
        "step:count decodes:branches free:count",
    ),
    # for people
    _kind(
        40, "refuse", _NOTE, "a request was turned away: the field to blame or the HTTP status, and why",
        "request:name reason:text field:name? status:count? retry_after:seconds?",
    ),
    _kind(41, "delivered", _NOTE, "microseconds in which a step's tokens became text for readers", "spent:count"),
    _kind(42, "read", _NOTE, "the client has taken the last of a request; `t` is when", "request:name"),
    _kind(
        43, "compiled", _NOTE, "a request comes whose grammar took so long, up to `t`, to be compiled",
        "request:name seconds:seconds",
    ),
    _kind(44, "drafts_off", _NOTE, "guessing tokens failed: nobody has drafts any more, and all go on", "reason:text"),
)  # fmt: skip

BY_NAME = {kind.name: kind for kind in KINDS}
BY_CODE = {kind.code: kind for kind in KINDS}


def kind_of(name: str) -> Kind:
    """The kind of that name. Raises ``InvalidInput`` for one that is not in the table."""
    if name not in BY_NAME:
        raise InvalidInput("kind", name, "add it to the table of events first")
    return BY_NAME[name]
