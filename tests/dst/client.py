"""The other end: streams of clients, which deduplicate, resume after a kill, read slowly, and find stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dst.invariants import Broken
from dst.scenario import Ask
from octavo.core.events import EventKind, TokenEvent


@dataclass
class Stream:
    """What the client side holds of one request until its last event has arrived."""

    ask: Ask
    epoch: int  # of the engine that serves it
    tokens: list[list[int]] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    done: bool = False
    refused: bool = False
    given_up: str | None = None  # why its client wants no more of it
    snapshot: dict[str, Any] | None = None  # the newest that has arrived
    unread: int = 0
    looked: list[int] = field(default_factory=list)  # tokens that the text layer has looked at
    stop_sent: set[int] = field(default_factory=set)  # choices, in this epoch

    def __post_init__(self) -> None:
        n = self.ask.params["n"]
        self.tokens, self.ends, self.looked = [[] for _ in range(n)], [None] * n, [0] * n

    def resume(self, epoch: int) -> None:
        """Another engine takes over."""
        self.epoch = epoch
        self.stop_sent.clear()

    def take(self, event: TokenEvent) -> None:
        """One event; what an engine says again after a restart must be what was said before."""
        name, choice = event.request_id, event.choice
        if event.kind is EventKind.TOKEN:
            told = self.tokens[choice]
            if event.index > len(told):
                raise Broken("I10", f"{name}/{choice}: the client lacks tokens {len(told)}..{event.index}")
            if event.index < len(told):
                if told[event.index] != event.token_id:
                    raise Broken("I25", f"{name}/{choice}: token {event.index} is another one after a restart")
                return
            told.append(event.token_id)
            self.unread += 1
        elif event.kind is EventKind.CHOICE_END:
            self.ends[choice] = self.ends[choice] or event.finish_reason
        else:
            self.done = True

    def find_stops(self, every: int) -> list[int]:
        """Choices in which the text layer finds the stop string now; it looks at ``every`` so many tokens."""
        found = []
        for choice, tokens in enumerate(self.tokens):
            if self.ends[choice] is None and len(tokens) - self.looked[choice] >= every:
                self.looked[choice] = len(tokens)
            after = self.ask.stop_after
            if after is not None and self.looked[choice] >= after and choice not in self.stop_sent:
                if self.ends[choice] is None:
                    self.stop_sent.add(choice)
                    found.append(choice)
        return found
