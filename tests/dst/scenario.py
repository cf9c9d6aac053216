"""What happens in one run, as plain values: drawn from a seed, shrunk, written down as JSON, played again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from octavo.core.config import SchedulerConfig
from octavo.core.facts import scheduler_config_of

VOCAB = 97
SWITCHES = (
    "preempt_every_3",  # the running sequence of last rank loses its pages in every third step
    "evict_always",  # the prefix cache is emptied before every step and every page grab
    "short_keys",  # all keys of the prefix cache have the same hash
    "never_batch",  # one sequence at a time
    "always_batch",  # steps wait until four sequences are there, or nothing has come for a while
    "chunk_1",  # prompts are computed token by token
    "ignore_hits",  # every second lookup in the prefix cache finds nothing
    "read_every_5",  # the text layer looks at every fifth token only
    "abort_at_end",  # requests are cancelled while their last token is computed
)


@dataclass(frozen=True)
class Ask:
    """One request of one client, and what becomes of it. Times are microseconds."""

    name: str
    time: int
    client: int
    prompt: tuple[int, ...]
    params: dict[str, Any]
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    deadline: int | None = None  # after `time`: then its client gives up
    eos: tuple[int, ...] = ()
    stop_after: int | None = None  # a stop string ends with output token number ...
    resend: int | None = None  # after `time`: it is sent a second time
    cancel: tuple[str, int] | None = None  # ("after", microseconds) or (a state, number of the choice)
    read_every: int = 0  # the reader looks once in so many microseconds; 0: at once
    gang: bool = False  # its choices go on from each other, as beams do
    patience: int = 1 << 30  # unread tokens at which its client is given up


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong. `kind` and what `value` means:

    kill: restart after so many microseconds; clock: the engine's clock jumps by so many seconds; shrink: so many pages
    are gone, for `extra` microseconds; grab: the next page grab fails, `value` times; step: the next step fails, in the
    way `extra` of `faults.KINDS`, the row by `value`; poison: every step with a row of request number `value` fails;
    flush: the prefix cache is emptied; corrupt: page `value` of the next step that reads some back has gone bad.
    """

    time: int
    kind: str
    value: int = 0
    extra: int = 0


@dataclass(frozen=True)
class Scenario:
    """A world, and its script."""

    seed: int
    events: int  # so many, then no new ones come and everything must end
    page_size: int
    num_pages: int
    windows: tuple[int, ...]
    config: dict[str, Any]
    switches: tuple[str, ...] = ()
    overlap: bool = False  # the next step is planned while one runs
    prefix_cache: bool = True
    cache_bound: int | None = None
    snapshot_every: int = 0  # steps; 0: never, so that requests begin anew after a kill
    grab_fails: tuple[int, int] | None = None  # the first page grab that fails, and how many do
    host_pages: int = 0  # of the host tier, where there is a prefix cache
    disk_pages: int = 0  # of the disk behind it
    drafts: int = 0  # most that are proposed for a sequence in one step
    lies: int = 0  # of eight drafts, those that are wrong
    cancel_at_end: bool = False  # what still lives after `events` is cancelled
    script: tuple[Ask | Fault, ...] = field(default=())

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The configuration of the engine's scheduler."""
        return scheduler_config_of({"scheduler": self.config})

    @property
    def asks(self) -> list[Ask]:
        """The requests of the script."""
        return [item for item in self.script if isinstance(item, Ask)]

    @property
    def faults(self) -> list[Fault]:
        """What goes wrong by script."""
        return [item for item in self.script if isinstance(item, Fault)]

    @property
    def pages_can_fail(self) -> bool:
        """True if a request may honestly end for lack of pages."""
        return self.grab_fails is not None or any(fault.kind in ("shrink", "grab") for fault in self.faults)

    @property
    def keeps_shares(self) -> bool:
        """True if the bound between tenants must hold: fair decides, and nothing but the policy takes pages away."""
        fair = self.config.get("policy", "").split(",")[0] == "fair"
        return fair and not self.pages_can_fail and "preempt_every_3" not in self.switches and bool(self.asks)

    def to_json(self) -> str:
        """One line, the inverse of `from_json`; fields that have their default are left out."""
        values = {**_brief(self), "script": [_brief(item) for item in self.script]}
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """The scenario that `to_json` wrote."""
        values = json.loads(text)
        values["script"] = tuple(_item(item) for item in values.get("script", ()))
        return cls(**{name: _tupled(value) for name, value in values.items()})


def _item(values: Mapping[str, Any]) -> Ask | Fault:
    kind = Fault if "kind" in values else Ask
    return kind(**{name: _tupled(value) for name, value in values.items()})


def _brief(value: Any) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(value)}
    return {name: part for name, part in asdict(value).items() if part != defaults[name] and name != "script"}


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def keyed(*parts: int) -> int:
    """A 64-bit number that depends on these alone: chance that other events do not shift."""
    value = 0x243F6A8885A308D3
    for part in parts:
        value = (value ^ (part & (2**64 - 1))) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        value ^= value >> 29
    return value
