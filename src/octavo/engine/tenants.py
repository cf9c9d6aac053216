"""Whose the engine's time is: labels for tenants, of which there are boundedly many, and core-seconds for each."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_METRIC_TENANTS", "CoreSeconds", "TenantLabels"]

MAX_METRIC_TENANTS = 32  # that have metrics of their own: the first ones to be served; the others are `other` together
_OTHER, _NOBODY = "other", "none"
_SETTLE_AFTER = 64  # steps


class TenantLabels:
    """Names for tenants in metrics. Whoever has no API key is ``none``."""

    def __init__(self, most: int = MAX_METRIC_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def seat(self, tenant: str) -> str:
        """The label of a tenant who is served: a new one gets one of his own, if there is one left."""
        if len(self._known) < self._most:
            self._known.add(tenant or _NOBODY)
        return self.find(tenant)

    def find(self, tenant: str) -> str:
        """The label of a tenant; `other` for one who was never served."""
        name = tenant or _NOBODY
        return name if name in self._known else _OTHER


class CoreSeconds:
    """Shares the time of each step, times its cores, among its requests, by the tokens that were computed for each.

    Steps of the same plain decodes cost one addition: what they add up to is shared out when the batch changes.
    """

    def __init__(self, cores: int = 1) -> None:
        self.cores = cores
        self.by_label: dict[str, float] = {}  # counters
        self._labels = TenantLabels()
        self._requests: dict[str, tuple[str, list[float]]] = {}  # id -> label, [core-seconds]
        self._steady: tuple[str, ...] = ()  # requests of the rows of the last steps, a token each
        self._each = 0.0  # core-seconds that each of those rows has not been given yet
        self._steps = 0

    def enter(self, request_id: str, tenant: str) -> None:
        """A request begins."""
        label = self._labels.seat(tenant)
        self._requests[request_id] = (label, [0.0])
        self.by_label.setdefault(label, 0.0)

    def step(self, active: tuple[str, ...], counts: Sequence[int] | None, seconds: float) -> None:
        """A step with rows of these requests and of so many tokens each; None: of one."""
        tokens = len(active) if counts is None else sum(counts)
        share = seconds * self.cores / max(1, tokens)
        if active is not self._steady or counts is not None or self._steps >= _SETTLE_AFTER:
            self._settle()
        if counts is None:
            self._steady = active
            self._each += share
            self._steps += 1
        else:
            for request_id, count in zip(active, counts, strict=True):
                self._give(request_id, count * share)

    def leave(self, request_id: str) -> float:
        """A request has ended: its core-seconds."""
        self._settle()
        return self._requests.pop(request_id, ("", [0.0]))[1][0]

    def _settle(self) -> None:
        for request_id in self._steady:
            self._give(request_id, self._each)
        self._steady, self._each, self._steps = (), 0.0, 0

    def _give(self, request_id: str, seconds: float) -> None:
        found = self._requests.get(request_id)
        if found is not None:
            found[1][0] += seconds
            self.by_label[found[0]] += seconds
