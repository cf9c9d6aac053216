"""EngineCore: scheduler, runner and audit joined into one step. Single-threaded; time comes in as an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.errors import InvalidInput, OctavoError
from octavo.core.events import TokenEvent
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import ContinuousBatchScheduler
from octavo.engine.metrics import Metrics

__all__ = ["EngineCore"]

Executor = Callable[[ScheduleDecision], StepResult]


class EngineCore:
    """One model's step loop: plan, execute, commit; on an error roll back and charge it to those it belongs to.

    ``executor`` is `ModelRunner.execute`, or anything with its shape. ``clock`` measures how long a step took; the
    decisions see only the ``now`` that they are given.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        executor: Executor,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        audit: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.metrics = metrics
        self.clock = clock
        self.audits = audit
        self.idle = True  # the last step had nothing to run

    @property
    def kv(self) -> Any:
        """The scheduler's `KVCacheManager`."""
        return self.scheduler.kv

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return self.scheduler.has_work

    def submit(self, request: Request, now: float) -> None:
        """Hand a request to the scheduler. Raises ``InvalidInput`` naming field, value and remedy."""
        self.scheduler.submit(request)
        self.metrics.submitted(request.request_id, len(request.prompt_token_ids), now)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request at the next step; idempotent, and without effect on one that has ended."""
        self.scheduler.cancel(request_id, reason)

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: str | int | None) -> None:
        """End a choice after ``num_output_tokens`` tokens: what lies beyond does not count. Idempotent."""
        self.scheduler.stop(request_id, choice, num_output_tokens, stop_reason)

    def step(self, now: float) -> Sequence[TokenEvent]:
        """Run one step and return its events, in order. An error of the model never leaves through here."""
        clock, seconds = self.clock, self.metrics.phase_seconds
        started = clock()
        decision = self.scheduler.plan(now)
        planned, model_before = clock(), seconds["model"]
        self.idle = not decision.rows
        try:
            result = self.executor(decision) if decision.rows else StepResult(decision.step, ())
        except Exception as error:
            events: Sequence[TokenEvent] = self.scheduler.rollback(error, now)
            ended = clock()
            self.metrics.failed(events, ended)
        except BaseException:  # an interruption passes through, but no step may stay in flight
            self.scheduler.rollback(OctavoError("the step was interrupted"), now)
            raise
        else:
            executed = clock()
            pages = self.kv.allocator.counts().referenced
            events = self.scheduler.commit(result, now)
            ended = clock()
            seconds["plan"] += planned - started
            seconds["prepare"] += executed - planned - (seconds["model"] - model_before)
            seconds["commit"] += ended - executed
            self.metrics.stepped(decision, events, started, ended, pages, len(self.kv.groups))
        if self.audits:
            self.scheduler.audit()
        seconds["measure"] += clock() - ended
        return events

    def snapshot(self, request_id: str) -> dict[str, Any]:
        """A live request as plain JSON values, between two steps. Raises ``InvalidInput`` for an unknown id."""
        request = self.scheduler.get(request_id)
        if request is None:
            raise InvalidInput("request_id", request_id, "give the id of a live request")
        return request.snapshot()

    def restore(self, saved: Mapping[str, Any], now: float) -> Request:
        """Go on with a request from its ``snapshot``, here or in another engine: the same bytes follow.

        Raises ``InvalidInput`` for a snapshot that does not fit, or an id that is live here.
        """
        request = Request.restore(saved)
        self.submit(request, now)
        return request
