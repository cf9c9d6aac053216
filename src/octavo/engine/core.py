"""EngineCore: scheduler, runner and audit joined into one step. Single-threaded; time comes in as an argument."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.errors import InvalidInput, OctavoError
from octavo.core.events import EventKind, StepEvents, TokenEvent
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import ContinuousBatchScheduler
from octavo.core.speculation import Guess
from octavo.decoding.grammar import GrammarCompiler
from octavo.decoding.speculation import BranchKey, Speculator
from octavo.decoding.speculation.without_law import check_params
from octavo.engine.adapters import AdapterTable, ReadAdapter, ServedAdapter
from octavo.engine.beams import with_moves
from octavo.engine.forcing import Forcing
from octavo.engine.gaps import GapWatch
from octavo.engine.metrics import Metrics
from octavo.engine.overlap import StepThread
from octavo.engine.recorder import Recorder
from octavo.engine.tiers import Tiers

__all__ = ["EngineCore"]

Executor = Callable[[ScheduleDecision], StepResult]
_NAP = 0.001  # seconds, where all wait for their masks
_SAVE_AT_REST, _SAVE_AT_WORK = 1.0, 60.0  # seconds between two indices of the disk tier


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
        overlap: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.metrics = metrics
        self.clock = clock
        self.audits = audit
        self.forcing: Forcing | None = None
        self.grammars: GrammarCompiler | None = None  # what outputs may be asked to follow
        self.tiers = tiers  # host memory and disk, if evicted pages are kept there
        self._index_saved = 0.0
        self.idle = True  # the last step had nothing to run
        self._thread = StepThread(executor) if overlap else None  # runs a step while the next one is planned
        self.recorder: Recorder | None = None  # of the timeline, into a file
        self.is_residual = False  # tokens are drawn by the residual verifier
        self.speculator: Speculator | None = None  # who has drafts verified, if anybody
        self.propose_seconds = 0.0  # that it has taken to guess
        self.adapters: AdapterTable | None = None  # if there is room for any
        self._gap_watch = None if scheduler.gap is None else GapWatch(scheduler.gap, metrics.gaps)
        self._cycle_started = 0.0  # when the step before ended, if work was left; else 0

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
        try:
            if request.gang and self.kv.groups[0].every:
                raise InvalidInput("use_beam_search", True, "h2o counts for each sequence by itself: use snapkv")
            if request.adapter:
                self.served_adapters.place_of(request.adapter)
            verifier = request.params.speculative_verifier
            if verifier == "residual" and importlib.util.find_spec("numpy") is None:
                raise InvalidInput("speculative_verifier", verifier, "it needs NumPy, which is not installed here")
            if verifier == "residual" or (self.is_residual and verifier is None):
                check_params(request.params)
            self.scheduler.submit(request)
        except InvalidInput as error:
            told = {"request": request.request_id, "reason": str(error), "field": error.field}
            self.scheduler.timeline.record("refuse", now, **told)
            raise
        if self.forcing is not None:
            self.forcing.open(request)
        self.metrics.submitted(request.request_id, len(request.prompt_token_ids), now, request.tenant)

    def load_adapter(self, name: str, path: str, read: ReadAdapter) -> ServedAdapter:
        """Serve what `AdapterTable.read` has read of a folder; between two steps. Raises ``InvalidInput``."""
        served = self.served_adapters.add(name, path, read, self.scheduler.adapters_in_use())
        self._note_adapter("load", served)
        return served

    def load_adapters(self, folders: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Serve adapters by name, before anything runs. Raises ``InvalidInput``."""
        for name, folder in folders.items():
            served = self.load_adapter(name, folder, self.served_adapters.read(folder))
            say(f"adapter {name}: rank {served.rank}, {folder}")

    def unload_adapter(self, name: str) -> None:
        """No new request gets it; those that have it go on to their end. Raises ``InvalidInput`` for one not here."""
        self._note_adapter("unload", self.served_adapters.remove(name))

    @property
    def served_adapters(self) -> AdapterTable:
        """The table of adapters. Raises ``InvalidInput`` where there is no room for any."""
        if self.adapters is None:
            raise InvalidInput("adapter", None, "this engine has no room for adapters; start it with --max-loras")
        return self.adapters

    def _note_adapter(self, action: str, served: ServedAdapter) -> None:
        timeline = self.scheduler.timeline
        told = {"name": served.name, "path": served.path, "digest": served.digest}
        timeline.record("adapter", timeline.now, action=action, **told)

    def compile(self, params: SamplingParams) -> bool:
        """Have a grammar ready, if there is one, so that no step waits. True: it was not, so far.

        In any thread. Raises ``InvalidInput``.
        """
        if params.grammar is None or self.grammars is None:
            return False
        is_new = not self.knows(params)
        self.grammars.matcher(params.grammar)
        return is_new

    def is_ready_for(self, params: SamplingParams) -> bool:
        """Whether what a request follows, if anything, is compiled and can be kept until it ends."""
        if params.grammar is None or self.grammars is None:
            return True
        if self.forcing is not None:
            self.forcing.forget(self.scheduler.get)
        return self.knows(params) and self.grammars.may_hold(params.grammar)

    def knows(self, params: SamplingParams) -> bool:
        """Whether what a request follows, if anything, is compiled."""
        return params.grammar is None or self.grammars is None or self.grammars.knows(params.grammar)

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
        decision = self._next(now)
        planned, model_before = clock(), seconds["model"]
        self.idle = not decision.rows
        try:
            result = self._execute(decision, now) if decision.rows else StepResult(decision.step, ())
            result = with_moves(decision, result, self.scheduler.get)
        except Exception as error:
            events: Sequence[TokenEvent] = self.scheduler.rollback(error, now)
            ended = clock()
            if self.speculator is not None:
                self._tell_of_drafts(self.speculator, ScheduleDecision("", 0), StepResult(0, ()), events, 0.0)
            self._measured(decision, (started, planned, planned, ended), 0.0)
            self.metrics.failed(events, ended)
        except BaseException:  # an interruption passes through, but no step may stay in flight
            if self._thread is not None:
                self._thread.settle()
            self.scheduler.rollback(OctavoError("the step was interrupted"), now)
            raise
        else:
            executed = clock()
            pages = self.kv.allocator.num_referenced
            events = self.scheduler.commit(result, now)
            ended = clock()
            taken = ended - (self._cycle_started or started)
            self.scheduler.observe(taken)
            if self.speculator is not None:
                self._tell_of_drafts(self.speculator, decision, result, events, taken)
            model = seconds["model"] - model_before
            self._measured(decision, (started, planned, executed, ended), model)
            seconds["plan"] += planned - started
            seconds["prepare"] += executed - planned - model
            seconds["commit"] += ended - executed
            sampling = max(0.0, ended - planned - model)
            self.metrics.stepped(decision, events, started, ended, pages, len(self.kv.groups), sampling)
        if self._gap_watch is not None:
            self._gap_watch.look(now, sum(seconds.values()))
        self._cycle_started = 0.0 if self.idle or not self.has_work else ended
        if self.audits:
            self.scheduler.audit()
        if self.recorder is not None and not self.has_work:
            self.recorder.flush()
        if self.tiers is not None:
            self._tell_of_tiers(self.tiers, ended)
        seconds["measure"] += clock() - ended
        return events

    def _next(self, now: float) -> ScheduleDecision:
        """What runs already, or a new plan."""
        running = None if self._thread is None else self._thread.decision
        if running is not None:
            return running
        scheduler = self.scheduler
        if self.speculator is None and (self.forcing is None or not self.forcing.has_any):
            return scheduler.plan(now)
        begun = self.clock()
        drafts, forced = (
            (self._guesses(()), {}) if self.forcing is None else self.forcing.drafts(scheduler.get, self._guesses)
        )
        if self.speculator is not None:
            self._propose(self.speculator, drafts, forced)
            self.propose_seconds += self.clock() - begun
        elif forced:
            scheduler.propose(forced)
        held = () if self.forcing is None else self.forcing.held
        if held:
            scheduler.hold(held)
            if len(held) == scheduler.num_running + scheduler.num_waiting:
                time.sleep(_NAP)
        return scheduler.plan(now)

    def _guesses(self, apart_from: Sequence[BranchKey]) -> Mapping[BranchKey, Guess]:
        """Drafts of those who run."""
        if self.speculator is None:
            return {}
        return self.speculator.drafts([branch for branch in self.scheduler.running() if branch.key not in apart_from])

    def _propose(
        self, speculator: Speculator, drafts: Mapping[BranchKey, Guess], forced: Mapping[BranchKey, Guess]
    ) -> None:
        """Tell the scheduler of drafts. Whoever fails to make them, or makes none that can be, is not asked again."""
        try:
            self.scheduler.propose({**drafts, **forced})
        except Exception as error:
            if not drafts:
                raise
            speculator.fail(error)
            self.scheduler.propose(forced)
        reason, timeline = speculator.take_fault(), self.scheduler.timeline
        if reason:
            timeline.record("drafts_off", timeline.now, reason=reason)

    def _execute(self, decision: ScheduleDecision, now: float) -> StepResult:
        """Run a step; with overlap, plan the one behind it meanwhile, and have it running before this one's commit."""
        if self._thread is None:
            return self.executor(decision)
        if self._thread.decision is None:
            self._thread.start(decision)
        waits = self.forcing is not None and self.forcing.is_needed
        if not waits and (self.speculator is None or self.speculator.rests()):
            self.scheduler.plan_ahead(now)
        result = self._thread.wait()
        behind = self.scheduler.advance(result)
        if behind is not None:
            self._thread.start(behind)
        return result

    def _tell_of_drafts(
        self,
        speculator: Speculator,
        decision: ScheduleDecision,
        result: StepResult,
        events: Sequence[TokenEvent],
        seconds: float,
    ) -> None:
        if decision.rows:
            speculator.committed(decision.rows, result.rows, seconds)
        for event in events.others if isinstance(events, StepEvents) else events:
            if event.kind is EventKind.CHOICE_END:
                speculator.ended((event.request_id, event.choice))
            elif event.kind is EventKind.REQUEST_END:
                event.spent = speculator.drafts_of(event.request_id)

    def _measured(self, decision: ScheduleDecision, times: tuple[float, float, float, float], model: float) -> None:
        """Tell the timeline what a step took, if it had anything to run. A failed one's time is its commit's."""
        if decision.rows:
            started, planned, executed, ended = times
            self.scheduler.timeline.record(
                "measured",
                ended,
                step=decision.step,
                plan=_micros(planned - started),
                prepare=_micros(executed - planned - model),
                model=_micros(model),
                commit=_micros(ended - executed),
            )

    def _tell_of_tiers(self, tiers: Tiers, now: float) -> None:
        """Tell the scheduler what moves took and what was lost; now and then, have the index of the disk written."""
        while tiers.moved:
            self.scheduler.observe_swap(*tiers.moved.popleft())
        lost = tiers.take_lost()
        if lost:
            self.scheduler.lose_pages(lost)
        wait = _SAVE_AT_WORK if self.has_work else _SAVE_AT_REST
        if tiers.disk is not None and tiers.disk.is_ahead_of_index and now - self._index_saved >= wait:
            tiers.disk.save(self.kv.host.saved())
            self._index_saved = now

    def flush_cache(self) -> None:
        """Forget what is cached and nobody uses, at the next step; the index of the disk is written with it."""
        self.scheduler.flush_cache()
        if self.speculator is not None:
            self.speculator.flush()
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.disk.is_ahead_of_index = True
            self._index_saved = -math.inf

    def delivered(self, begun: float) -> None:
        """The last step's events became text for readers, from ``begun`` (on this engine's clock) until now."""
        ended = self.clock()
        self.metrics.spent("deliver", ended - begun)
        if not self.idle:
            self.scheduler.timeline.record("delivered", ended, spent=_micros(ended - begun))

    def close(self) -> None:
        """No step follows: end the recording and the thread, if there are any. Idempotent."""
        if self._thread is not None:
            self._thread.close()
        if self.forcing is not None:
            self.forcing.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.disk.close(self.kv.host.saved())

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


def _micros(seconds: float) -> int:
    return max(0, round(1e6 * seconds))
