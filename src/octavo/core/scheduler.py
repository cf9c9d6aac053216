"""Continuous batching: requests in, steps out, tokens in, events out.

    submit / cancel / stop -> inbox --+
                                      v
                    plan(now) -> ScheduleDecision -> (the runner executes) -> commit(result) -> events
                                                                           -> rollback(error) -> events

Only `plan`, `commit` and `rollback` change anything: what arrives while a step is in flight waits in the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from octavo.core.admission import check_request, default_seed
from octavo.core.batch import DrawnRows, ScheduleDecision, StepResult, build_batch
from octavo.core.config import SchedulerConfig
from octavo.core.draft import BranchKey, Draft
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import CorruptPages, InvalidInput, RowError
from octavo.core.events import TokenEvent
from octavo.core.facts import facts_of
from octavo.core.forecast import SURE, prefill_rate, prefill_seconds
from octavo.core.gap import GapControl
from octavo.core.kv import KVCacheManager
from octavo.core.kv_swaps import NO_SWAPS
from octavo.core.params import MAX_COUNT, check_int
from octavo.core.planner import Planner
from octavo.core.policies import make_policy
from octavo.core.request import Branch, FinishReason, Request, RequestState
from octavo.core.roster import Roster
from octavo.core.rows import UNKNOWN
from octavo.core.speculation import Guess, check_drafts, facts_of_drafts
from octavo.core.step import Committer, Isolation, fail_request
from octavo.core.step_model import StepModel, StepWork, work_of
from octavo.core.swap_choice import SwapChoice
from octavo.core.timeline import Timeline

__all__ = ["ContinuousBatchScheduler", "SchedulerConfig", "build_batch"]

Executor = Callable[[ScheduleDecision], StepResult]


class ContinuousBatchScheduler:
    """Hands out a token budget, step by step, until every request's resident tokens reach its known tokens.

    Bounds that hold whatever arrives:
    - At most ``bypass_limit`` later arrivals are admitted before a waiting sequence; under ``fcfs`` none, except while
      it waits, at most ``prefix_wait_steps`` steps, for a prefix that another one is computing.
    - A running sequence with pages gets a token at least every ``stall_steps + max_running_requests`` steps.
    - A sequence is preempted at most ``max_preemptions`` times. The one of the highest rank is preempted by nobody, and
      a protected one is admitted only with a claim on all pages that it may need, so somebody always progresses.

    ``executor`` is what `step` runs; ``seed_source`` draws the seed of a request without one (default: from its id).
    """

    def __init__(
        self,
        kv: KVCacheManager,
        config: SchedulerConfig | None = None,
        *,
        vocab_size: int | None = None,
        executor: Executor | None = None,
        model: str = "",
        seed_source: Callable[[], int] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.kv = kv
        self.config = config or SchedulerConfig()
        self.vocab_size = vocab_size
        self.executor = executor
        self.model = model
        self.timeline = Timeline() if timeline is None else timeline
        self.policy = make_policy(self.config.policy)
        self.steps = 0
        self._seed_source = seed_source
        self.roster = self._roster = Roster(
            kv, self.config.max_running_requests, self.timeline, self.policy, self.config.policies
        )
        self.step_model = StepModel()
        bound = self.config.max_token_gap_ms / 1000.0
        self.gap = GapControl(bound, self.step_model) if bound else None  # the bound on token gaps, if there is one
        self.last_work = StepWork()  # of the last step that was committed
        self._unmeasured: StepWork | None = None  # the same until its time is known
        self._planner = Planner(self.config, self.policy, kv, self._roster)
        self._planner.gap = self.gap
        self._planner.least_seconds = self.least_seconds
        self.swap_choice = SwapChoice(self.config, kv, self.step_model)
        self._planner.swap_choice = self._roster.swap_choice = self.swap_choice
        self._committer = Committer(kv, self._roster, vocab_size)
        self._isolation = Isolation()
        self._in_flight: Draft | None = None
        self._ahead: Draft | None = None  # behind the step in flight
        self._inbox: list[Callable[[float], object]] = []
        self._queued_ids: dict[str, Request] = {}  # in the inbox
        self._proposed: dict[BranchKey, DraftTree] = {}  # drafts, for the next plan
        self._held: tuple[BranchKey, ...] = ()  # whom the next plan leaves out

    # -- what the outside asks

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ``InvalidInput`` for one that can never be served (see `check_request`) or whose id
        belongs to a live request or to one of the last that ended.
        """
        limit = check_request(request, self.config, self.kv, self.vocab_size)
        request_id = request.request_id
        if request_id in self._queued_ids or self._roster.knows(request_id):
            raise InvalidInput("request_id", request_id, "give an id that was not used before")
        request.token_limit = limit
        if request.seed is None:
            request.seed = self._seed_source() if self._seed_source else default_seed(request_id)
        if self.timeline.has_listeners:
            values = {"request": request_id, "prompt": request.prompt_token_ids, "facts": facts_of(request)}
            self.timeline.tell("arrive", request.arrival, **values)
        self._queued_ids[request_id] = request
        self._inbox.append(partial(self._apply_submit, request))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request in whatever state it is: after the next `plan` or `commit` it has no token event and no page.

        Idempotent: nothing happens for a request that has ended or is not known. ``reason`` may be ``timeout``.
        """
        reason = FinishReason(reason)
        if self.get(request_id) is not None:
            self.timeline.record("ask_cancel", self.timeline.now, request=request_id, reason=reason.value)
        self._inbox.append(partial(self._apply_cancel, request_id, reason))

    def stop(self, request_id: str, choice: int, num_output_tokens: int, stop_reason: int | str | None = None) -> None:
        """The text layer found a stop string: the choice ends after ``num_output_tokens`` tokens, reason ``stop``.

        What lies beyond is excluded from usage, events and cache. Idempotent; nothing happens for a choice that has
        ended (a token limit may have ended it in the same step).
        """
        check_int("num_output_tokens", num_output_tokens, 0, MAX_COUNT)
        if self.get(request_id) is not None:
            asked = {"request": request_id, "choice": choice, "tokens": num_output_tokens, "stop_reason": stop_reason}
            self.timeline.record("ask_stop", self.timeline.now, **asked)
        self._inbox.append(partial(self._apply_stop, request_id, choice, num_output_tokens, stop_reason))

    def observe(self, seconds: float) -> None:
        """The last committed step took so long: from the end of the step before it, if that came right before.

        This is an input, and recorded as one (`observed`): the step model learns from it.
        """
        work, self._unmeasured = self._unmeasured, None
        if work is None:
            return
        self.timeline.record("observed", self.timeline.now, seconds=seconds)
        if self.gap is not None:
            self.gap.observe(work, seconds)
        self.step_model.observe(work, seconds)

    def observe_swap(self, tier: str, pages: int, seconds: float) -> None:
        """So many pages came back from a tier in one step, in so many seconds: an input, recorded as one (`moved`)."""
        self.timeline.record("moved", self.timeline.now, tier=tier, pages=pages, seconds=seconds)
        self.swap_choice.observe(tier, pages, seconds)

    def lose_pages(self, pages: Sequence[int]) -> None:
        """Pages of the host tier do not hold what was to be written there: an input, recorded as one (`lost`)."""
        self.timeline.record("lost", self.timeline.now, pages=list(pages))
        self._inbox.append(lambda now: self.kv.lose_host_pages(pages))

    def flush_cache(self) -> None:
        """Have all that is cached, and nobody uses, forgotten in every tier: an input, recorded as one (`flush`)."""
        self.timeline.record("flush", self.timeline.now)
        self._inbox.append(lambda now: self.kv.flush_prefix_cache())

    def propose(self, drafts: Mapping[BranchKey, Guess]) -> None:
        """Tokens that branches may draw next, for the next plan: an input, recorded as one (`drafts`).

        They change no token. Raises ``InvalidInput`` for a token that is not in the vocabulary.
        """
        self._proposed = check_drafts(drafts, self.vocab_size)
        if self._proposed:
            self.timeline.record("drafts", self.timeline.now, drafts=facts_of_drafts(self._proposed))

    def hold(self, keys: Iterable[BranchKey]) -> None:
        """Whom the next plan leaves out, as it is not known yet what their grammars allow: an input (`held`).

        They keep their pages, if nobody needs them more, and change no token of anybody.
        """
        self._held = tuple(keys)
        if self._held:
            self.timeline.record("held", self.timeline.now, held=[list(key) for key in self._held])

    def least_seconds(self, branch: Branch) -> float:
        """Seconds until a waiting branch with a deadline could have its first token, alone; 0 while that is unknown."""
        if branch.request.deadline is None or not self.step_model.is_fitted:
            return 0.0
        cached = 0
        if branch.takes_prefix:
            cached = min(self.kv.match_length(branch.request.namespace, branch.token_ids), branch.num_tokens - 1)
        missing, chunk = branch.num_tokens - cached, self.config.max_prefill_chunk
        return SURE * prefill_seconds(self.step_model, missing, cached, chunk)

    def prefill_rate(self) -> float:
        """Prompt tokens a second, as steps are foretold beside what decodes now; 0 while that is not known."""
        config, beside = self.config, self.last_work
        tokens = config.max_batched_tokens - beside.decodes
        if self.gap is not None and beside.decodes:
            tokens = min(tokens, self.gap.affordable(beside.decodes, beside.context, config.max_prefill_chunk))
        return prefill_rate(self.step_model, beside, tokens, config.max_prefill_chunk)

    @property
    def has_work(self) -> bool:
        """True while a request lives or the inbox holds something."""
        return bool(self._inbox or self._roster.requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._roster.running)

    def running(self) -> Sequence[Branch]:
        """Sequences with a slot, by rank."""
        return self._roster.running

    @property
    def events(self) -> list[TokenEvent]:
        """Events that were not drained yet, oldest first."""
        return self._roster.events.pending

    def drain_events(self) -> list[TokenEvent]:
        """Take all pending events, oldest first."""
        return list(self._roster.events.take())

    def get(self, request_id: str) -> Request | None:
        """A live or queued request."""
        return self._roster.requests.get(request_id) or self._queued_ids.get(request_id)

    def adapters_in_use(self) -> frozenset[str]:
        """Adapters of requests that live or wait in the inbox, and of the rows of steps that are under way."""
        drafts = [draft for draft in (self._in_flight, self._ahead) if draft is not None]
        rows = [branch.request for draft in drafts for branch in (*draft.steady, *draft.served)]
        asked = (*self._roster.requests.values(), *self._queued_ids.values(), *rows)
        return frozenset(request.adapter for request in asked if request.adapter)

    # -- the transaction

    def plan(self, now: float = 0.0, budget_tokens: int | None = None) -> ScheduleDecision:
        """Reserve what the next step needs and say what it does. ``budget_tokens``: at most so many tokens.

        A decision without rows needs no commit. Raises ``InvalidInput`` for a budget below 1, and while a step is in
        flight.
        """
        budget = self.config.max_batched_tokens
        if budget_tokens is not None:
            budget = min(budget, check_int("budget_tokens", budget_tokens, 1, MAX_COUNT))
        if self._in_flight is not None:
            raise InvalidInput("plan", f"step {self._in_flight.step} in flight", "commit it or roll it back first")
        self._apply_inbox(now)
        if self._roster.is_somebody_late(now):
            self._roster.expire(now)
        draft = self._fill_draft(now, budget)
        decision = self._decide(draft, budget_tokens)
        if decision.rows:
            self.kv.start_step(draft.step)
            self._in_flight = draft
        return decision

    def plan_ahead(self, now: float = 0.0) -> bool:
        """Plan the step behind the one in flight, if that only decodes and nobody waits; whether there is one now.

        All of it is known but the tokens that the step in flight draws: `advance` puts them in. Who turns out to have
        ended is computed once too often: no event tells of it, and its pages are not reused before that step is done.
        """
        flying = self._in_flight
        if flying is None or self._ahead is not None or self._inbox or self._isolation.is_active:
            return False
        draft = Draft(self.steps + 1, now, self._isolation.next_group(), self._roster.puts_off_bulk(self.steps + 1))
        if self._roster.is_somebody_late(now) or not self._planner.steady.fill_ahead(draft, flying):  # `plan` ends it
            return False
        self.steps += 1
        draft.swaps = self.kv.take_swaps(draft.undo)
        draft.tell_moves(self.timeline)
        self.kv.start_step(draft.step)
        self._ahead = draft
        self.timeline.record("ahead", now, step=draft.step, decodes=draft.decodes, free=self.kv.free_pages())
        return True

    def advance(self, result: StepResult) -> ScheduleDecision | None:
        """The step in flight has this result, to be committed next: the step behind it, ready to run.

        None if there is none, or if the result holds more than a token for each row: then it is taken back.
        """
        draft, flying, rows = self._ahead, self._in_flight, result.rows
        if draft is None or flying is None:
            return None
        if not isinstance(rows, DrawnRows) or len(rows.ids) != len(flying.steady) or min(rows.ids) < 0:
            self._drop_ahead()
            return None
        draft.columns.token_ids = [rows.ids[index] for index in draft.behind]
        return draft.decision(self.model, 0, self.num_running)

    def commit(self, result: StepResult, now: float = 0.0) -> Sequence[TokenEvent]:
        """Apply the result of the step in flight; all pending events. Raises ``InvalidInput`` for another's result."""
        self._commit(result, now)
        return self._roster.events.take()

    def rollback(self, error: Exception, now: float = 0.0) -> list[TokenEvent]:
        """The step in flight failed: take it back and charge the error; all pending events.

        The requests of the rows that a ``RowError`` names fail with reason ``error``. Any other error is retried by
        halves until the culprit stands alone, and fails. Everybody else goes on with the same tokens. Evictions and
        preemptions are not taken back: the failed step may have overwritten their pages.
        """
        self._rollback(error, now)
        return self.drain_events()

    def step(self, budget_tokens: int, now: float = 0.0) -> ScheduleDecision:
        """Plan, execute with the injected executor, commit (or roll back); events stay until drained.

        Raises ``InvalidInput`` for a budget below 1 or without an executor.
        """
        check_int("budget_tokens", budget_tokens, 1, MAX_COUNT)
        if self.executor is None:
            raise InvalidInput("executor", None, "give the scheduler an executor, or call plan and commit")
        decision = self.plan(now, budget_tokens)
        if decision.rows:
            try:
                self._commit(self.executor(decision), now)
            except Exception as error:
                if self._in_flight is None:
                    raise
                self._rollback(error, now)
        return decision

    def audit(self) -> None:
        """Check queues, slots, states and pages against each other. Raises ``InvariantBroken``."""
        self._roster.audit()
        self.kv.audit()

    # -- inside

    def _fill_draft(self, now: float, budget: int) -> Draft:
        held, self._held = self._held, ()
        while True:
            self.steps += 1
            draft = Draft(self.steps, now, self._isolation.next_group(), self._roster.puts_off_bulk(self.steps), held)
            if self._proposed:
                draft.proposed, self._proposed = self._proposed, {}
            self._planner.fill(draft, budget)
            if draft.rows or not self._isolation.is_active:
                return draft
            self._isolation.clear_group()  # cancelled in between, or without pages for now

    def _decide(self, draft: Draft, budget: int | None) -> ScheduleDecision:
        roster = self._roster
        if draft.rows:
            draft.swaps = self.kv.take_swaps(draft.undo)
        freed = roster.take_freed_slots(draft.undo) if draft.rows and roster.freed_slots else ()
        decision = draft.decision(self.model, len(roster.waiting), len(roster.running), freed)
        if draft.copies or draft.swaps is not NO_SWAPS:
            draft.tell_moves(self.timeline)
        draft.tell(self.timeline, decision, self.kv.free_pages(), budget)
        return decision

    def _commit(self, result: StepResult, now: float) -> None:
        draft = self._in_flight
        if draft is None:
            if result.rows:
                raise InvalidInput("result", f"step {result.step}", "plan a step first")
            return
        self._committer.check(draft, result)
        if self._ahead is not None and UNKNOWN in self._ahead.columns.token_ids:
            self._drop_ahead()
        self._in_flight = None
        self._apply_inbox(now)
        draft.undo.clear()
        self._committer.apply(draft, result, now)
        self._isolation.clear_group()
        self._end_search()
        self.last_work = self._unmeasured = work_of(draft.rows)
        if self.gap is not None and draft.allowance is not None:
            self.gap.close(self.last_work, draft.allowance)
        self._in_flight, self._ahead = self._ahead, None

    def _drop_ahead(self) -> None:
        """Take back the step behind the one in flight, if there is one: it has not run."""
        draft, self._ahead = self._ahead, None
        if draft is not None:
            draft.undo.rollback()
            self.kv.end_step(draft.step)

    def _rollback(self, error: Exception, now: float) -> None:
        draft = self._in_flight
        if draft is None:
            raise InvalidInput("rollback", str(error), "plan a step first")
        self._drop_ahead()
        self._in_flight = None
        draft.undo.rollback()
        self.kv.end_step(draft.step)
        text = f"{type(error).__name__}: {error}"[:500]
        blamed = list(error.rows) if isinstance(error, RowError) else None
        corrupt = list(error.pages) if isinstance(error, CorruptPages) else None
        self.kv.lose_host_pages(corrupt or ())
        self.timeline.record("rollback", now, step=draft.step, error=text, rows=blamed, corrupt=corrupt)
        for branch in self._isolation.charge(draft, error):
            fail_request(self._roster, branch, text, now)
        self._apply_inbox(now)
        self._end_search()

    def _end_search(self) -> None:
        """Nobody is left of those among whom a culprit was looked for: at idle nothing names them."""
        if not self._roster.requests:
            self._isolation.clear()

    def _apply_inbox(self, now: float) -> None:
        inbox, self._inbox = self._inbox, []
        for apply in inbox:
            apply(now)

    def _apply_submit(self, request: Request, now: float) -> None:
        del self._queued_ids[request.request_id]
        self._roster.add(request, now)

    def _apply_cancel(self, request_id: str, reason: FinishReason, now: float) -> None:
        request = self._roster.requests.get(request_id)
        if request is not None:
            self._roster.abandon_request(request, RequestState.CANCELLED, reason, now)

    def _apply_stop(
        self, request_id: str, choice: int, num_output_tokens: int, stop_reason: int | str | None, now: float
    ) -> None:
        request = self._roster.requests.get(request_id)
        if request is None or not 0 <= choice < len(request.branches):
            return
        branch = request.branches[choice]
        if branch.is_live and not request.gang:  # nobody was told of its text
            drawn = branch.num_output_tokens
            branch.truncate_at(num_output_tokens)
            kept = branch.num_output_tokens
            self.timeline.record("stop", now, request=request_id, choice=choice, tokens=kept, late=drawn - kept)
            self._roster.finish(branch, FinishReason.STOP, stop_reason, now)
