"""The worked examples of docs/scheduling.md, by the scheduler itself. `python tests/core/scheduling_examples.py` prints
them; a test holds the page against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builders import Bench, make_kv, make_request

from octavo.core.policies import PolicySettings


def play(
    policy: str, arrivals: Sequence[Mapping[str, Any]], *, slots: int = 1, settings: PolicySettings | None = None,
    pages: int = 64, chunk: int = 8, least: float = 0.0, host: int = 0, disk: int = 0,
) -> str:  # fmt: skip
    """What each step does, and who ends how. An arrival is a request by its fields, and its step."""
    bench = Bench(
        make_kv(pages, 4, host_pages=host, disk_pages=disk), policy=policy, policies=settings or PolicySettings(),
        max_running_requests=slots, max_prefill_chunk=chunk, max_batched_tokens=16,
    )  # fmt: skip
    bench.scheduler._planner.least_seconds = lambda branch: least * branch.num_missing_tokens
    left, lines, step = [dict(arrival) for arrival in arrivals], [], 0
    while left or bench.scheduler.has_work:
        step += 1
        for arrival in [each for each in left if each.get("step", 1) <= step]:
            left.remove(arrival)
            bench.submit(make_request(**{key: value for key, value in arrival.items() if key != "step"}))
        lines += _step(bench, step)
    return "\n".join(lines)


def _step(bench: Bench, step: int) -> list[str]:
    decision = bench.scheduler.step(16, float(step))
    parts = [f"{gone.request_id} gives way ({gone.reason})" for gone in decision.preemptions]
    from_disk = sum(move.source >= bench.kv.host.num_pages for move in decision.swap_ins) if decision.swap_ins else 0
    moves = {
        "to disk": len(decision.sinks),
        "to memory": len(decision.swap_outs),
        "back from memory": len(decision.swap_ins) - from_disk,
        "back from disk": from_disk,
    }
    parts += [f"{count} page{'s' * (count > 1)} {what}" for what, count in moves.items() if count]
    parts += [f"{row.request_id} {row.reason}" for row in decision.rows]
    ends = [event for event in bench.scheduler.drain_events() if event.kind.value == "choice_end"]
    parts += [f"{end.request_id} ends: {end.finish_reason}{_why(end.error)}" for end in ends]
    return [f"step {step}: " + "; ".join(parts)] if parts else []


def _why(error: str | None) -> str:
    return f" ({error})" if error else ""


def request(request_id: str, tokens: int, max_tokens: int = 2, **values: Any) -> dict[str, Any]:
    """A request of as many tokens, different from those of others."""
    own = sum(map(ord, request_id))
    return {
        "request_id": request_id,
        "prompt": [(own + i) % 90 for i in range(tokens)],
        "max_tokens": max_tokens,
        **values,
    }


def shared(request_id: str, prefix: int, own: int) -> dict[str, Any]:
    """A request whose first 8 tokens are those of all with the same `prefix`."""
    return {"request_id": request_id, "prompt": [prefix] * 8 + [own], "max_tokens": 1}


EXAMPLES = {
    "fcfs": lambda: play("fcfs", [request("A", 4), request("B", 2), request("C", 2)]),
    "priority": lambda: play("priority", [request("A", 4, priority=1), request("B", 2, priority=1), request("C", 2)]),
    "deadline": lambda: play(
        "deadline",
        [request("A", 4), request("B", 2, deadline=9.0), request("C", 2, deadline=6.0), request("D", 9, deadline=7.0)],
        least=1.0,
    ),
    "fair": lambda: play(
        "fair",
        [*(request(f"loud{i}", 12, tenant="loud") for i in range(3)), request("quiet", 3, tenant="quiet", step=3)],
        slots=2,
    ),
    "prefix": lambda: play("prefix", [shared("A1", 1, 7), shared("B1", 2, 7), shared("A2", 1, 8), shared("B2", 2, 8)]),
    "shortest": lambda: play("shortest", [request("A", 4, 6), request("B", 6, 1), request("C", 2, 1)]),
    "swap": lambda: play(
        "fcfs",
        [request("A", 8, 9), request("B", 8, 9), request("C", 16, 2), {**request("A", 8, 2), "request_id": "A again"}],
        slots=2, pages=6, host=1, disk=9,
    ),
    "priority,fair": lambda: play(
        "priority,fair",
        [
            request("loud1", 4, 3, tenant="loud"), request("loud2", 4, 3, tenant="loud"),
            request("quiet", 4, 1, tenant="quiet"), request("urgent", 4, 1, tenant="loud", priority=-1),
        ],
    ),
}  # fmt: skip

if __name__ == "__main__":
    for name, example in EXAMPLES.items():
        print(f"== {name}\n{example()}\n")
