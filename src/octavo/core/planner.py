"""Planning one step: which branches run, how many tokens each, and the pages for them.

There is one rule: hand out tokens until what is resident reaches what is known. Prefill, chunk, decode, prefix hit and
recompute are all that rule.

    running, steady: one token each, all at once -------------------------------+
    running, decodes first --grant--> reserve by rank, preempting lower ranks --+
    waiting, in policy order --begin (prefix), enter, grant, reserve------------+--> rows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from octavo.core.batch import PageTableDelta
from octavo.core.claims import Claims
from octavo.core.config import SchedulerConfig
from octavo.core.draft import Draft, Outcome
from octavo.core.errors import OutOfPages
from octavo.core.gang import follows, held_back, is_ready, leads, members, units
from octavo.core.gap import GapControl, allowed, spend, take
from octavo.core.kv import KVCacheManager, PrefixHit
from octavo.core.policies import Policy, count_bypass, full_place, service_order
from octavo.core.request import Branch, FinishReason, RequestState, WaitingReason
from octavo.core.roster import Roster, checkpoint
from octavo.core.rows import grant, make_row
from octavo.core.speculation import add_drafts
from octavo.core.steady import SteadyDecodes
from octavo.core.swap_choice import SwapChoice

_DECODING = RequestState.DECODING  # an enum's attribute is looked up slowly


class Planner:
    """Fills drafts. What it changes is in the draft's undo log, except preemptions and the end of a hopeless branch."""

    def __init__(self, config: SchedulerConfig, policy: Policy, kv: KVCacheManager, roster: Roster) -> None:
        self.config = config
        self.gap: GapControl | None = None  # where there is a bound on the gaps between tokens
        self.swap_choice: SwapChoice | None = None  # whether what the host tier has is read back
        self.policy = policy
        self.kv = kv
        self.roster = roster
        self.claims = Claims(config, policy, kv, roster)
        self.steady = SteadyDecodes(config, kv, roster)
        self.least_seconds: Callable[[Branch], float] = lambda branch: 0.0  # that a waiting one takes, alone
        self._awaited: tuple[str, int] | None = None  # who computes what the branch asked last waits for
        self._entered: list[tuple[Branch, PrefixHit]] = []  # last, and what they were attached to

    def fill(self, draft: Draft, budget: int) -> None:
        """Schedule up to ``budget`` tokens."""
        if self.roster.waiting or self.kv.free_pages() < 2 * len(self.roster.running) * len(self.kv.groups):
            self.kv.commit_deferred()
        if draft.held:
            everybody = (*self.roster.running, *self.roster.waiting)
            self._block([branch for branch in everybody if branch.key in draft.held], WaitingReason.GRAMMAR, draft)
        if (self.policy.makes_way or self.roster.num_bulk) and self.roster.waiting and draft.only is None:
            self._make_way(draft)
        steady, rest = self.steady.choose(draft, budget)
        columns = self.steady.decode(steady, draft)
        if columns is None:
            rest = [branch for branch in self.roster.running if draft.allows(branch)]
        if self.gap is not None and (rest or self.roster.waiting):
            draft.allowance = self.gap.open_for(columns, rest)
        spendable = budget - len(draft.steady)
        if rest or self.roster.waiting:
            self._fill_others(rest, draft, spendable)
        if draft.proposed:
            left, chunk = spendable - draft.num_other_tokens, self.config.max_prefill_chunk
            add_drafts(draft, left, chunk, self._reserve, self.roster.until_due)
        draft.copies = self.kv.take_copies()
        draft.rows = tuple(draft.others)
        if columns is not None:
            columns.others, draft.rows = draft.rows, columns

    def _fill_others(self, rest: Sequence[Branch], draft: Draft, budget: int) -> None:
        """Those that run and are not steady, then those that wait."""
        if rest:
            self._serve_all(rest, draft, budget)
        served = len(draft.others)
        self._admit(draft, budget - draft.num_other_tokens)
        if draft.turn is not None and len(draft.others) == served:
            draft.turn = None  # nobody came for whom others were kept out
            self._serve_all(rest, draft, budget - draft.num_other_tokens)

    # -- way for those that have had less than their share

    def _make_way(self, draft: Draft) -> None:
        """If the first in the queue is behind those that run, keep the others' prefills out of its first step, and
        preempt as many as it needs of those that it displaces. Nobody is preempted for what would not fit even then."""
        queue = self._queue(draft, ())
        if not queue:
            return
        head = queue[0]
        turn = self.policy.turn(head)
        victims = self.claims.displaced_by(head)
        if victims is None:
            return
        for victim in filter(leads, victims):
            reason = f"the share of {head.key[0]}/{head.choice}"
            draft.preemptions += self.roster.preempt(victim, draft.now, reason, by=head.key[0])
        if any(self.policy.turn(branch) > turn for branch in self.roster.running):
            draft.turn = turn

    # -- running branches, one by one

    def _serve_all(self, branches: Sequence[Branch], draft: Draft, budget: int) -> None:
        """Serve running branches by place and rank; their rows come in the order in which tokens were granted.

        What a branch was granted and finds no pages for goes to those that were granted nothing.
        """
        place = {branch.key: index for index, branch in enumerate(draft.served)}
        rest = [branch for branch in draft.without_rows(branches) if not follows(branch)]
        most = budget + draft.num_other_tokens
        if rest and self.policy.makes_way:
            self.policy.prepare(self.roster.scene(draft.now))
        while rest and (grants := self._share(rest, draft, most - draft.num_other_tokens)):
            place.update((branch.key, len(place) + index) for index, (branch, _) in enumerate(grants))
            for branch, tokens in sorted(grants, key=lambda granted: full_place(self.policy, granted[0])):
                self._serve(branch, tokens, draft)
            rest = [branch for branch in rest if branch.key not in place and branch.slot is not None]
        order = sorted(range(len(draft.others)), key=lambda i: place[draft.served[i].key])
        draft.others = [draft.others[i] for i in order]
        draft.served = [draft.served[i] for i in order]

    def _share(self, ranked: Sequence[Branch], draft: Draft, budget: int) -> list[tuple[Branch, int]]:
        """Grants for the running: those that starve by longest wait, then decodes and prefills by rank."""
        oldest = draft.step - self.config.stall_steps
        stalled = sorted((branch for branch in ranked if branch.last_step <= oldest), key=lambda b: b.last_step)
        grants: list[tuple[Branch, int]] = []
        if draft.turn is not None:
            ranked = [b for b in ranked if b.state is _DECODING or self.policy.turn(b) <= draft.turn or b in stalled]
        for group in (*units(stalled), [branch for branch in ranked if branch.last_step > oldest]):
            left = budget - sum(tokens for _, tokens in grants)
            if group and left > 0:
                batch = grant(group, left, self.config.max_running_requests, self.config.max_prefill_chunk)
                batch = [(b, self.roster.bounded(b, tokens)) for b, tokens in batch]
                cut = [(b, tokens if is_ready(b) else take(draft.allowance, b, tokens)) for b, tokens in batch]
                grants += [each for each in cut if each[1]]
        return grants

    def _serve(self, branch: Branch, tokens: int, draft: Draft) -> None:
        """Reserve pages for a running branch, preempting branches of lower rank if it must, and add its row."""
        if branch.slot is None:
            return  # preempted for a branch before it
        if is_ready(branch):
            if leads(branch):
                self._serve_gang(members(branch), draft)
            return
        while (deltas := self._reserve_or_preempt(branch, tokens, draft)) is None:
            if tokens == 1:
                self._go_without(branch, draft)
                return
            tokens //= 2
        self._add_row(branch, tokens, deltas, draft)

    def _serve_gang(self, gang: Sequence[Branch], draft: Draft) -> None:
        """A token for every member, or for none."""
        mark, found = draft.undo.mark(), []
        for branch in gang:
            deltas = self._reserve_or_preempt(branch, 1, draft)
            if deltas is None:
                draft.undo.rollback_to(mark)
                self._go_without(branch, draft)
                return
            found.append(deltas)
        for branch, deltas in zip(gang, found, strict=True):
            self._add_row(branch, 1, deltas, draft)

    def _reserve_or_preempt(self, branch: Branch, tokens: int, draft: Draft) -> tuple[PageTableDelta, ...] | None:
        """`_reserve`, and preempt branches of lower rank while there are too few pages."""
        while (deltas := self._reserve(branch, tokens, draft)) is None:
            victim = self._victim(branch, draft)
            if victim is None:
                return None
            reason = f"pages for {branch.key[0]}/{branch.choice}"
            draft.preemptions += self.roster.preempt(victim, draft.now, reason, by=branch.key[0])
        return deltas

    def _go_without(self, branch: Branch, draft: Draft) -> None:
        """There are no pages for a running branch: it waits for some, or, alone, begins again."""
        gang = members(branch)
        if len(self.roster.running) == len(gang) and not draft.branches:
            self._restart_alone(branch, draft)
            return
        self._block(gang if is_ready(branch) else [branch], WaitingReason.KV, draft)

    def _victim(self, branch: Branch, draft: Draft) -> Branch | None:
        """The last running branch after ``branch`` that holds pages, has no row and is not protected."""
        gangs = [served.request for served in (branch, *draft.served) if served.request.gang]  # stand and fall together
        others = [b for b in draft.without_rows(self.roster.running) if b.kv_blocks and not self.claims.protected(b)]
        others = [b for b in others if b.request not in gangs]
        last = max(others, key=partial(full_place, self.policy), default=None)
        return last if last and full_place(self.policy, last) > full_place(self.policy, branch) else None

    def _restart_alone(self, branch: Branch, draft: Draft) -> None:
        """Nobody else holds a page and there is none: shared pages are in the way, or the pool is too small."""
        if branch.use_prefix:
            for member in members(branch):
                member.use_prefix = False
            draft.preemptions += self.roster.preempt(branch, draft.now, "restart without shared pages")
        else:
            self._fail_out_of_memory(branch, draft)

    def _fail_out_of_memory(self, branch: Branch, draft: Draft) -> None:
        error = f"{branch.num_tokens} tokens need more pages than the pool has"
        for member in members(branch):
            self.roster.abandon(member, RequestState.FAILED, FinishReason.OUT_OF_MEMORY, draft.now, error)

    # -- waiting branches

    def _admit(self, draft: Draft, budget: int) -> None:
        """Admit waiting branches in order until one does not fit. One that waits for a prefix holds up nobody."""
        if budget <= 0 or not self.roster.num_free_slots or not self.roster.waiting:
            return
        tried: set[tuple[str, int]] = set()
        queue = self._queue(draft, tried)
        while queue and not draft.prefill_is_spent:
            branch = queue.popleft()
            gang, before = members(branch), draft.num_other_tokens
            tried.add(branch.key)
            ended = not branch.is_live  # with another choice of its request
            if ended or (self.policy.sheds and self._shed(branch, draft.now)):
                continue
            if len(gang) > self.roster.num_free_slots:
                return
            outcome = self._try_enter(branch, budget, draft)
            if outcome is Outcome.LATER:
                return
            if outcome is Outcome.NO_ROOM:
                self._block(gang, WaitingReason.KV, draft)
                return
            if outcome is Outcome.WAITS:
                self._block(gang, WaitingReason.PREFIX, draft)
                continue
            for member, hit in self._entered:
                self._record_entry(member, draft, hit)
            budget -= draft.num_other_tokens - before
            count_bypass(self.roster.waiting, branch, draft.undo, self.policy.ages_by_tenant)
            if budget <= 0 or not self.roster.num_free_slots or self._somebody_is_due():
                return
            if self.policy.changes_as_it_admits:
                queue = self._queue(draft, tried)

    def _shed(self, branch: Branch, now: float) -> bool:
        """End a request that cannot be done by its deadline before it costs anything: no choice of it runs."""
        deadline, takes = branch.request.deadline, self.least_seconds(branch)
        if deadline is None or now + takes <= deadline or any(b.slot is not None for b in branch.request.branches):
            return False
        error = f"it takes {takes:.3f} s at least and its deadline is in {deadline - now:.3f} s"
        self.roster.timeline.record("shed", now, request=branch.key[0], reason=error, deadline=deadline)
        self.roster.abandon_request(branch.request, RequestState.CANCELLED, FinishReason.REJECTED, now, error)
        return True

    def _queue(self, draft: Draft, tried: Collection[tuple[str, int]]) -> deque[Branch]:
        """Who may be admitted, in order, without those that this plan has looked at. Age needs no turn."""
        left = [b for b in self.roster.waiting if draft.allows(b) and b.key not in tried and leads(b)]
        left = [b for b in left if not b.awaits_scores]
        self.policy.prepare(self.roster.scene(draft.now))
        order = service_order(left, self.policy, self.config.bypass_limit)
        if draft.turn is not None:
            aged = self.config.bypass_limit
            order = [b for b in order if self.policy.turn(b) <= draft.turn or b.bypassed >= aged]
        return deque(order)

    def _record_entry(self, branch: Branch, draft: Draft, back: PrefixHit) -> None:
        where = {"request": branch.key[0], "choice": branch.choice, "slot": branch.slot}
        cached = branch.num_resident_tokens
        self.roster.timeline.record("admit", draft.now, **where, cached=cached, times=branch.admissions)
        if back.restored_pages:
            del where["slot"]
            tier = "disk" if back.from_disk else "host"
            moved = {"pages": back.restored_pages, "tokens": back.restored, "tier": tier}
            self.roster.timeline.record("swap_in", draft.now, **where, **moved)

    def _block(self, branches: Sequence[Branch], reason: WaitingReason, draft: Draft) -> None:
        for branch in [branch for branch in branches if branch.is_live]:
            if branch.waiting_reason is not reason:
                blocked = {"request": branch.key[0], "choice": branch.choice, "why": reason.value}
                on = self._awaited if reason is WaitingReason.PREFIX else None
                self.roster.timeline.record("wait", draft.now, **blocked, on=on and on[0])
            draft.undo.push(checkpoint(branch))
            branch.waiting_reason = reason
            branch.prefix_waits += reason is WaitingReason.PREFIX

    def _somebody_is_due(self) -> bool:
        """True if a waiting branch has been passed as often as may be: the next step serves it first."""
        return any(branch.bypassed >= self.config.bypass_limit for branch in self.roster.waiting)

    def _try_enter(self, branch: Branch, budget: int, draft: Draft) -> Outcome:
        """Enter a waiting branch; if nobody else runs, without the prefix cache before giving up."""
        patient = branch.prefix_waits < self.config.prefix_wait_steps and branch.bypassed < self.config.bypass_limit
        use_prefix = branch.takes_prefix and not self.claims.protected(branch)
        outcome = self._enter(branch, budget, draft, use_prefix, patient)
        if outcome is not Outcome.NO_ROOM or self.roster.running:
            return outcome
        if use_prefix:
            outcome = self._enter(branch, budget, draft, False, patient)
        if outcome is Outcome.NO_ROOM:
            self._fail_out_of_memory(branch, draft)
        return outcome

    def _enter(self, branch: Branch, budget: int, draft: Draft, use_prefix: bool, patient: bool) -> Outcome:
        """Attach the prefix, take a slot, reserve the first chunk; or leave all as it was."""
        mark, rows, gang = draft.undo.mark(), len(draft.others), members(branch)
        alone, self._entered = not self.roster.running, []
        for member in gang:
            hit = PrefixHit() if follows(member) else self._begin(member, draft, use_prefix, patient)
            if not isinstance(hit, PrefixHit):
                draft.undo.rollback_to(mark)
                return hit
            self.roster.enter(member, draft.step, draft.undo)
            member.num_resident_tokens, member.kv_blocks = hit.num_tokens, self.kv.num_branch_pages(member.key)
            if member.admissions == 1:
                cached = member.num_prompt_tokens if follows(member) else hit.num_tokens
                member.num_cached_tokens = min(cached, member.num_prompt_tokens)
            self._entered.append((member, hit))
        fits = alone or self.claims.all_fit()
        outcome = self._start_all(self._entered, budget, draft) if fits else Outcome.NO_ROOM
        if outcome is not Outcome.ENTERED:
            draft.undo.rollback_to(mark)
            del draft.others[rows:], draft.served[rows:]
        return outcome

    def _begin(self, branch: Branch, draft: Draft, use_prefix: bool, patient: bool) -> PrefixHit | Outcome:
        """The attached prefix, or why there is none. An impatient branch computes rather than waits."""
        try:
            hit = self.kv.begin(
                branch.key,
                branch.request.namespace,
                branch.token_ids,
                draft.now,
                draft.undo,
                use_prefix=use_prefix,
                may_wait=patient,
                restores=None if self.swap_choice is None else self.swap_choice.restores(branch),
            )
        except OutOfPages:
            return Outcome.NO_ROOM
        self._awaited = hit.awaited
        return Outcome.WAITS if hit.wait else hit

    def _start_all(self, entered: Sequence[tuple[Branch, PrefixHit]], budget: int, draft: Draft) -> Outcome:
        """First rows: of a gang, for all if they draw, else for as many as there are tokens for, but one."""
        ready, outcome = is_ready(entered[0][0]), Outcome.LATER
        if ready and budget < len(entered):
            return Outcome.LATER
        for branch, hit in entered:
            if follows(branch) or branch.num_missing_tokens == held_back(branch):
                continue
            started = self._start(branch, budget, draft, hit) if budget else Outcome.LATER
            if started is Outcome.LATER and not ready:
                break
            if started is not Outcome.ENTERED:
                return started
            outcome, budget = Outcome.ENTERED, budget - draft.others[-1].num_scheduled_tokens
        return outcome

    def _start(self, branch: Branch, budget: int, draft: Draft, hit: PrefixHit) -> Outcome:
        """Reserve and add the first row of a branch that has just entered."""
        wanted = min(branch.num_missing_tokens - held_back(branch), budget, self.config.max_prefill_chunk)
        wanted = self.roster.bounded(branch, wanted)
        tokens = wanted if is_ready(branch) or not wanted else allowed(draft.allowance, branch, wanted)
        if not tokens:
            return Outcome.LATER
        while (deltas := self._reserve(branch, tokens, draft)) is None:
            if tokens == 1:
                return Outcome.NO_ROOM
            tokens //= 2
        spend(draft.allowance, branch, tokens, wanted)
        self._add_row(branch, tokens, deltas, draft, hit)
        return Outcome.ENTERED

    # -- pages and rows

    def _reserve(self, branch: Branch, tokens: int, draft: Draft) -> tuple[PageTableDelta, ...] | None:
        """``_take_pages``, but none that protected branches have a claim on."""
        mark = draft.undo.mark()
        draft.undo.push(checkpoint(branch))
        deltas = self.steady.take_pages(branch, tokens, draft)
        if deltas is None or (deltas and self.claims.of_others(branch) > self.kv.free_pages()):
            draft.undo.rollback_to(mark)
            return None
        return deltas

    def _add_row(
        self,
        branch: Branch,
        tokens: int,
        deltas: tuple[PageTableDelta, ...],
        draft: Draft,
        hit: PrefixHit | None = None,
    ) -> None:
        if branch.request.gang:
            hit = self._add_to_gang(branch, tokens, draft, hit)
        self.roster.computing(branch, draft.undo)
        row = make_row(branch, tokens, deltas, hit)
        row.compaction = self.kv.compaction_of(branch.key)
        branch.last_step, branch.needs_init = draft.step, False
        branch.waiting_reason = WaitingReason.NONE
        draft.others.append(row)
        draft.served.append(branch)

    def _add_to_gang(self, branch: Branch, tokens: int, draft: Draft, hit: PrefixHit | None) -> PrefixHit | None:
        """Who serves one serves all. What a member was attached to may come to matter only now."""
        for member in members(branch):
            if member.last_step != draft.step:
                draft.undo.push(checkpoint(member))
                member.last_step = draft.step
        if hit is None and self.kv.has_written(branch.key, branch.num_resident_tokens + tokens):
            return PrefixHit(no_write=True)
        return hit
