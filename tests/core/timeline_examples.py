"""The worked examples of docs/timeline.md, by the engine itself, with a clock that goes on by itself.

`python tests/core/timeline_examples.py` prints them; a test holds the page against them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from builders import VOCAB, Bench, make_kv, make_request
from null_model import null_tokens

from octavo.core.errors import InvalidInput
from octavo.core.event_table import KINDS, Kind
from octavo.core.explain import explain
from octavo.core.facts import scheduler_facts
from octavo.core.history import CAUSES, history_of
from octavo.core.timeline import plain
from octavo.decoding.speculation import NgramProposer, Speculator
from octavo.engine.core import EngineCore
from octavo.engine.metrics import Metrics

RESERVED = ("step_model", "chosen", "charge")  # nobody records them yet
Event = dict[str, Any]


class Clock:
    """A millisecond passes with every reading, and ten in the model."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now = round(self.now + 0.001, 6)
        return self.now


class Example:
    """An engine over the null model, and every event of it."""

    def __init__(self, num_pages: int = 64, host_pages: int = 0, **config: Any) -> None:
        self.clock, self.bench = Clock(), Bench(make_kv(num_pages, host_pages=host_pages), **config)
        scheduler = self.bench.scheduler
        metrics = Metrics(max_batched_tokens=512, page_size=4, page_bytes=1)
        self.core = EngineCore(scheduler, self._execute, metrics, clock=self.clock)
        facts = dict.fromkeys(scheduler_facts(scheduler), "...")
        self.events: list[Event] = [{"t": 0.0, "kind": "start", "process": "engine", "epoch": 0, "facts": facts}]
        scheduler.timeline.listen(
            lambda kind, t, values: self.events.append({"t": t, "kind": kind, **plain(kind, values)})
        )

    def _execute(self, decision: Any) -> Any:
        started = self.clock.now
        self.clock.now = round(started + 0.010, 6)
        self.core.metrics.spent("model", 0.010)
        return self.bench.model(decision)

    def submit(self, name: str, prompt: Any, **values: Any) -> Example:
        """A request that arrives now."""
        now = self.clock()
        self.core.submit(make_request(name, prompt, arrival=now, **values), now)
        return self

    def step(self, count: int = 1) -> Example:
        """Steps, and their text to its readers."""
        for _ in range(count):
            self.core.step(self.clock.now)
            self.core.delivered(self.clock())
        return self

    def run(self) -> Example:
        """Until there is no work."""
        while self.core.has_work:
            self.step()
        return self


def crowded() -> Example:
    """A prefix that is waited for, pages that run out, a client that takes its time."""
    example = Example(num_pages=8, max_prefill_chunk=8, max_running_requests=3)
    example.submit("A", range(1, 15), max_tokens=6, tenant="alice").step()
    example.submit("B", [*range(1, 15), 50], max_tokens=8).submit("C", range(61, 72), max_tokens=9, priority=1)
    example.run()
    example.clock.now = round(example.clock.now + 0.020, 6)
    example.bench.scheduler.timeline.record("read", example.clock(), request="B")
    return example


def disturbed() -> Example:
    """A step that fails, a cancellation, a stop string that is found late, a refusal."""
    example = Example().submit("D", [7, 8, 9], max_tokens=9).submit("E", [3, 4], max_tokens=9)
    failing = iter([ValueError("the card fell off the bus")])
    example.bench.model.fault = lambda decision: next(failing, None)
    example.step(4)
    example.core.stop("D", 0, 1, "END")
    example.core.cancel("E")
    try:
        example.submit("F", [])
    except InvalidInput:
        example.step()
    return example.run()


def hopeless() -> Example:
    """A deadline that cannot be met."""
    example = Example(policy="deadline")
    example.bench.scheduler._planner.least_seconds = lambda branch: 0.5
    return example.submit("G", [5, 6], max_tokens=2, deadline=0.25).step()


def overlapped() -> Example:
    """A step that is planned behind the one in flight."""
    example = Example().submit("H", [5, 6], max_tokens=4).step()
    scheduler = example.bench.scheduler
    scheduler.plan(example.clock())
    scheduler.plan_ahead(example.clock())
    return example


def shared() -> Example:
    """One comes while another decodes, and goes on inside a page of what is cached."""
    example = Example().submit("I", [1, 2, 3, 4, 5, 6], max_tokens=9).step(3)
    example.bench.scheduler.timeline.record("compiled", example.clock.now, request="J", seconds=0.004)
    return example.submit("J", [1, 2, 3, 4, 5, 6, 9], max_tokens=2).run().submit("K", [1, 2, 3, 4, 5, 60]).run()


def swapped() -> Example:
    """A prefix that the cache has to give up, and that comes back from the host tier."""
    example = Example(num_pages=4, host_pages=8).submit("L", range(1, 11), max_tokens=1).run()
    example.submit("M", range(21, 34), max_tokens=1).run()
    example.submit("N", [*range(1, 11), 40], max_tokens=1).run()
    example.bench.scheduler.observe_swap("host", 3, 0.0004)  # as the engine tells after such a step
    example.bench.scheduler.lose_pages([5])
    example.bench.scheduler.flush_cache()
    told = {"name": "french", "path": "adapters/fr", "digest": "5b1e"}
    example.bench.scheduler.timeline.record("adapter", example.clock.now, action="load", **told)
    return example


def beams() -> Example:
    """A gang of two, which go on from what the first of them drew."""
    return Example().submit("O", [7, 8, 9], max_tokens=3, n=2, gang=True).run()


def guessed() -> Example:
    """Two drafts of what comes next, of which the first is right."""
    example = Example().submit("P", [7, 8, 9], max_tokens=5).step()
    [branch] = example.bench.scheduler.running()
    [right] = null_tokens(branch.token_ids, 1, branch.seed, 0, VOCAB)
    example.bench.scheduler.propose({branch.key: [right, 1]})
    return example.step()


class Broken(NgramProposer):
    """It cannot guess."""

    def propose(self, *asked: Any) -> Any:
        """Nor say so as it should."""
        raise MemoryError("no page left for drafts")


def failing() -> Example:
    """Nobody can guess any more."""
    example = Example().submit("Q", [7, 8, 9], max_tokens=3)
    example.core.speculator = Speculator(Broken(), 2)
    return example.run()


def held() -> Example:
    """A step without one whose grammar takes its time."""
    example = Example().submit("R", [7, 8, 9], max_tokens=5).step()
    example.bench.scheduler.hold([("R", 0)])
    return example.step(2)


def events_by_kind() -> dict[str, Event]:
    """The first event of each kind in these runs; of decisions, the first with both kinds of row."""
    found: dict[str, Event] = {}
    runs = (crowded, disturbed, hopeless, overlapped, shared, swapped, beams, guessed, failing, held)
    for example in (run() for run in runs):
        for event in example.events:
            found.setdefault(event["kind"], event)
            if event.get("more"):
                found["tokens"] = event
            if event["kind"] == "decision" and event["decodes"] and event["rows"] and not found["decision"]["decodes"]:
                found["decision"] = event
    found["end"] = {"t": 0.0, "kind": "end"}
    return found


def line_of(event: Event) -> str:
    """An event as a line of JSON, without the fields that are missing."""
    return json.dumps({name: value for name, value in event.items() if value is not None}, separators=(", ", ": "))


def section(kind: Kind, event: Event | None) -> str:
    """What the page says of one kind."""
    names = ", ".join(f"`{field.name}`{'?' if field.optional else ''} ({field.type})" for field in kind.fields)
    lines = [f"**{kind.name}** ({kind.role.value}): {kind.meaning}."]
    lines += [f"Fields: {names}."] if names else []
    lines.append("Reserved: nothing records it yet." if event is None else f"```json\n{line_of(event)}\n```")
    return "\n".join(lines)


def sections() -> Iterator[str]:
    """One for each kind of the table."""
    found = events_by_kind()
    for kind in KINDS:
        yield section(kind, found.get(kind.name))


def causes() -> str:
    """The table of causes."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in CAUSES.items()]
    return "\n".join(["| cause | a request's time goes there while |", "|---|---|", *rows])


def explanation(request: str) -> str:
    """What `octavo explain` prints of a request of the crowded run."""
    from octavo.cli.recordings import explanation_text

    return explanation_text(explain(history_of(crowded().events), request))


if __name__ == "__main__":
    print("\n\n".join(sections()))
    for name in "ABC":
        print(f"\n```text\n{explanation(name)}\n```")
