"""The N-th call fails, for N = 1, 2, 3 ... until a run has no N-th call: once, and from then on.

Calls that can fail: page grabs (OutOfPages), steps of the model (no memory for it, blamed on nobody).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dst.scenario import Ask, Scenario
from dst.simulator import Simulator

FOR_EVER = 1 << 40


@dataclass(frozen=True)
class Swept:
    """How many calls were made to fail, one run each."""

    calls: int
    failed: dict[str, int]  # finish reasons of the choices, over all runs


def scenario(windows: tuple[int, ...] = (0,), num_pages: int = 12) -> Scenario:
    """A small run that does everything that takes pages: chunks, growth, hits, copies, preemption, several choices."""
    shared = tuple(range(1, 11))
    asks = [
        Ask("r0", 0, 0, shared, _params(6)),
        Ask("r1", 9_000, 1, (*shared, 50), _params(5, n=2)),
        Ask("r2", 9_000, 2, (*shared[:6], 60, 61, 62), _params(8), namespace="salt a"),
        Ask("r3", 30_000, 0, shared, _params(4, logprobs=0)),
        Ask("r4", 40_000, 1, (*shared, 50), _params(9), stop_after=3),
    ]
    config = {"max_running_requests": 4, "max_prefill_chunk": 5, "max_batched_tokens": 9, "max_seq_len": 24}
    return Scenario(7, 10_000, 4, num_pages, windows, config, script=tuple(asks))


def _params(max_tokens: int, **values: object) -> dict[str, object]:
    plain = {"n": 1, "seed": 1, "logprobs": None, "prompt_logprobs": None, "ignore_eos": False}
    return {"max_tokens": max_tokens, **plain, "stop_token_ids": [], "min_tokens": 0, **values}


def fail_grab(base: Scenario, number: int, count: int) -> Simulator:
    """The run in which page grab ``number``, and the ``count - 1`` after it, fail."""
    return Simulator(replace(base, grab_fails=(number, count)))


def fail_step(base: Scenario, number: int, count: int) -> Simulator:
    """The run in which the model fails at step ``number``, and ``count - 1`` times after it."""
    simulator = Simulator(base)
    simulator.engine.faults.next = [("", 0)] * (number - 1) + [("memory error", 0)] * min(count, 1000)
    return simulator


def sweep(base: Scenario, fail: Callable[[Scenario, int, int], Simulator], count: int, most: int = 500) -> Swept:
    """Fail call 1, 2, 3 ... until a run ends before it comes to that; every run must keep all invariants."""
    failed: dict[str, int] = {}
    for number in range(1, most):
        simulator = fail(base, number, count).play()
        for entry in simulator.engine.ledger.entries.values():
            for reason in entry.ended:
                failed[str(reason)] = failed.get(str(reason), 0) + 1
        if not _was_reached(simulator, fail, number):
            return Swept(number - 1, failed)
    raise AssertionError(f"{most} calls, and no end")


def _was_reached(simulator: Simulator, fail: Callable[..., Simulator], number: int) -> bool:
    engine = simulator.engine
    return (engine.kv.grabs if fail is fail_grab else engine.faults.calls) >= number
