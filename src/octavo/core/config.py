"""The scheduler's configuration: frozen, checked, each field with the help text that its flag shows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.params import MAX_COUNT, check_int
from octavo.core.policies import POLICIES, PolicySettings, make_policy

_MAY_BE_0 = ("prefix_wait_steps", "max_preemptions", "max_token_gap_ms", "host_mb_per_s")
PREEMPTIONS = ("auto", "recompute", "swap")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets and bounds of one scheduler. Raises ``InvalidInput`` for a value out of range."""

    max_batched_tokens: int = _option(512, "tokens that one step computes at most, over all sequences")
    max_running_requests: int = _option(64, "sequences that run at once at most (each choice of a request is one)")
    max_prefill_chunk: int = _option(256, "tokens of one prompt that one step computes at most")
    max_seq_len: int = _option(2048, "tokens of prompt and output together at most")
    policy: str = _option("fcfs", f"order of service: {', '.join(POLICIES)}; or several: priority,fair")
    prefix_wait_steps: int = _option(64, "steps a request may wait for a prefix that another computes; 0: never")
    max_preemptions: int = _option(8, "preemptions of a sequence after which it keeps its pages to the end")
    bypass_limit: int = _option(64, "later arrivals that may be admitted before a waiting sequence")
    max_token_gap_ms: int = _option(0, "bound on the gap between two tokens of a sequence, p99.9, in ms; 0: none")
    stall_steps: int = _option(16, "steps without a token after which a running sequence is served before all others")
    preemption: str = _option("auto", "how preempted sequences come back: swap, recompute, or auto: what costs less")
    host_mb_per_s: int = _option(0, "MB that a second moves between page pool and host tier; 0: not known")
    policies: PolicySettings = field(
        default_factory=PolicySettings, metadata={"help": "prices, weights and ageing of the policies"}
    )

    def __post_init__(self) -> None:
        make_policy(self.policy)
        if self.preemption not in PREEMPTIONS:
            raise InvalidInput("preemption", self.preemption, f"give one of {', '.join(PREEMPTIONS)}")
        for item in fields(self):
            if item.name not in ("policy", "policies", "preemption"):
                lowest = 0 if item.name in _MAY_BE_0 else 1
                check_int(item.name, getattr(self, item.name), lowest, MAX_COUNT)
