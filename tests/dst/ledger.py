"""What may be said of each request: the book that an engine's events are checked against, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from null_model import null_gang, null_score, null_stream, prefix_hashes, prompt_logprob

from dst.invariants import Broken
from dst.scenario import VOCAB, Ask
from octavo.core.events import EventKind, TokenEvent


@dataclass
class Expected:
    """What one choice says when nothing but its own rules ends it."""

    tokens: list[int]
    logprobs: list[float]
    stops: bool  # it ends by a stop token or end-of-sequence, not by a limit


def expect(ask: Ask, choice: int, limit: int, seed: int, salt: int) -> Expected:
    """Tokens of a choice of at most ``limit`` tokens, prompt and output together."""
    stream = null_stream(ask.prompt, seed, choice, VOCAB, salt)
    own = () if ask.params["ignore_eos"] else ask.eos
    ends = {*own, *ask.params["stop_token_ids"]}
    expected = Expected([], [], False)
    while len(ask.prompt) + len(expected.tokens) < limit and not expected.stops:
        token, logprob = next(stream)
        expected.tokens.append(token)
        expected.logprobs.append(logprob)
        expected.stops = token in ends and len(expected.tokens) > ask.params["min_tokens"]
    return expected


def expect_gang(ask: Ask, limit: int, seed: int, salt: int) -> list[Expected]:
    """The same of the choices of a gang, which its driver ends."""
    most = limit - len(ask.prompt)
    outputs, stops = null_gang(ask.prompt, seed, ask.params["n"], most, VOCAB, salt)
    return [Expected(output, [null_score(token, seed).logprob for token in output], stops) for output in outputs]


def token_limit(ask: Ask, context: int, capacity: int) -> int | None:
    """Tokens, prompt and output together, at which the choices of a request end; None: it must be refused."""
    prompt, most = len(ask.prompt), ask.params["max_tokens"]
    if not prompt or prompt + (most != 0) > context:
        return None
    limit = min(context, prompt + most) if most is not None else min(context, max(prompt + 1, capacity + 1))
    return None if max(prompt, limit - 1) > capacity else limit


@dataclass
class Entry:
    """One request in one engine process."""

    ask: Ask
    limit: int
    expected: list[Expected]
    salt: int
    counts: list[int]  # output tokens told of, by choice (a restored one begins where its snapshot was)
    ended: list[str | None]  # finish reasons, by choice
    closed: bool = False  # REQUEST_END was seen
    cancels: set[str] = field(default_factory=set)  # reasons asked for
    gone: bool = False  # a cancel has been applied: nothing may follow
    stops: dict[int, int] = field(default_factory=dict)  # choice -> output tokens that a stop string leaves
    usage: list[int] = field(default_factory=list)
    prompt_logprobs: set[int] = field(default_factory=set)  # choices that have told them


class Ledger:
    """All requests that one engine process was given."""

    def __init__(self, blamed: set[str], pages_can_fail: bool) -> None:
        self.entries: dict[str, Entry] = {}
        self.blamed = blamed
        self.pages_can_fail = pages_can_fail
        self.num_tokens = 0

    def open(self, ask: Ask, limit: int, seed: int, salt: int, snapshot: dict[str, Any] | None) -> Entry:
        """The engine has accepted a request, and drawn a ``seed`` for it if it has none."""
        n = ask.params["n"]
        expected = (
            expect_gang(ask, limit, seed & (1 << 64) - 1, salt)
            if ask.gang
            else [expect(ask, choice, limit, seed, salt) for choice in range(n)]
        )
        entry = Entry(ask, limit, expected, salt, [0] * n, [None] * n, usage=[0] * n)
        for choice, part in enumerate(snapshot["branches"] if snapshot else ()):
            entry.counts[choice] = entry.usage[choice] = part["num_delivered_tokens"]
            entry.ended[choice] = part["finish_reason"]
            if part["prompt_logprobs_delivered"]:
                entry.prompt_logprobs.add(choice)
        self.entries[ask.name] = entry
        return entry

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Check the events of a step, in order."""
        for event in events:
            entry = self.entries.get(event.request_id)
            if entry is None:
                raise Broken("I14", f"an event of {event.request_id}, which was never accepted")
            if entry.closed:
                raise Broken("I8", f"{event.request_id}: {event.kind.value} after its end")
            if event.kind is EventKind.TOKEN:
                self._token(entry, event)
            elif event.kind is EventKind.CHOICE_END:
                self._choice_end(entry, event)
            else:
                self._request_end(entry, event)

    def _token(self, entry: Entry, event: TokenEvent) -> None:
        name, choice, index = event.request_id, event.choice, event.index
        if entry.gone:
            raise Broken("I9", f"{name}/{choice}: token {index} after its cancel")
        if entry.ended[choice] is not None:
            raise Broken("I8", f"{name}/{choice}: token {index} after the end of the choice")
        if index != entry.counts[choice]:
            raise Broken("I10", f"{name}/{choice}: token {index} comes after {entry.counts[choice]} tokens")
        expected = entry.expected[choice]
        if len(entry.ask.prompt) + index >= entry.limit:
            raise Broken("I11", f"{name}/{choice}: token {index} beyond its limit of {entry.limit}")
        if index >= len(expected.tokens):
            raise Broken("I14", f"{name}/{choice}: token {index} after its stop token")
        if event.token_id != expected.tokens[index]:
            raise Broken("I14", f"{name}/{choice}: token {index} is {event.token_id}, not {expected.tokens[index]}")
        self._logprobs(entry, event, expected.logprobs[index])
        self._prompt_logprobs(entry, event)
        if event.num_output_tokens != index + 1:
            raise Broken("I10", f"{name}/{choice}: token {index} counts {event.num_output_tokens} tokens")
        entry.counts[choice] = index + 1
        self.num_tokens += 1

    def _logprobs(self, entry: Entry, event: TokenEvent, expected: float) -> None:
        if (event.logprobs is not None) != (entry.ask.params["logprobs"] is not None):
            raise Broken("I10", f"{event.request_id}: logprobs asked for or given, not both")
        if event.logprobs is not None and (event.logprobs.token_id, event.logprobs.logprob) != (
            event.token_id,
            expected,
        ):
            raise Broken("I10", f"{event.request_id}: wrong logprob at {event.index}")

    def _prompt_logprobs(self, entry: Entry, event: TokenEvent) -> None:
        """They come once, with a choice's first event."""
        if event.prompt_logprobs is None:
            if entry.ask.params["prompt_logprobs"] is not None and event.choice not in entry.prompt_logprobs:
                if event.kind is EventKind.TOKEN:
                    raise Broken("I10", f"{event.request_id}: a token before the logprobs of the prompt")
            return
        if event.choice in entry.prompt_logprobs or entry.ask.params["prompt_logprobs"] is None:
            raise Broken("I10", f"{event.request_id}: logprobs of the prompt twice, or not asked for")
        entry.prompt_logprobs.add(event.choice)
        prompt = entry.ask.prompt
        hashes = prefix_hashes(prompt, entry.salt)
        wanted = [prompt_logprob(hashes[i - 1], prompt[i]) for i in range(1, len(prompt))]
        if event.prompt_logprobs != (None, *wanted):
            raise Broken("I10", f"{event.request_id}: wrong logprobs of the prompt")

    def _choice_end(self, entry: Entry, event: TokenEvent) -> None:
        name, choice, reason = event.request_id, event.choice, event.finish_reason
        if entry.ended[choice] is not None or reason is None:
            raise Broken("I8", f"{name}/{choice}: ends as {reason}, after {entry.ended[choice]}")
        entry.ended[choice], entry.usage[choice] = reason, event.num_output_tokens
        told, expected = entry.counts[choice], entry.expected[choice]
        self._prompt_logprobs(entry, event)
        if event.stop_reason == "END":
            if reason != "stop" or event.num_output_tokens != min(entry.stops.get(choice, -1), told):
                raise Broken("I10", f"{name}/{choice}: a stop string leaves {event.num_output_tokens} tokens")
            return
        if event.num_output_tokens != told:
            raise Broken("I10", f"{name}/{choice}: {told} tokens told, {event.num_output_tokens} counted")
        if reason in ("stop", "length"):
            if told != len(expected.tokens) or (reason == "stop") != expected.stops:
                raise Broken("I14", f"{name}/{choice}: {reason} after {told} of {len(expected.tokens)} tokens")
        elif not self._may_end(entry, reason):
            raise Broken("I8", f"{name}/{choice}: {reason} ({event.error}), and nobody asked for it")

    def _may_end(self, entry: Entry, reason: str) -> bool:
        if reason == "error":
            return entry.ask.name in self.blamed
        if reason == "out_of_memory":
            return self.pages_can_fail
        if reason in ("timeout", "rejected") and entry.ask.deadline is not None:
            return True
        return reason in entry.cancels

    def _request_end(self, entry: Entry, event: TokenEvent) -> None:
        if None in entry.ended:
            raise Broken("I8", f"{event.request_id} ends before its choices {entry.ended}")
        if event.num_output_tokens != sum(entry.usage):
            raise Broken("I10", f"{event.request_id}: usage {event.num_output_tokens}, not {sum(entry.usage)}")
        if not 0 <= event.num_cached_tokens <= len(entry.ask.prompt) == event.num_prompt_tokens:
            raise Broken("I10", f"{event.request_id}: {event.num_cached_tokens} of {event.num_prompt_tokens} cached")
        entry.closed = True
