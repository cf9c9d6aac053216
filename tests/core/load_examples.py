"""The worked examples of docs/overload.md, by the real code. `python tests/core/load_examples.py` prints them; a test
holds the page against them."""

from __future__ import annotations

import random

from cost_run import MODEL_COST, CostRun

from octavo.core.admission import Ask, Door, Guest, Limits, Refusal
from octavo.core.forecast import Pace


def exact(dice: random.Random) -> float:
    """No noise."""
    return 1.0


def chunks() -> str:
    """Eight decode under a bound of 60 ms; prompts of 2,000 tokens come one after the other, and the last is shown."""
    run = CostRun(MODEL_COST, exact, 60, config={"max_running_requests": 16})
    for i in range(8):
        run.submit(f"d{i}", 32, 6000)
    lines: list[str] = []
    for name in [*(f"before{i}" for i in range(20)), "long"]:
        run.submit(name, 2000, 1)
        lines, ended = [], False
        while not ended:
            ended = any(event.request_id == name for event in run.step())
            work, seconds = run.cycles[-1]
            if work.prefill:
                lines.append(f"{work.decodes} decode, {work.prefill:3} of the prompt: {1e3 * seconds:.1f} ms")
    gap = run.scheduler.gap
    assert gap is not None
    return "\n".join([*lines[:3], "...", *lines[-2:], f"margin {1e3 * gap.margin:.1f} ms"])


def door() -> str:
    """Four slots, all taken, by sequences that stay for 400 steps of 20 ms; a bound of 6 s on first tokens."""
    door = Door(Limits(first_token_s=6.0))
    ask, running = Ask("key-a", 1, 200), []
    for step in (0, 100, 200, 300, 400):
        if step == 400:
            door.leave(running[0], step)
        guest = door.enter(ask, Pace(4, 1000.0, step, 0.02), 0.02 * step)
        assert isinstance(guest, Guest)
        door.first_token(guest, step, 0.02 * step)
        running.append(guest)
    lines: list[str] = []
    while not lines or "429" not in lines[-1]:
        before, found = door.waiting, door.enter(ask, Pace(4, 1000.0, 400, 0.02), 8.0)
        said = f"429 {found.code}: {found.message}" if isinstance(found, Refusal) else "in"
        if isinstance(found, Guest):
            said = f"in, first token in {found.forecast.seconds:.1f} s by {found.forecast.by}"
        lines.append(f"{before} wait: {said}")
    return "\n".join(lines)


EXAMPLES = {"chunks": chunks, "door": door}

if __name__ == "__main__":
    for name, example in EXAMPLES.items():
        print(f"== {name}\n{example()}\n")
