"""Who waits, who runs, who has ended: queues, slots, terminal events. Pages, state and events change together here."""

from __future__ import annotations

from base64 import b64encode
from bisect import insort
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from operator import attrgetter

from octavo.core.batch import GangEnding, Preemption, TokenLogprobs
from octavo.core.bulk import bulk_chunk, is_put_off
from octavo.core.errors import InvariantBroken
from octavo.core.events import EventKind, EventLog, TokenEvent
from octavo.core.gang import members
from octavo.core.kv import KVCacheManager
from octavo.core.policies import Policy, PolicySettings, Scene, full_rank
from octavo.core.request import QUEUED, RUNNING, Branch, FinishReason, Request, RequestState
from octavo.core.swap_choice import SwapChoice
from octavo.core.timeline import Timeline
from octavo.core.undo import UndoLog

REMEMBERED_IDS = 4096


class Roster:
    """The requests of one scheduler.

    A live branch is in ``waiting`` (and owns nothing) or in ``running`` (and owns a slot and pages), never in both.
    ``running`` is in order of rank. ``events`` holds what happened, in order, until it is taken.
    """

    def __init__(
        self, kv: KVCacheManager, max_running: int, timeline: Timeline, policy: Policy, settings: PolicySettings
    ) -> None:
        self.kv = kv
        self.timeline = timeline
        self.policy, self.settings = policy, settings
        self.swap_choice: SwapChoice | None = None  # how those that are preempted come back
        self.max_running = max_running
        self.requests: dict[str, Request] = {}
        self.num_bulk = 0  # of these
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        self.events = EventLog()
        self.freed_slots: list[int] = []  # since the last decision
        self._free_slots = list(range(max_running))
        heapify(self._free_slots)
        self._ended: dict[str, None] = {}  # in order of ending; bounded
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, str]] = []  # a heap: (deadline, arrival, request)

    def scene(self, now: float) -> Scene:
        """What a policy looks at."""
        return Scene(self.kv, self.waiting, self.running, now, self.max_running, self.settings)

    @property
    def num_free_slots(self) -> int:
        """How many more branches may run."""
        return len(self._free_slots)

    def puts_off_bulk(self, step: int) -> bool:
        """Whether a step is for others than bulk requests alone."""
        return self.num_bulk > 0 and is_put_off(self.num_bulk, len(self.requests), step)

    def bounded(self, branch: Branch, tokens: int) -> int:
        """``tokens`` of a prompt, or what a bulk request may have of them in one step."""
        tokens = min(tokens, self.until_due(branch))
        if not branch.request.bulk:
            return tokens
        return min(tokens, bulk_chunk(branch, self.running, self.num_bulk == len(self.requests)))

    def until_due(self, branch: Branch) -> int:
        """Tokens that its row may have at most: before the next, something may be forgotten."""
        return self.kv.until_due(branch.num_resident_tokens, branch.num_prompt_tokens)

    def computing(self, branch: Branch, undo: UndoLog) -> None:
        """Have others wait for what a branch computes; for bulk nobody waits."""
        if not branch.request.bulk:
            self.kv.computing(branch.key, branch.token_ids, undo)

    def knows(self, request_id: str) -> bool:
        """True for a live request and for one of the last that ended."""
        return request_id in self.requests or request_id in self._ended

    def add(self, request: Request, now: float) -> None:
        """Queue the live branches of a request that was checked before."""
        self._arrivals += 1
        self.policy.arrived(request, self.scene(now))
        self.requests[request.request_id] = request
        self.num_bulk += request.bulk
        self._watch(request)
        for branch in request.live_branches:
            branch.arrival_index, branch.token_limit = self._arrivals, request.token_limit
            self.waiting.append(branch)
        self.timeline.record(
            "submit",
            now,
            request=request.request_id,
            prompt=len(request.prompt_token_ids),
            choices=len(request.branches),
            arrival=request.arrival,
            tenant=request.tenant or None,
            priority=request.priority or None,
        )

    def enter(self, branch: Branch, step: int, undo: UndoLog) -> None:
        """Move a waiting branch to a slot, ready to prefill; ``undo`` takes it back."""
        undo.push(checkpoint(branch))
        self.waiting.remove(branch)
        if not branch.rank:
            branch.rank = full_rank(self.policy, branch)
        insort(self.running, branch, key=_rank_of)
        slot = heappop(self._free_slots)

        def leave() -> None:
            self.running.remove(branch)
            self.waiting.append(branch)
            heappush(self._free_slots, slot)
            self.freed_slots.append(slot)  # the failed step may have filled it

        undo.push(leave)
        branch.transition(RequestState.ADMITTED)
        branch.transition(RequestState.PREFILLING)
        branch.slot = slot
        branch.last_step = step
        branch.admissions += 1
        branch.prefix_waits = 0

    def preempt(self, branch: Branch, now: float, reason: str, by: str | None = None) -> list[Preemption]:
        """Take the slot and pages of a running branch and its gang, for request ``by`` if for anybody. They wait in
        their old place and compute their tokens again, or get their K/V back from the host tier: then all of it is left
        to the cache.
        """
        return [self._preempt(member, now, reason, by) for member in members(branch)]

    def _preempt(self, branch: Branch, now: float, reason: str, by: str | None) -> Preemption:
        swaps = self.swap_choice is not None and self.swap_choice.swaps(branch)
        if swaps:
            self.kv.finish(branch.key, branch.token_ids, branch.num_resident_tokens, now)
        else:
            self.kv.release_branch(branch.key)
        self._vacate(branch)
        branch.transition(RequestState.SWAPPED if swaps else RequestState.RECOMPUTE)
        branch.kv_blocks = 0
        branch.num_preemptions += 1
        self.waiting.append(branch)
        preemption = Preemption(*branch.key, kind="swap" if swaps else "recompute", reason=reason)
        lost = {"request": branch.key[0], "choice": branch.choice, "reason": reason, "by": by}
        self.timeline.record("preempt", now, **lost, how="swap" if swaps else None)
        return preemption

    def deliver(self, branch: Branch, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Commit one output token and tell of it."""
        branch.append(token_id, logprobs)
        index = branch.num_output_tokens - 1
        branch.num_delivered_tokens = index + 1
        self._emit(branch, EventKind.TOKEN, index=index, token_id=token_id, logprobs=logprobs)

    def finish(
        self,
        branch: Branch,
        reason: FinishReason,
        stop_reason: int | str | None,
        now: float,
        ending: GangEnding | None = None,
    ) -> None:
        """End a choice well: its pages are published, then released. Nothing happens if it has ended.

        ``ending`` is what a choice of a gang said, if that is not what it was going on with.
        """
        if not branch.is_live:
            return
        if branch.state in RUNNING:
            self.kv.finish(branch.key, branch.token_ids, branch.num_resident_tokens, now)
        self._withdraw(branch)
        branch.finish(reason, stop_reason)
        self._tell_end(branch, now, ending)

    def abandon(
        self, branch: Branch, target: RequestState, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """End a choice as cancelled or failed, without publishing anything. Nothing happens if it has ended."""
        if not branch.is_live:
            return
        self.kv.release_branch(branch.key)
        self._withdraw(branch)
        branch.abandon(target, reason, error)
        self._tell_end(branch, now)

    def abandon_request(
        self, request: Request, target: RequestState, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """``abandon`` every choice of a request."""
        for branch in request.branches:
            self.abandon(branch, target, reason, now, error)

    def _watch(self, request: Request) -> None:
        """Keep an eye on its deadline, if it has one; those of what has ended are forgotten now and then."""
        if request.deadline is None:
            return
        heappush(self._deadlines, (request.deadline, self._arrivals, request.request_id))
        if len(self._deadlines) > 2 * len(self.requests) + REMEMBERED_IDS:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self.requests]
            heapify(self._deadlines)

    def is_somebody_late(self, now: float) -> bool:
        """True if `expire` would have something to look at."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def expire(self, now: float) -> None:
        """Cancel, with reason ``timeout``, what is past its deadline."""
        while self.is_somebody_late(now):
            deadline, arrival, request_id = heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.branches[0].arrival_index == arrival:
                error = f"not done by its deadline, {now - deadline:.3f} s ago"
                self.abandon_request(request, RequestState.CANCELLED, FinishReason.TIMEOUT, now, error)

    def take_freed_slots(self, undo: UndoLog) -> tuple[int, ...]:
        """Slots given up since the last decision."""
        freed, self.freed_slots = self.freed_slots, []

        def give_back() -> None:
            self.freed_slots[:0] = freed

        undo.push(give_back)
        return tuple(freed)

    def audit(self) -> None:
        """Raise ``InvariantBroken`` unless queues, slots, states and page counts agree."""
        slots = [branch.slot for branch in self.running]
        if sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) != list(range(self.max_running)):
            raise InvariantBroken(f"slots: running {slots}, free {sorted(self._free_slots)}")
        for gang in [members(b) for b in self.running if b.request.gang]:
            if any(member.slot is None for member in gang) or len({b.num_output_tokens for b in gang}) != 1:
                raise InvariantBroken(f"a gang fell apart: {gang}")
        live = [branch.key for request in self.requests.values() for branch in request.live_branches]
        if sorted(live) != sorted(branch.key for branch in [*self.waiting, *self.running]):
            raise InvariantBroken("live branches differ from those that wait or run")
        for request in self.requests.values():
            if not request.live_branches:
                raise InvariantBroken(f"{request.request_id} has ended and is still listed")
            for branch in request.branches:
                _audit_branch(branch, self.kv)
        if self.running != sorted(self.running, key=_rank_of):
            raise InvariantBroken("the running branches are not in order of rank")
        if any(branch.state not in RUNNING for branch in self.running):
            raise InvariantBroken("a branch runs in a state that owns nothing")

    def _withdraw(self, branch: Branch) -> None:
        if branch.state in QUEUED:
            self.waiting.remove(branch)
        else:
            self._vacate(branch)

    def _vacate(self, branch: Branch) -> None:
        self.running.remove(branch)
        if branch.slot is not None:
            heappush(self._free_slots, branch.slot)
            self.freed_slots.append(branch.slot)

    def _tell_output(self, branch: Branch, ending: GangEnding | None) -> None:
        """Tell all that a choice of a gang said, at its end: nothing, unless it ends well."""
        said = ending or GangEnding(tuple(branch.output_token_ids), logprobs=tuple(branch.logprobs))
        branch.truncate_at(0)
        if branch.state is RequestState.FINISHED:
            scores = said.logprobs if branch.params.wants_logprobs else ()
            for index, token in enumerate(said.token_ids):
                self.deliver(branch, token, scores[index] if scores else None)

    def _tell_end(self, branch: Branch, now: float, ending: GangEnding | None = None) -> None:
        self.policy.ended(branch)
        if branch.request.gang:
            self._tell_output(branch, ending)
        reason = branch.finish_reason
        end = {"finish_reason": None if reason is None else reason.value, "error": branch.error}
        self._emit(
            branch,
            EventKind.CHOICE_END,
            stop_reason=branch.stop_reason,
            hidden=b64encode(branch.hidden).decode(),
            **end,
        )
        kind = "cancel" if branch.state is RequestState.CANCELLED else "finish"
        self.timeline.record(kind, now, request=branch.key[0], choice=branch.choice, **end)
        request = branch.request
        if request.live_branches:
            return
        self.events.append(_request_end(request))
        del self.requests[request.request_id]
        self.num_bulk -= request.bulk
        self._ended[request.request_id] = None
        if len(self._ended) > REMEMBERED_IDS:
            del self._ended[next(iter(self._ended))]

    def _emit(self, branch: Branch, kind: EventKind, **values: object) -> None:
        prompt_logprobs = None
        if branch.params.prompt_logprobs is not None and not branch.prompt_logprobs_delivered:
            scorer = branch.scorer
            if not scorer.wants_prompt_logprobs:
                prompt_logprobs = (None, *scorer.prompt_logprobs)
                branch.prompt_logprobs_delivered = True
        event = TokenEvent(
            request_id=branch.key[0],
            kind=kind,
            choice=branch.choice,
            num_prompt_tokens=branch.num_prompt_tokens,
            num_output_tokens=branch.num_output_tokens,
            num_cached_tokens=branch.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            **values,  # type: ignore[arg-type]
        )
        self.events.append(event)


def checkpoint(branch: Branch) -> Callable[[], None]:
    """A closure that gives a branch back the scheduling fields it has now: what an ``UndoLog`` takes."""
    saved = _planned_values(branch)

    def restore() -> None:
        for name, value in zip(_PLANNED_FIELDS, saved, strict=True):
            setattr(branch, name, value)

    return restore


_rank_of = attrgetter("rank")
_PLANNED_FIELDS = (
    "state",
    "rank",
    "kv_blocks",
    "slot",
    "waiting_reason",
    "num_resident_tokens",
    "num_cached_tokens",
    "admissions",
    "last_step",
    "prefix_waits",
    "needs_init",
)
_planned_values = attrgetter(*_PLANNED_FIELDS)


def _request_end(request: Request) -> TokenEvent:
    first = request.branches[0]
    return TokenEvent(
        request_id=request.request_id,
        kind=EventKind.REQUEST_END,
        finish_reason=None if first.finish_reason is None else first.finish_reason.value,
        stop_reason=first.stop_reason,
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=sum(branch.num_output_tokens for branch in request.branches),
        num_cached_tokens=first.num_cached_tokens,
        error=first.error,
    )


def _audit_branch(branch: Branch, kv: KVCacheManager) -> None:
    if branch.state in RUNNING:
        held = kv.num_branch_pages(branch.key)
        if held != branch.kv_blocks:
            raise InvariantBroken(f"{branch} names {held} pages, counted {branch.kv_blocks}")
        if not branch.num_resident_tokens <= branch.num_tokens:
            raise InvariantBroken(f"{branch} has more K/V than tokens")
    elif branch.kv_blocks or branch.num_resident_tokens or branch.slot is not None:
        raise InvariantBroken(f"{branch} owns pages, K/V or a slot")
